package postgres

import "strconv"

// segment is one of the tables that the hot table consists of: the ring's, and the cold one.
type segment int

const (
	// ringSegments is how many segments take turns in being the head.
	ringSegments = 8
	// coldSegment has what has stayed in a segment of the ring for long.
	coldSegment segment = ringSegments
	// segments is how many there are.
	segments = ringSegments + 1
)

func (s segment) table() string {
	if s == coldSegment {
		return "ready_cold"
	}
	return "ready_" + strconv.Itoa(int(s))
}

// behind is the n-th segment after s on the ring; with n < 0, before s.
func (s segment) behind(n int) segment {
	return segment((int(s) + n%ringSegments + ringSegments) % ringSegments)
}

// head is an expression for the segment that messages are published into.
func (n names) head() string {
	return "(SELECT (last_value % " + strconv.Itoa(ringSegments) + ")::smallint FROM " + n.quoted + ".ring)"
}
