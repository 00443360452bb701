package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
	"github.com/leasebus/leasebus/runtime/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const lastLine = "demo: published=20 completed=16 retried=4 dead_lettered=4 requeued=1 lost=0"

// The events of each message, in their order. Messages run side by side, so lines of different ones may change places.
var wantStory = map[string][]string{
	"1 order-1001 OrderPlaced":  {published("orders.placed", ""), leased(1), "completed"},
	"1 order-1001 ReserveStock": {published("stock.reserve", "OrderPlaced"), leased(1), "completed"},
	"1 order-1001 SendReceipt":  {published("receipts.send", "ReserveStock"), leased(1), "completed"},

	"2 order-1002 OrderPlaced": {
		published("orders.placed", ""),
		leased(1), "failed: take the payment: the provider answers 503; due again in 300ms",
		leased(2), "failed: take the payment: the provider answers 503; due again in 600ms",
		leased(3), "completed",
	},
	"2 order-1002 ReserveStock": {published("stock.reserve", "OrderPlaced"), leased(1), "completed"},
	"2 order-1002 SendReceipt":  {published("receipts.send", "ReserveStock"), leased(1), "completed"},

	"3 order-1003 OrderPlaced": {published("orders.placed", ""), leased(1), "completed"},
	"3 order-1003 ReserveStock": {
		published("stock.reserve", "OrderPlaced"),
		leased(1), "completed after 2.2s, on a lease of 1s that was renewed meanwhile",
	},
	"3 order-1003 SendReceipt": {published("receipts.send", "ReserveStock"), leased(1), "completed"},

	"4 order-1004 OrderPlaced":  {published("orders.placed", ""), leased(1), "completed"},
	"4 order-1004 ReserveStock": {published("stock.reserve", "OrderPlaced"), leased(1), "completed"},
	"4 order-1004 SendReceipt": {
		published("receipts.send", "ReserveStock"),
		leased(1), "failed: send the receipt: no mail server found for exmaple.com; due again in 300ms",
		leased(2), "failed: send the receipt: no mail server found for exmaple.com; due again in 300ms",
		leased(3), "dead-lettered to receipts.send.dlq, exhausted: send the receipt: no mail server found for exmaple.com",
		leased(1), "completed",
	},
	"4 ann SendReceipt": {"the operator changes the address to mo@example.com and requeues it, as a new message"},

	"5 order-1005 OrderPlaced": {published("orders.placed", ""), leased(1), "completed"},
	"5 order-1005 ReserveStock": {
		published("stock.reserve", "OrderPlaced"),
		leased(1), `dead-lettered to stock.reserve.dlq, permanent: unknown article "unicorn"`,
	},

	"6 order-1006 OrderPlaced": {
		published("orders.placed", ""),
		"dead-lettered to orders.placed.invalid, invalid: items is empty; one or more are needed",
	},
	"6 order-1007 OrderPlaced": {
		published("orders.placed", ""),
		"dead-lettered to orders.placed.invalid, invalid: decode orders.v1.OrderPlaced: proto: cannot parse invalid wire-format data",
	},

	"7 order-1008 OrderCreated": {published("orders.placed", ""), leased(1), "completed"},
	"7 order-1008 ReserveStock": {published("stock.reserve", "OrderCreated"), leased(1), "completed"},
	"7 order-1008 SendReceipt":  {published("receipts.send", "ReserveStock"), leased(1), "completed"},
}

func published(queue, by string) string {
	if by == "" {
		return "published to " + queue
	}
	return "published to " + queue + ", by the handler of " + by
}

func leased(attempt int) string { return "leased, attempt " + string(rune('0'+attempt)) + " of 3" }

var (
	actLine   = regexp.MustCompile(`^(\d+)\. `)
	eventLine = regexp.MustCompile(`^ *\d+\.\d{3}  (\S+) +(\S+) +(.*)$`)
)

// storyIn reads the events from the demo's output, by act and message.
// slowly: the search for the piano takes 2.2 s, and what comes after it as long as the machine needs.
var slowly = regexp.MustCompile(`after (2\.[2-9]|[3-9]\.\d)s`)

func storyIn(output string) map[string][]string {
	story := make(map[string][]string)
	act := ""
	for line := range strings.Lines(strings.ReplaceAll(output, "\u00a0", " ")) { // protobuf varies the spaces of its errors
		line = strings.TrimSuffix(line, "\n")
		if m := actLine.FindStringSubmatch(line); m != nil {
			act = m[1]
		}
		if m := eventLine.FindStringSubmatch(line); m != nil {
			key := strings.Join([]string{act, m[1], m[2]}, " ")
			story[key] = append(story[key], slowly.ReplaceAllString(m[3], "after 2.2s"))
		}
	}
	return story
}

func wantWholeStory(t *testing.T, output string) {
	t.Helper()
	if diff := cmp.Diff(wantStory, storyIn(output)); diff != "" {
		t.Errorf("the story that is wanted (-) and the one that is told (+) differ:\n%s", diff)
	}
	if lines := strings.Split(strings.TrimSuffix(output, "\n"), "\n"); lines[len(lines)-1] != lastLine {
		t.Errorf("the last line is %q, want %q", lines[len(lines)-1], lastLine)
	}
	if t.Failed() {
		t.Logf("the output:\n%s", output)
	}
}

// TestDemo_AsAUser builds the program and runs it.
func TestDemo_AsAUser(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("takes about four seconds")
	}
	binary := filepath.Join(t.TempDir(), "demo")
	if runtime.GOOS == "windows" {
		binary += ".exe"
	}
	if out, err := exec.CommandContext(t.Context(), "go", "build", "-o", binary, ".").CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	demo := exec.CommandContext(t.Context(), binary)
	demo.Env = append(os.Environ(), "BACKEND=") // whatever the one of the tests is
	var stdout, stderr bytes.Buffer
	demo.Stdout, demo.Stderr = &stdout, &stderr
	if err := demo.Run(); err != nil || stderr.Len() > 0 {
		t.Errorf("the demo ends with %v and says on stderr: %s", err, &stderr)
	}
	wantWholeStory(t, stdout.String())
}

// TestDemo_InNoTime tells the story in a bubble, where the race detector sees all of it.
func TestDemo_InNoTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		code, stdout, stderr := called(t.Context(), "memory")
		if code != 0 || stderr != "" {
			t.Errorf("exit code %d, on stderr: %s", code, stderr)
		}
		wantWholeStory(t, stdout)
	})
}

// The same story, in real time, on a database.
func TestDemo_Postgres(t *testing.T) {
	pg := testservers.Postgres(t)
	t.Setenv(testservers.PostgresEnv, pg.DSN())
	code, stdout, stderr := called(t.Context(), "postgres")
	if code != 0 || stderr != "" {
		t.Errorf("exit code %d, on stderr: %s", code, stderr)
	}
	wantWholeStory(t, stdout)
	if left := testservers.Value[int](t, pg, `SELECT count(*) FROM pg_namespace WHERE nspname LIKE 'leasebus%'`); left != 0 {
		t.Errorf("%d schemas are left behind", left)
	}
}

// The same story on a broker of the test's own: the shop's queues have the names that they have.
func TestDemo_AMQP(t *testing.T) {
	rabbit := testservers.PrivateRabbitMQ(t)
	t.Setenv(testservers.RabbitMQEnv, rabbit.URL())
	code, stdout, stderr := called(t.Context(), "amqp")
	if code != 0 || stderr != "" {
		t.Errorf("exit code %d, on stderr: %s", code, stderr)
	}
	wantWholeStory(t, stdout)
	for name := range rabbit.Queues(t) {
		if !strings.HasPrefix(name, "leasebus.delay.") {
			t.Errorf("queue %s is left behind", name)
		}
	}
}

// What is in the shop's queues already is not the demo's to handle.
func TestDemo_AMQP_RefusesQueuesThatAreInUse(t *testing.T) {
	rabbit := testservers.PrivateRabbitMQ(t)
	t.Setenv(testservers.RabbitMQEnv, rabbit.URL())
	broker, err := amqp.Dial(t.Context(), rabbit.URL())
	if err != nil {
		t.Fatal(err)
	}
	policy := policies()[0]
	topology, err := broker.Topology(&policy)
	if err == nil {
		err = broker.Declare(t.Context(), topology)
	}
	out := []leasebus.Outgoing{{Envelope: leasebus.Envelope{ID: leasebus.NewID(), Type: policy.Type, Queue: policy.Queue}}}
	if err == nil {
		err = broker.Publish(t.Context(), out, make([]leasebus.Receipt, 1))
	}
	if err = errors.Join(err, broker.Close()); err != nil {
		t.Fatal(err)
	}
	code, _, stderr := called(t.Context(), "amqp")
	if code != exitFailed || !strings.Contains(stderr, "queue orders.placed has 1 messages") {
		t.Errorf("exit code %d, on stderr: %s", code, stderr)
	}
	if n := rabbit.Ready(t, policy.Queue); n != 1 {
		t.Errorf("%d messages are in the queue, want the 1 that was there", n)
	}
}

func TestDemo_Arguments(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name, env string
		args      []string
		code      int
		want      string
	}{
		{name: "unknown backend", args: []string{"--backend", "oracle"}, code: 2, want: "demo: unknown backend \"oracle\"; allowed: memory, postgres, amqp\n"},
		{name: "unknown backend in the environment", env: "rabbit", code: 2, want: "demo: unknown backend \"rabbit\"; allowed: memory, postgres, amqp\n"},
		{name: "argument", args: []string{"memory"}, code: 2, want: "demo: unexpected argument \"memory\"; see --help\n"},
		{name: "unknown flag", args: []string{"--broker=x"}, code: 2, want: "flag provided but not defined: -broker"},
		{name: "help", args: []string{"--help"}, code: 0, want: "lost           messages whose publishing was acknowledged"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			code, stdout, stderr := called(t.Context(), test.env, test.args...)
			if code != test.code || stdout != "" || !strings.Contains(stderr, test.want) {
				t.Errorf("exit code %d, want %d; stdout %q; stderr %q, want %q in it", code, test.code, stdout, stderr, test.want)
			}
		})
	}
}

// A store that acknowledges a message and does not keep it is found out.
func TestDemo_ALostMessageFailsIt(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		open := func(context.Context) (backend, func(), error) {
			return &forgetful{backend: memory.New()}, func() {}, nil
		}
		var out bytes.Buffer
		err := demonstrate(t.Context(), "forgetful", open, slog.New(slog.DiscardHandler), &out)
		if err == nil || !strings.Contains(err.Error(), "no receipt was sent for order-1001") ||
			!strings.Contains(err.Error(), "1 of the 3 messages whose publishing was acknowledged") {
			t.Errorf("the demo ends with %v", err)
		}
		if want := "\ndemo: published=2 completed=2 retried=0 dead_lettered=0 requeued=0 lost=1\n"; !strings.HasSuffix(out.String(), want) {
			t.Errorf("the output does not end with %q:\n%s", want, &out)
		}
	})
}

// forgetful loses receipts.
type forgetful struct{ backend }

func (f *forgetful) Publish(ctx context.Context, out []leasebus.Outgoing, receipts []leasebus.Receipt) error {
	if shortName(out[0].Type) == "SendReceipt" {
		receipts[0] = leasebus.Receipt{ID: out[0].ID}
		return nil
	}
	return f.backend.Publish(ctx, out, receipts)
}

// An interrupted story accounts for what there is and fails.
func TestDemo_Interrupted(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, interrupt := context.WithTimeout(t.Context(), searchTime) // while the piano is searched for
		defer interrupt()
		code, stdout, stderr := called(ctx, "")
		if code != 1 || !strings.Contains(stderr, "demo: act 3: ") {
			t.Errorf("exit code %d, want 1; on stderr: %s", code, stderr)
		}
		// What the drain let finish has published a receipt, and nobody was left to send it.
		if want := "\ndemo: published=9 completed=8 retried=2 dead_lettered=0 requeued=0 lost=1\n"; !strings.HasSuffix(stdout, want) {
			t.Errorf("the output does not end with %q:\n%s", want, stdout)
		}
	})
}

func called(ctx context.Context, backendInEnv string, args ...string) (code int, stdout, stderr string) {
	var out, errs bytes.Buffer
	env := func(name string) string {
		if name == "BACKEND" {
			return backendInEnv
		}
		return ""
	}
	code = run(ctx, args, env, &out, &errs)
	return code, out.String(), errs.String()
}
