package testservers

import (
	"context"
	"fmt"
	"syscall"
	"time"
)

const cpuLine = "cpu %d" // in milliseconds

// CPUTime is how much processor time this process has used.
func CPUTime() time.Duration {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used) // cannot fail for oneself
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}

// SayCPUTime has a worker say now and then how much processor time it has used, until ctx ends.
func SayCPUTime(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			Sayf(cpuLine, CPUTime().Milliseconds())
		case <-ctx.Done():
			return
		}
	}
}

// CPUTime is what the worker said last by [SayCPUTime].
func (w *Worker) CPUTime() time.Duration {
	var ms int64
	for _, line := range w.Lines() {
		_, _ = fmt.Sscanf(line, cpuLine, &ms) // other lines leave it as it is
	}
	return time.Duration(ms) * time.Millisecond
}
