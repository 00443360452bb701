package leasebustest_test

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/protobuf/types/known/wrapperspb"

	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The messages of these tests are well-known types: text takes a StringValue, number an Int64Value.
type (
	text   = *wrapperspb.StringValue
	number = *wrapperspb.Int64Value
)

func textPolicy(change ...func(*leasebus.Policy)) *leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.StringValue", "texts")
	p.Retry = leasebus.ExponentialRetry(3, time.Minute, time.Hour, 2)
	p.Retry.Jitter = 0
	for _, f := range change {
		f(&p)
	}
	return &p
}

func numberPolicy() *leasebus.Policy {
	p := leasebus.DefaultPolicy("google.protobuf.Int64Value", "numbers")
	return &p
}

// texts registers a handler as generated code does.
func texts(handle func(context.Context, text) error, change ...func(*leasebus.Policy)) func(*leasebus.Processor) error {
	return func(p *leasebus.Processor) error {
		return leasebus.RegisterHandler(p, textPolicy(change...), handle)
	}
}

func numbers(handle func(context.Context, number) error) func(*leasebus.Processor) error {
	return func(p *leasebus.Processor) error { return leasebus.RegisterHandler(p, numberPolicy(), handle) }
}

// answer is a handler that always says the same.
func answer(err error) func(context.Context, text) error {
	return func(context.Context, text) error { return err }
}

func newTexts(tb testing.TB, to leasebus.Publisher) *leasebus.TypedPublisher[text] {
	tb.Helper()
	p, err := leasebus.NewTypedPublisher[text](textPolicy(), to)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func newNumbers(tb testing.TB, to leasebus.Publisher) *leasebus.TypedPublisher[number] {
	tb.Helper()
	p, err := leasebus.NewTypedPublisher[number](numberPolicy(), to)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func publishTexts(tb testing.TB, to leasebus.Publisher, values ...string) {
	tb.Helper()
	publisher := newTexts(tb, to)
	for _, v := range values {
		if _, err := publisher.Publish(tb.Context(), wrapperspb.String(v)); err != nil {
			tb.Fatal(err)
		}
	}
}

// inAndOut runs a test in a bubble and outside.
func inAndOut(t *testing.T, test func(*testing.T)) {
	t.Helper()
	t.Run("in a bubble", func(t *testing.T) { synctest.Test(t, test) })
	t.Run("outside", func(t *testing.T) {
		t.Parallel()
		test(t)
	})
}

// failing is a test that is expected to fail: it keeps what is said instead of failing its parent.
type failing struct {
	testing.TB

	said []string
}

func (f *failing) Errorf(format string, args ...any) {
	f.said = append(f.said, fmt.Sprintf(format, args...))
}

func (f *failing) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	runtime.Goexit()
}

// wantFailure runs a test that must fail with all of parts in what it says.
func wantFailure(t *testing.T, test func(tb testing.TB), parts ...string) {
	t.Helper()
	f := &failing{TB: t}
	returned := make(chan bool, 1)
	go func() {
		ended := false
		defer func() { returned <- ended }()
		test(f)
		ended = true
	}()
	if <-returned {
		t.Errorf("the test went on")
	}
	said := strings.Join(f.said, "\n")
	for _, part := range parts {
		if !strings.Contains(said, part) {
			t.Errorf("the test says %q, want it to say %q", said, part)
		}
	}
}

// exampleTest stands for the *testing.T of a test in the examples, which have none.
type exampleTest struct{ testing.TB }

func (exampleTest) Helper()                           {}
func (exampleTest) Context() context.Context          { return context.Background() }
func (exampleTest) Errorf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
func (exampleTest) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
