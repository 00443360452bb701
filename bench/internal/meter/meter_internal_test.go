package meter

import (
	"os"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	t.Parallel()
	const line = "4242 (a (b) c) S 17 4242 4242 0 -1 4194560 1 2 3 4 101 102 103 104 20 0 1 0 18446744073709551615"
	name, fields, err := parseStat(line)
	if err != nil || name != "a (b) c" {
		t.Fatalf("parseStat: %q, %v", name, err)
	}
	for at, want := range map[int]int64{statParent: 17, statUser: 101, statSystem: 102, statDeadUser: 103, statDeadSystem: 104} {
		if fields[at] != want {
			t.Errorf("field %d is %d, want %d", at, fields[at], want)
		}
	}
	for _, wrong := range []string{"", "1 (x) S 2", "no name at all"} {
		if _, _, err := parseStat(wrong); err == nil {
			t.Errorf("parseStat(%q) saw nothing wrong", wrong)
		}
	}
}

func TestSince(t *testing.T) {
	t.Parallel()
	at := time.Unix(1000, 0)
	before := Reading{at: at, client: time.Second, server: 2 * time.Second, wal: 100}
	after := Reading{at: at.Add(time.Minute), client: 4 * time.Second, server: 7 * time.Second, wal: 350}
	if got, want := after.Since(before), (Cost{Wall: time.Minute, Client: 3 * time.Second, Server: 5 * time.Second, WAL: 250}); got != want {
		t.Errorf("cost %+v, want %+v", got, want)
	}
	before.server = -1
	if got := after.Since(before); got.Server >= 0 {
		t.Errorf("the server's CPU is %v though it was not known before", got.Server)
	}
}

func TestResident(t *testing.T) {
	t.Parallel()
	if _, err := os.Stat("/proc/self/statm"); err != nil {
		t.Skip("this system has no /proc")
	}
	if got := Resident(os.Getpid()); got < 1<<20 {
		t.Errorf("this test takes %d bytes, it says", got)
	}
	if got := Resident(-1); got != 0 {
		t.Errorf("a process that is not there takes %d bytes", got)
	}
}
