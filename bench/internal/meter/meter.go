// Package meter reads what work costs: CPU of the client and of the server, WAL, table and index size, memory.
package meter

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// Meter reads the meters of one database and its server, or of a broker.
type Meter struct {
	conn *pgx.Conn // nil = a broker's
	// postmaster is the server's first process; 0 = it is on another machine, and its CPU is not known.
	postmaster int
}

// OfBroker reads the meters of a broker that is a process with its children; 0 = it is on another machine.
func OfBroker(pid int) *Meter { return &Meter{postmaster: pid} }

// New connects to a database.
func New(ctx context.Context, dsn string) (*Meter, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return nil, fmt.Errorf("meter: %w", err)
	}
	m := &Meter{conn: conn}
	var backend int
	if err := conn.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&backend); err != nil {
		return nil, fmt.Errorf("meter: %w", err)
	}
	if name, fields, err := procStat(backend); err == nil && name == "postgres" {
		m.postmaster = int(fields[statParent])
	}
	return m, nil
}

// Close closes the connection.
func (m *Meter) Close(ctx context.Context) {
	if m.conn != nil {
		_ = m.conn.Close(ctx)
	}
}

// Reading is the state of the meters at one time. Two of them make a [Cost].
type Reading struct {
	at             time.Time
	client, server time.Duration
	wal            int64
}

// Cost is what lies between two readings.
type Cost struct {
	Wall, Client time.Duration
	// Server is the CPU time of all server processes; negative where it cannot be known.
	Server time.Duration
	// WAL is in bytes; 0 where there is none.
	WAL int64
}

// Read reads the meters.
func (m *Meter) Read(ctx context.Context) (Reading, error) {
	var r Reading
	if m.conn != nil {
		err := m.conn.QueryRow(ctx, "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint").Scan(&r.wal)
		if err != nil {
			return r, fmt.Errorf("meter: WAL: %w", err)
		}
	}
	r.server = m.serverCPU()
	r.client, r.at = clientCPU(), time.Now()
	return r, nil
}

// Since is the cost from before to r.
func (r Reading) Since(before Reading) Cost {
	c := Cost{Wall: r.at.Sub(before.at), Client: r.client - before.client, Server: r.server - before.server, WAL: r.wal - before.wal}
	if r.server < 0 || before.server < 0 {
		c.Server = -1
	}
	return c
}

// Sizes returns the bytes of all tables of the database, TOAST included, and of their indexes; a broker has none.
func (m *Meter) Sizes(ctx context.Context) (tables, indexes int64, err error) {
	if m.conn == nil {
		return 0, 0, nil
	}
	err = m.conn.QueryRow(ctx, `SELECT coalesce(sum(pg_table_size(oid)), 0)::bigint, coalesce(sum(pg_indexes_size(oid)), 0)::bigint
		FROM pg_class WHERE relkind = 'r' AND relnamespace NOT IN ('pg_catalog'::regnamespace, 'information_schema'::regnamespace)`).
		Scan(&tables, &indexes)
	if err != nil {
		return 0, 0, fmt.Errorf("meter: sizes: %w", err)
	}
	return tables, indexes, nil
}

// Checkpoint writes out what others have left in memory. What is written from here on is of one checkpoint's time, as it
// is for messages that do not wait long: their pages are not logged as a whole again.
func (m *Meter) Checkpoint(ctx context.Context) error { return m.exec(ctx, "CHECKPOINT") }

// Tidy leaves no dead rows and fresh statistics.
func (m *Meter) Tidy(ctx context.Context) error { return m.exec(ctx, "VACUUM ANALYZE") }

func (m *Meter) exec(ctx context.Context, sql string) error {
	if m.conn == nil {
		return nil
	}
	if _, err := m.conn.Exec(ctx, sql); err != nil {
		return fmt.Errorf("meter: %s: %w", strings.ToLower(sql), err)
	}
	return nil
}

func clientCPU() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		return 0 // it has no errors with these arguments
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// serverCPU adds up the postmaster, its children, and those that have ended.
func (m *Meter) serverCPU() time.Duration {
	entries, err := os.ReadDir("/proc")
	if m.postmaster == 0 || err != nil {
		return -1
	}
	var ticks int64
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		_, fields, err := procStat(pid)
		switch {
		case err != nil: // it has ended meanwhile
		case pid == m.postmaster:
			ticks += fields[statUser] + fields[statSystem] + fields[statDeadUser] + fields[statDeadSystem]
		case int(fields[statParent]) == m.postmaster:
			ticks += fields[statUser] + fields[statSystem]
		}
	}
	return time.Duration(ticks) * tick
}

// tick is the unit of /proc/…/stat on every Linux.
const tick = 10 * time.Millisecond

// Fields of /proc/…/stat that follow the name, by proc(5).
const (
	statParent     = 1
	statUser       = 11
	statSystem     = 12
	statDeadUser   = 13
	statDeadSystem = 14
)

var errNoStat = errors.New("not what proc(5) describes")

func procStat(pid int) (name string, fields []int64, err error) {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return "", nil, err //nolint:wrapcheck // all that is asked is whether there is one
	}
	return parseStat(string(text))
}

// parseStat takes the name, which may hold anything, and the numbers behind it; a state is a letter, and counts as 0.
func parseStat(text string) (name string, fields []int64, err error) {
	open, closed := strings.IndexByte(text, '('), strings.LastIndexByte(text, ')')
	if open < 0 || closed < open {
		return "", nil, errNoStat
	}
	for field := range strings.FieldsSeq(text[closed+1:]) {
		n, _ := strconv.ParseInt(field, 10, 64) // some are beyond 63 bits, and not of interest
		fields = append(fields, n)
	}
	if len(fields) <= statDeadSystem {
		return "", nil, errNoStat
	}
	return text[open+1 : closed], fields, nil
}

// Resident is the memory of a process that is in RAM now, in bytes; 0 if it has ended or cannot be asked.
func Resident(pid int) int64 {
	text, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/statm")
	if err != nil {
		return 0
	}
	fields := strings.Fields(string(text))
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(fields[1], 10, 64) // the kernel writes numbers
	return pages * int64(os.Getpagesize())
}
