package amqp

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rabbitmq/amqp091-go"

	"github.com/leasebus/leasebus/internal/testservers"
	leasebus "github.com/leasebus/leasebus/runtime"
)

func TestTarget_heartbeat_and_timeout_of_the_URL(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		url  string
		opts []Option
		want time.Duration // 0 = refused
	}{
		{"amqp://localhost/", nil, DefaultHeartbeat},
		{"amqp://localhost/?heartbeat=7", nil, 7 * time.Second},
		{"amqp://localhost/?heartbeat=7", []Option{WithHeartbeat(3 * time.Second)}, 3 * time.Second},
		{"amqp://localhost/?heartbeat=0", nil, 0},
		{"amqp://localhost/?heartbeat=301", nil, 0},
	} {
		o, err := optionsOf(c.opts)
		if err != nil {
			t.Fatal(err)
		}
		switch _, err := targetOf(c.url, &o); {
		case (err == nil) != (c.want > 0):
			t.Errorf("%s: %v", c.url, err)
		case err == nil && o.heartbeat != c.want:
			t.Errorf("%s: the heartbeat is %v, want %v", c.url, o.heartbeat, c.want)
		}
	}
	mute, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer mute.Close()
	begun := time.Now()
	if _, err := Dial(t.Context(), "amqp://"+mute.Addr().String()+"/?connection_timeout=50"); err == nil ||
		!strings.Contains(err.Error(), "no answer within 50ms") || time.Since(begun) > 5*time.Second {
		t.Errorf("got %v after %v, want the URL's connection_timeout", err, time.Since(begun))
	}
}

// authority is one that a server and its clients trust.
type authority struct {
	certificate *x509.Certificate
	key         *ecdsa.PrivateKey
	file        string // of its certificate
}

func newAuthority(t *testing.T) *authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"}, NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	certificate, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	a := &authority{certificate, key, filepath.Join(t.TempDir(), "authority.pem")}
	writePEM(t, a.file, "CERTIFICATE", der)
	return a
}

// issue makes a certificate for a name, and the files of it and its key.
func (a *authority) issue(t *testing.T, name string) (pair tls.Certificate, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), DNSNames: []string{name}, NotAfter: time.Now().Add(time.Hour),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.certificate, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	certFile, keyFile = filepath.Join(folder, "cert.pem"), filepath.Join(folder, "key.pem")
	writePEM(t, certFile, "CERTIFICATE", der)
	writePEM(t, keyFile, "EC PRIVATE KEY", keyDER)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, certFile, keyFile
}

func writePEM(t *testing.T, file, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

// encrypted stands before a server and speaks TLS with clients that have a certificate.
func encrypted(t *testing.T, upstream string, a *authority) net.Addr {
	t.Helper()
	pair, _, _ := a.issue(t, "rabbit.test")
	known := x509.NewCertPool()
	known.AddCert(a.certificate)
	listener, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{
		Certificates: []tls.Certificate{pair}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: known, MinVersion: tls.VersionTLS12,
	})
	if err != nil {
		t.Fatal(err)
	}
	var tasks sync.WaitGroup
	tasks.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", upstream)
			if err != nil {
				_ = client.Close()
				return
			}
			for _, way := range [][2]net.Conn{{client, server}, {server, client}} {
				tasks.Go(func() {
					_, _ = io.Copy(way[0], way[1])
					_ = client.Close()
					_ = server.Close()
				})
			}
		}
	})
	t.Cleanup(func() {
		_ = listener.Close()
		tasks.Wait()
	})
	return listener.Addr()
}

func TestDial_TLS(t *testing.T) {
	t.Parallel()
	rabbit := testservers.RabbitMQ(t)
	a := newAuthority(t)
	addr := encrypted(t, rabbit.Addr(), a)
	pair, certFile, keyFile := a.issue(t, "client.test")
	known := x509.NewCertPool()
	known.AddCert(a.certificate)
	u, err := url.Parse(rabbit.At(addr.String()).URL())
	if err != nil {
		t.Fatal(err)
	}
	u.Scheme = "amqps"
	plain := u.String()
	u.RawQuery = url.Values{
		"cacertfile": {a.file}, "certfile": {certFile}, "keyfile": {keyFile}, "server_name_indication": {"rabbit.test"},
	}.Encode()
	queue := classicQueue(t, rabbit, "tls")
	given := &tls.Config{RootCAs: known, Certificates: []tls.Certificate{pair}, ServerName: "rabbit.test", MinVersion: tls.VersionTLS12}
	for name, c := range map[string]struct {
		url  string
		opts []Option
	}{"by the URL": {u.String(), nil}, "by an option": {plain, []Option{WithTLS(given)}}} {
		b := dialIn(t, c.url, c.opts...)
		for i, err := range b.publisher.publishAll(t, "", queue, 100) {
			if err != nil {
				t.Errorf("%s: message %d: %v", name, i, err)
			}
		}
	}
	if n := rabbit.Ready(t, queue); n != 200 {
		t.Errorf("%d messages are stored, want 200", n)
	}
	_, err = Dial(t.Context(), plain, WithTLS(&tls.Config{RootCAs: known, Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12}))
	if err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("a certificate for another name: %v", err)
	}
	if _, err := Dial(t.Context(), plain); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("an authority that nobody knows: %v", err)
	}
}

// C3.9, C3.10: limits of the server that nobody tells us. What its frames cannot hold is refused here; for a body that it
// does not take it closes the channel, and that message alone is to blame.
func TestPublisher_C3_9_C3_10_a_server_with_lower_limits(t *testing.T) {
	t.Parallel()
	rabbit := testservers.PrivateRabbitMQ(t, "frame_max=8192", "max_message_size=100000")
	b := dialIn(t, rabbit.URL())
	queue := classicQueue(t, rabbit.Rabbit, "limits")
	send := func(sizes ...int) []error {
		outcomes := make([]error, len(sizes))
		b.publisher.publish(t.Context(), len(sizes), func(i int, m *message) error {
			*m = message{amqp091.Publishing{Body: make([]byte, max(sizes[i], 0))}, "", queue}
			if header := -sizes[i]; header > 0 {
				m.Headers = amqp091.Table{"large": strings.Repeat("x", header)}
			}
			return nil
		}, func(i int, err error) { outcomes[i] = err })
		return outcomes
	}
	outcomes := send(10, -7000, -8000, -20000, 20000, 99999)
	for i, err := range outcomes {
		if invalid := i == 2 || i == 3; errors.Is(err, leasebus.ErrInvalidEnvelope) != invalid || !invalid && err != nil {
			t.Errorf("message %d: %v", i, err)
		}
	}
	if err := outcomes[3]; err == nil || !strings.Contains(err.Error(), "frame_max is 8192") {
		t.Errorf("got %v, want the server's limit", err)
	}
	for i, err := range send(10, 10, 100001, 10, 10) {
		switch {
		case i == 2 && (!errors.Is(err, ErrRefused) || !strings.Contains(err.Error(), "100000")):
			t.Errorf("the large one: %v, want it refused, and the server's limit", err)
		case i != 2 && err != nil && !errors.Is(err, leasebus.ErrOutcomeUnknown):
			t.Errorf("message %d: %v, want it stored or unknown", i, err)
		}
	}
	if outcomes := send(10); outcomes[0] != nil {
		t.Errorf("afterwards: %v", outcomes[0])
	}
}
