package postgres

import (
	"cmp"
	"slices"

	"github.com/jackc/pgx/v5/pgtype"

	leasebus "github.com/leasebus/leasebus/runtime"
)

const (
	// fencedSQL are the leases that a statement is about: queue $1, positions $2 in their order, generations, owners.
	fencedSQL = `u AS (SELECT unnest($2::bigint[]) AS pos, unnest($3::int[]) AS generation, unnest($4::bigint[]) AS owner)`

	// heldSQL finds the row of the lease u, and nothing else. It stands in a lateral subquery that the planner cannot
	// dissolve, and the rows are then taken by their address: joined in any other way, or by pos = ANY, the planner would
	// read the whole queue and look up the leases, if its statistics are from when the queue was empty. A row that moved
	// meanwhile is not found at its address; it is answered as this owner's, which means busy, and tried again.
	heldSQL = `FROM {segment} r WHERE r.queue = $1 AND r.pos = u.pos AND r.lease_owner = u.owner AND r.generation = u.generation`

	// lockedSQL locks the rows in the order of their positions, leaving out those that another transaction has.
	lockedSQL = `k AS MATERIALIZED (SELECT x.ctid FROM u, LATERAL (SELECT r.ctid ` + heldSQL + ` FOR UPDATE SKIP LOCKED) x)`

	// restSQL answers 2 for every lease that is this owner's, if not all are done.
	restSQL = `SELECT 2, u.pos, u.generation FROM u, LATERAL (SELECT 1 ` + heldSQL + ` OFFSET 0) x WHERE (SELECT count(*) FROM d) < cardinality($2::bigint[])`

	// answersSQL answers 4 if all the leases are done, which are in d then; else 1 for each that is, and 2 for every one
	// that is this owner's.
	answersSQL = `SELECT 4, count(*), 0 FROM d HAVING count(*) = cardinality($2::bigint[])
 UNION ALL SELECT 1, pos, generation FROM d WHERE (SELECT count(*) FROM d) < cardinality($2::bigint[])
 UNION ALL ` + restSQL
)

const (
	answerDone = 1
	answerMine = 2 // and locked, if it was not done
	answerBack = 3 // a position where something was put back
	answerAll  = 4
)

// fence names a lease to the database: row, generation, owner.
type fence struct {
	pos, owner int64
	generation int32
	index      int32 // in the batch
}

// fences are leases in the order of their rows, so that nobody's locks cross.
type fences struct {
	list     []fence
	unsorted bool
}

func newFences(n int) *fences { return &fences{list: make([]fence, 0, n)} }

// add takes a lease that its feed gave.
func (s *fences) add(l *leasebus.Lease, index int) {
	held := l.Ref.P.(*claimed)                                         //nolint:forcetypeassert // gave has looked
	f := fence{l.Ref.N, held.owner, int32(l.Generation), int32(index)} //nolint:gosec // of an int column; of a batch
	if n := len(s.list); n > 0 && f.pos < s.list[n-1].pos {
		s.unsorted = true
	}
	s.list = append(s.list, f)
}

func (s *fences) sort() {
	if s.unsorted {
		slices.SortFunc(s.list, func(a, b fence) int {
			return cmp.Or(cmp.Compare(a.pos, b.pos), cmp.Compare(a.generation, b.generation), cmp.Compare(a.index, b.index))
		})
	}
}

// args are the first four of the statements about leases.
func (s *fences) args(queue int32) []any {
	n := len(s.list)
	pos, generation, owner := newArray(pgtype.Int8OID, n*size64), newArray(pgtype.Int4OID, n*size32), newArray(pgtype.Int8OID, n*size64)
	for i := range s.list {
		f := &s.list[i]
		pos.addInt64(f.pos)
		generation.addInt32(f.generation)
		owner.addInt64(f.owner)
	}
	return []any{queue, pos, generation, owner}
}

// owners are those of the leases, each once.
func (s *fences) owners() *array {
	all := newArray(pgtype.Int8OID, size64)
	var seen []int64
	for i := range s.list {
		if owner := s.list[i].owner; !slices.Contains(seen, owner) {
			seen = append(seen, owner)
			all.addInt64(owner)
		}
	}
	return all
}

// fenceAnswers collects the server's answers for leases, which come about in the order of the positions.
type fenceAnswers struct {
	leases  []fence
	results []leasebus.Result // beside the leases
	at      int
	back    arrival // where something was put back, without the queue; none if its position is 0
}

// begin starts with the answer for rows that are not answered for.
func (a *fenceAnswers) begin(leases *fences, absent leasebus.Result) {
	*a = fenceAnswers{leases: leases.list, results: slices.Repeat([]leasebus.Result{absent}, len(leases.list))}
}

// read takes a row of kind, position and generation.
func (a *fenceAnswers) read(r *row) error {
	kind, pos, generation := r.int(0), r.int64(1), r.int32(2)
	switch kind {
	case answerAll:
		for i := range a.results {
			a.results[i] = leasebus.ResultOK
		}
	case answerDone:
		a.set(pos, generation, leasebus.ResultOK)
	case answerMine:
		a.set(pos, generation, leasebus.ResultBusy)
	case answerBack:
		a.back = arrival{seg: segment(generation), pos: pos} // the column has the segment here
	}
	return r.err
}

// set gives a result to the lease that has none yet: several leases of one row can be asked for, old ones among them.
func (a *fenceAnswers) set(pos int64, generation int32, result leasebus.Result) {
	all := a.leases
	if a.at >= len(all) || all[a.at].pos != pos {
		a.at, _ = slices.BinarySearchFunc(all, pos, func(f fence, pos int64) int { return cmp.Compare(f.pos, pos) })
	}
	for a.at < len(all) && all[a.at].pos == pos && all[a.at].generation != generation {
		a.at++
	}
	if a.at < len(all) && all[a.at].pos == pos {
		if a.results[a.at] == leasebus.ResultLost {
			a.results[a.at] = result
		}
		a.at++
	}
}
