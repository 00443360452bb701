-- leasebus schema 1: the inbox.
-- Another schema than "leasebus": replace the name "leasebus", quotes included, everywhere in this file.

CREATE SCHEMA IF NOT EXISTS "leasebus";

-- One line for each migration that was applied. serves is the lowest version of a runtime's schema that still works
-- with this one, so that processes of the last release can be restarted after it.
CREATE TABLE "leasebus".schema_version (
  version    int         NOT NULL PRIMARY KEY,
  serves     int         NOT NULL,
  applied_at timestamptz NOT NULL DEFAULT statement_timestamp()
);

-- Names of queues, so that a message carries four bytes instead.
CREATE TABLE "leasebus".queue (
  id   int  GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text NOT NULL UNIQUE
);

-- What is pending or processing. It has one index, and nothing in it that changes during a lease, so that leasing and
-- renewing are updates in place: fillfactor leaves the room for them. pos is the order of claiming.
-- Pending: lease_owner is null, visible_at is when the message was due. Processing: visible_at is the lease's end.
CREATE TABLE "leasebus".ready (
  pos         bigint      GENERATED ALWAYS AS IDENTITY,
  visible_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
  lease_owner bigint,
  first_due   timestamptz NOT NULL DEFAULT statement_timestamp(),
  id          uuid        NOT NULL,
  queue       int         NOT NULL,
  generation  int         NOT NULL DEFAULT 0,
  attempt     int         NOT NULL DEFAULT 0,
  type        text        NOT NULL,
  headers     bytea,
  state       bytea,
  payload     bytea       NOT NULL,
  CONSTRAINT ready_pkey PRIMARY KEY (queue, pos)
) WITH (
  fillfactor = 50, vacuum_truncate = off,
  autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0,
  autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);

-- What waits: for its first time, for a retry, after a deferral.
CREATE TABLE "leasebus".delayed (
  pos        bigint      GENERATED ALWAYS AS IDENTITY,
  due_at     timestamptz NOT NULL,
  first_due  timestamptz NOT NULL,
  id         uuid        NOT NULL,
  queue      int         NOT NULL,
  generation int         NOT NULL DEFAULT 0,
  attempt    int         NOT NULL DEFAULT 0,
  type       text        NOT NULL,
  headers    bytea,
  state      bytea,
  payload    bytea       NOT NULL,
  CONSTRAINT delayed_pkey PRIMARY KEY (queue, due_at, pos)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000, autovacuum_vacuum_cost_delay = 0);

-- Dead letters. error and error_type are of the last failure; the others are in state.
CREATE TABLE "leasebus".dead (
  pos               bigint      GENERATED ALWAYS AS IDENTITY,
  dead_at           timestamptz NOT NULL DEFAULT statement_timestamp(),
  first_due         timestamptz NOT NULL,
  id                uuid        NOT NULL,
  queue             int         NOT NULL,
  generation        int         NOT NULL,
  attempts          int         NOT NULL,
  replaced_by       uuid,
  type              text        NOT NULL,
  dead_letter_queue text        NOT NULL,
  reason            text        NOT NULL,
  error             text        NOT NULL,
  error_type        text        NOT NULL,
  last_owner        text        NOT NULL,
  headers           bytea,
  state             bytea,
  payload           bytea       NOT NULL,
  CONSTRAINT dead_pkey PRIMARY KEY (queue, pos)
);
CREATE INDEX dead_id ON "leasebus".dead (id);

-- Completed messages, of queues that retain them.
CREATE TABLE "leasebus".history (
  pos          bigint      GENERATED ALWAYS AS IDENTITY,
  completed_at timestamptz NOT NULL DEFAULT statement_timestamp(),
  first_due    timestamptz NOT NULL,
  id           uuid        NOT NULL,
  queue        int         NOT NULL,
  generation   int         NOT NULL,
  attempts     int         NOT NULL,
  type         text        NOT NULL,
  owner        text        NOT NULL,
  headers      bytea,
  state        bytea,
  payload      bytea       NOT NULL,
  CONSTRAINT history_pkey PRIMARY KEY (queue, pos)
);
CREATE INDEX history_completed_at ON "leasebus".history USING brin (completed_at);

-- A completion inside a handler's transaction calls this when its lease is gone: the transaction can not commit then,
-- whatever the handler does with the error.
CREATE FUNCTION "leasebus".lease_lost() RETURNS int LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  RAISE EXCEPTION 'leasebus: lease lost' USING ERRCODE = 'LB001';
END $$;

INSERT INTO "leasebus".schema_version (version, serves) VALUES (1, 1);
