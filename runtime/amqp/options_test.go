package amqp_test

import (
	"crypto/tls"
	"strings"
	"testing"
	"time"

	leasebus "github.com/leasebus/leasebus/runtime"
	"github.com/leasebus/leasebus/runtime/amqp"
)

func TestOptions_refused(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 256)
	for _, c := range []struct {
		name string
		opt  amqp.Option
		want string
	}{
		{"no name", amqp.WithName(""), "WithName: \"\" is 0 bytes; allowed are 1 to 200"},
		{"a long name", amqp.WithName(long), "is 256 bytes; allowed are 1 to 200"},
		{"a short heartbeat", amqp.WithHeartbeat(999 * time.Millisecond), "WithHeartbeat: 999ms is out of range; allowed are whole seconds from 1s to 5m0s"},
		{"half a second", amqp.WithHeartbeat(2500 * time.Millisecond), "2.5s is out of range"},
		{"a long heartbeat", amqp.WithHeartbeat(time.Hour), "1h0m0s is out of range"},
		{"no TLS", amqp.WithTLS(nil), "WithTLS: the configuration is nil"},
		{"no credentials", amqp.WithCredentials(nil), "WithCredentials: the function is nil"},
		{"no window", amqp.WithConfirmWindow(0), "WithConfirmWindow: 0 is out of range; allowed is 1 to 1024"},
		{"a large window", amqp.WithConfirmWindow(1025), "1025 is out of range"},
		{"no time", amqp.WithPublishTimeout(0), "WithPublishTimeout: 0s is out of range; allowed is more than 0"},
		{"no exchange", amqp.WithExchange("", "topic"), "is 0 bytes; allowed are 1 to 255"},
		{"a long exchange", amqp.WithExchange(long, "topic"), "is 256 bytes; allowed are 1 to 255"},
		{"an unknown kind", amqp.WithExchange("x", "x-delayed-message"), "kind \"x-delayed-message\" is unknown; allowed are direct, topic, fanout and headers"},
		{"no payload", amqp.WithMaxPayload(0), "WithMaxPayload: 0 is out of range; allowed is 1 or more"},
		{"TLS without TLS", amqp.WithTLS(&tls.Config{MinVersion: tls.VersionTLS13}), "WithTLS needs an amqps URL"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			b, err := amqp.Dial(t.Context(), "amqp://127.0.0.1:1/", c.opt)
			if err == nil {
				_ = b.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
		})
	}
	policy := leasebus.DefaultPolicy("test.v1.Thing", "things")
	if _, err := amqp.TopologyOf([]*leasebus.Policy{&policy}, amqp.WithConfirmWindow(0)); err == nil {
		t.Error("a topology with an option that is out of range was made")
	}
}
