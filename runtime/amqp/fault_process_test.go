package amqp_test

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

// handleInAProcess kills its process for a deadly message.
func handleInAProcess(_ context.Context, m *wrapperspb.StringValue) error {
	if strings.HasPrefix(m.GetValue(), "deadly") {
		testservers.Sayf("dying %s", m.GetValue())
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // the signal is on its way
	}
	time.Sleep(2 * time.Millisecond) // work, so that some are in hand when the process dies
	testservers.Sayf("handled %s", m.GetValue())
	return nil
}

// A message that kills its workers ends as a dead letter after the crash limit, and takes no other message along: those
// that were in the dying hands with it are scattered until it is alone. That takes up to ten seconds for each death.
func TestFault_S10_ADeadlyMessageEndsAsADeadLetterAlone(t *testing.T) {
	t.Parallel()
	const limit, innocents = 8, 300
	s := onStage(t, testservers.RabbitMQ(t), "deadly", nil)
	var values []string
	for i := range innocents {
		if i == innocents/3 {
			values = append(values, "deadly")
		}
		values = append(values, fmt.Sprint("innocent ", i))
	}
	s.send(values...)
	crew := testservers.StartCrew(t, 2, "consume", envURL+"="+s.rabbit.URL(), envQueue+"="+s.policy.Queue, fmt.Sprintf("%s=%d", envCrashLimit, limit))
	died := 0
	handled := make(map[string]bool)
	for deadline := time.Now().Add(5 * time.Minute); s.rabbit.Ready(t, s.policy.DeadLetter.Queue) == 0 || len(handled) < innocents; {
		died += crew.Replace(t)
		for _, w := range crew.Workers() {
			for _, line := range w.Lines() {
				if value, ok := strings.CutPrefix(line, "handled "); ok {
					handled[value] = true
				}
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("after five minutes %d of %d are handled, %d workers died, and there are %d dead letters",
				len(handled), innocents, died, s.rabbit.Ready(t, s.policy.DeadLetter.Queue))
		}
		time.Sleep(20 * time.Millisecond)
	}
	_ = crew.Stop() // those that were killed have failed
	t.Logf("%d workers died", died)
	if died < limit/2 {
		t.Errorf("%d workers died, want about %d", died, limit+1)
	}
	// Between the publishing of a copy and the acknowledgement, a death leaves twins: one id, and one fate.
	deadly := make(map[string]bool)
	for d, err := range s.manager().DeadLetters(t.Context(), leasebus.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		deadly[d.ID.String()] = true
		if d.Message.GetValue() != "deadly" || d.Reason != leasebus.ReasonCrashed {
			t.Errorf("dead letter %q for %q, want the deadly one as crashed", d.Message.GetValue(), d.Reason)
		}
	}
	if len(deadly) != 1 {
		t.Errorf("%d messages are dead letters, want one", len(deadly))
	}
}

func TestFault_S54_ProcessorTimeStaysFlatWhileTheBrokerIsAway(t *testing.T) {
	t.Parallel()
	const away = 3 * time.Second
	direct := testservers.RabbitMQ(t)
	proxy, through := direct.Proxy(t)
	s := onStage(t, direct, "away", nil)
	w := testservers.StartWorker(t, "consume", envURL+"="+through.URL(), envQueue+"="+s.policy.Queue, envCrashLimit+"=20")
	s.send("first")
	w.Await(t, "handled first")
	proxy.Down()
	before := w.CPUTime()
	time.Sleep(away) // the time over which the use is measured
	used := w.CPUTime() - before
	proxy.Up(t)
	t.Logf("used %v in %v", used, away)
	if limit := away / 10; used > limit {
		t.Errorf("the worker used %v of processor time in %v without a broker, want %v at most", used, away, limit)
	}
	s.send("second")
	w.Await(t, "handled second")
	if err := w.Stop(); err != nil {
		t.Error(err)
	}
}
