//go:build unix

package testservers

import (
	"context"
	"fmt"
	"strings"
	"syscall"
	"testing"
)

func TestWorker_StopsInOrder(t *testing.T) {
	t.Parallel()
	w := StartWorker(t, "count", "COUNT_NAME=ann")
	if got := w.Await(t, "5 "); got != "ann" {
		t.Errorf("the worker's name is %q, want ann", got)
	}
	if err := w.Stop(); err != nil {
		t.Fatal(err)
	}
	lines := w.Lines()
	if last := lines[len(lines)-1]; last != "stopped" {
		t.Errorf("the last line is %q, want stopped", last)
	}
	for i, line := range lines[:len(lines)-1] {
		if want := fmt.Sprintf("%d ann", i); line != want {
			t.Fatalf("line %d is %q, want %q", i, line, want)
		}
	}
}

func TestWorker_SaysWhyItFailed(t *testing.T) {
	t.Parallel()
	for role, want := range map[string]string{"refuse": "refused", "juggle": `no role "juggle"`} {
		if err := StartWorker(t, role).Wait(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("role %s: %v, want %q", role, err, want)
		}
	}
}

func TestCrew_Churn(t *testing.T) {
	t.Parallel()
	crew := StartCrew(t, 2, "count", "COUNT_NAME=crew")
	killed, err := crew.Churn(t.Context(), func(_ context.Context, killed int) bool {
		workers := crew.Workers()
		for _, w := range workers[len(workers)-2:] {
			w.Await(t, "1 ")
		}
		return killed < 5
	})
	if err != nil || killed != 5 {
		t.Fatalf("killed %d, %v; want 5", killed, err)
	}
	if err := crew.Stop(); err != nil {
		t.Error(err)
	}
	workers := crew.Workers()
	if len(workers) != 7 {
		t.Fatalf("there were %d workers, want 7", len(workers))
	}
	for i, w := range workers {
		lines := w.Lines()
		if stopped := lines[len(lines)-1] == "stopped"; stopped != (i >= 5) {
			t.Errorf("worker %d stopped in order: %v", i, stopped)
		}
		if err := syscall.Kill(w.PID(), 0); err == nil {
			t.Errorf("worker %d still runs", i)
		}
	}
}

func TestCrew_Replace(t *testing.T) {
	t.Parallel()
	crew := StartCrew(t, 2, "count")
	crew.Workers()[0].Kill()
	if n := crew.Replace(t); n != 1 {
		t.Errorf("replaced %d workers, want 1", n)
	}
	if n := crew.Replace(t); n != 0 {
		t.Errorf("replaced %d workers more, want none", n)
	}
	if err := crew.Stop(); err != nil {
		t.Error(err)
	}
}
