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

-- What is pending or processing. pos is the order of claiming; a message keeps it until it is worked on.
-- Pending: lease_owner is null, visible_at is when the message was due. Processing: visible_at is the lease's end.
--
-- headers: each name and value behind its length; a single zero byte is a correlation that is the message's own id.
--
-- The table is a ring of eight segments. Messages are published into one of them, the head; when that has grown, the
-- head moves on to an empty one, and a segment without messages is truncated: no vacuum has to follow the load. What
-- stays in a segment for long, when the ring becomes short of empty ones, is moved to the cold segment, number 8.
CREATE SEQUENCE "leasebus".ready_pos AS bigint;

-- Its value modulo eight is the head. A sequence, because that has no old versions: it is read by every publish.
CREATE SEQUENCE "leasebus".ring AS bigint MINVALUE 0 START 0;

-- How far the claims of a queue have come: the position, and in the lower 16 bits whose it is, because queues share them.
CREATE SEQUENCE "leasebus".front_0 AS bigint;
CREATE SEQUENCE "leasebus".front_1 AS bigint;
CREATE SEQUENCE "leasebus".front_2 AS bigint;
CREATE SEQUENCE "leasebus".front_3 AS bigint;
CREATE SEQUENCE "leasebus".front_4 AS bigint;
CREATE SEQUENCE "leasebus".front_5 AS bigint;
CREATE SEQUENCE "leasebus".front_6 AS bigint;
CREATE SEQUENCE "leasebus".front_7 AS bigint;

CREATE TABLE "leasebus".ready (
  pos         bigint      NOT NULL DEFAULT nextval('"leasebus".ready_pos'),
  visible_at  timestamptz NOT NULL DEFAULT statement_timestamp(),
  lease_owner bigint,
  first_due   timestamptz NOT NULL DEFAULT statement_timestamp(),
  id          uuid        NOT NULL,
  queue       int         NOT NULL,
  generation  int         NOT NULL DEFAULT 0,
  attempt     int         NOT NULL DEFAULT 0,
  segment     smallint    NOT NULL DEFAULT 0,
  type        text        NOT NULL,
  headers     bytea,
  state       bytea,
  payload     bytea       NOT NULL
) PARTITION BY LIST (segment);

-- A segment has one index, and nothing in it changes during a lease, so that leasing and renewing are updates in place:
-- fillfactor leaves the room for them.
CREATE TABLE "leasebus".ready_0 PARTITION OF "leasebus".ready (CONSTRAINT ready_0_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (0) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_1 PARTITION OF "leasebus".ready (CONSTRAINT ready_1_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (1) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_2 PARTITION OF "leasebus".ready (CONSTRAINT ready_2_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (2) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_3 PARTITION OF "leasebus".ready (CONSTRAINT ready_3_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (3) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_4 PARTITION OF "leasebus".ready (CONSTRAINT ready_4_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (4) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_5 PARTITION OF "leasebus".ready (CONSTRAINT ready_5_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (5) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_6 PARTITION OF "leasebus".ready (CONSTRAINT ready_6_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (6) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_7 PARTITION OF "leasebus".ready (CONSTRAINT ready_7_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (7) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
);
CREATE TABLE "leasebus".ready_cold PARTITION OF "leasebus".ready (CONSTRAINT ready_cold_pkey PRIMARY KEY (queue, pos)) FOR VALUES IN (8) WITH (
  fillfactor = 50, vacuum_truncate = off, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
  autovacuum_vacuum_cost_delay = 0, autovacuum_vacuum_insert_scale_factor = 0, autovacuum_vacuum_insert_threshold = 200000
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
