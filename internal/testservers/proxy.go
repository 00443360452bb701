//go:build unix

package testservers

import (
	"bufio"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
)

// Proxy stands between clients and a server and does what networks do: it cuts connections, goes silent, forgets
// connections, stops listening, and loses answers.
type Proxy struct {
	upstream string
	addr     string
	wire     wire
	tasks    sync.WaitGroup

	mu       sync.Mutex
	listener net.Listener
	links    map[*link]struct{}
	flowing  chan struct{} // closed while bytes pass
	losses   []*loss
}

// wire knows how a protocol is cut into exchanges. It moves bytes from one side of a link to the other.
type wire interface {
	forward(l *link) error  // from the client to the server
	backward(l *link) error // from the server to the client
}

// loss is an answer that shall be lost.
type loss struct {
	match  func(request string) bool
	forget bool // the connection afterwards, instead of cutting it
	done   chan struct{}
}

// link is one connection through the proxy.
type link struct {
	proxy          *Proxy
	client, server net.Conn
	cut            chan struct{}
	once           sync.Once
	forgotten      bool // guarded by the proxy's lock

	mu     sync.Mutex
	loseAt int   // the exchange whose answer shall be lost; 0 = none
	loss   *loss // of loseAt
}

// NewProxy opens a proxy to an address, for any protocol: a request is what arrives from the client in one piece. It is
// closed after the test.
func NewProxy(t testing.TB, upstream string) *Proxy {
	t.Helper()
	return newProxy(t, upstream, rawWire{})
}

// Proxy opens a proxy to the database's server; a request is an SQL statement that is executed, prepared or not. The
// second result is the database as seen through the proxy.
func (p *PG) Proxy(t testing.TB) (*Proxy, *PG) {
	t.Helper()
	proxy := newProxy(t, p.Addr(), postgresWire{})
	return proxy, p.At(proxy.Addr())
}

func newProxy(t testing.TB, upstream string, w wire) *Proxy {
	t.Helper()
	port, err := freePort()
	if err != nil {
		t.Fatalf("testservers: proxy: %v", err)
	}
	flowing := make(chan struct{})
	close(flowing)
	p := &Proxy{
		upstream: upstream, addr: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), wire: w,
		links: make(map[*link]struct{}), flowing: flowing,
	}
	p.Up(t)
	t.Cleanup(func() {
		p.Down()
		p.tasks.Wait()
	})
	return p
}

// Addr is the proxy's host:port. It stays the same.
func (p *Proxy) Addr() string { return p.addr }

// Up listens again after Down.
func (p *Proxy) Up(t testing.TB) {
	t.Helper()
	listener, err := net.Listen("tcp", p.addr)
	if err != nil {
		t.Fatalf("testservers: proxy: %v", err)
	}
	p.mu.Lock()
	p.listener = listener
	p.mu.Unlock()
	p.tasks.Go(func() { p.accept(listener) })
}

// Down cuts all connections and refuses new ones.
func (p *Proxy) Down() {
	p.mu.Lock()
	if p.listener != nil {
		_ = p.listener.Close()
		p.listener = nil
	}
	p.mu.Unlock()
	p.Cut()
}

// Cut resets all connections and returns how many those were. New ones are welcome.
func (p *Proxy) Cut() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := len(p.links)
	for l := range p.links {
		l.end()
	}
	return n
}

// Silence swallows nothing and passes nothing on: connections stay, and new ones are accepted, but no byte arrives
// until Speak.
func (p *Proxy) Silence() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.flowing:
		p.flowing = make(chan struct{})
	default:
	}
}

// Speak ends a silence: what was held back arrives.
func (p *Proxy) Speak() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.flowing:
	default:
		close(p.flowing)
	}
}

// Forget does what a machine in between does when it loses its memory: the connections that there are stay open, and
// nothing passes on them any more, not even their end. New ones work. It returns how many it forgot.
func (p *Proxy) Forget() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for l := range p.links {
		if !l.forgotten {
			l.forgotten = true
			n++
		}
	}
	return n
}

// LoseReply lets the next request that matches reach the server, waits for the complete answer, swallows it and cuts
// the connection: the server has done what it was asked to, and the client cannot know. The channel is closed then.
// Losses that wait at the same time are taken in order, one by each request.
func (p *Proxy) LoseReply(match func(request string) bool) <-chan struct{} {
	return p.lose(&loss{match: match, done: make(chan struct{})})
}

// ForgetAt is LoseReply, but the connection is not cut: it is forgotten, as by Forget.
func (p *Proxy) ForgetAt(match func(request string) bool) <-chan struct{} {
	return p.lose(&loss{match: match, forget: true, done: make(chan struct{})})
}

func (p *Proxy) lose(l *loss) <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.losses = append(p.losses, l)
	return l.done
}

// Containing matches requests that contain every one of the texts.
func Containing(texts ...string) func(string) bool {
	return func(request string) bool {
		for _, text := range texts {
			if !strings.Contains(request, text) {
				return false
			}
		}
		return true
	}
}

func (p *Proxy) accept(listener net.Listener) {
	for {
		client, err := listener.Accept()
		if err != nil {
			return
		}
		p.tasks.Go(func() { p.serve(listener, client) })
	}
}

func (p *Proxy) serve(listener net.Listener, client net.Conn) {
	l := &link{proxy: p, client: client, cut: make(chan struct{})}
	server, err := net.Dial("tcp", p.upstream)
	if err != nil {
		reset(client)
		return
	}
	l.server = server
	p.mu.Lock()
	if p.listener != listener { // down since
		p.mu.Unlock()
		l.end()
		return
	}
	p.links[l] = struct{}{}
	p.mu.Unlock()
	var both sync.WaitGroup
	both.Go(func() {
		_ = p.wire.forward(l) // every end is the end of the connection
		l.end()
	})
	both.Go(func() {
		_ = p.wire.backward(l)
		l.end()
	})
	both.Wait()
	p.mu.Lock()
	delete(p.links, l)
	p.mu.Unlock()
}

// end resets both sides.
func (l *link) end() {
	l.once.Do(func() {
		close(l.cut)
		reset(l.client)
		reset(l.server)
	})
}

func reset(conn net.Conn) {
	if tcp, ok := conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = conn.Close()
}

// gate holds a byte back during a silence, and for ever on a connection that was forgotten.
func (l *link) gate() error {
	for {
		l.proxy.mu.Lock()
		flowing, forgotten := l.proxy.flowing, l.forgotten
		l.proxy.mu.Unlock()
		if forgotten {
			<-l.cut
			return net.ErrClosed
		}
		select {
		case <-flowing:
			return nil
		default:
		}
		select {
		case <-flowing: // it may have been forgotten meanwhile
		case <-l.cut:
			return net.ErrClosed
		}
	}
}

// request notes what the client asks for, before it reaches the server. The answer is that to the exchange of number
// next.
func (l *link) request(text string, next int) {
	l.proxy.mu.Lock()
	defer l.proxy.mu.Unlock()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.loss != nil {
		return
	}
	for i, loss := range l.proxy.losses {
		if loss.match(text) {
			l.proxy.losses = append(l.proxy.losses[:i:i], l.proxy.losses[i+1:]...)
			l.loss, l.loseAt = loss, next
			return
		}
	}
}

// fate says what becomes of a piece of the answer to an exchange.
func (l *link) fate(exchange int) (lost bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.loss != nil && exchange == l.loseAt
}

// lose ends a link, or forgets it, after the answer has been swallowed.
func (l *link) lose() error {
	if l.loss.forget {
		l.proxy.mu.Lock()
		l.forgotten = true
		l.proxy.mu.Unlock()
		close(l.loss.done)
		return l.gate()
	}
	l.end()
	close(l.loss.done)
	return net.ErrClosed
}

// rawWire knows nothing: each piece that arrives from the client is a request, and the next piece from the server is
// its answer.
type rawWire struct{}

func (rawWire) forward(l *link) error {
	return pieces(l, l.client, l.server, func(piece []byte) error {
		l.request(string(piece), 1)
		return nil
	})
}

func (rawWire) backward(l *link) error {
	return pieces(l, l.server, l.client, func([]byte) error {
		if l.fate(1) {
			return l.lose()
		}
		return nil
	})
}

func pieces(l *link, from io.Reader, to io.Writer, look func([]byte) error) error {
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			return err
		}
		if err := l.gate(); err != nil {
			return err
		}
		if err := look(buffer[:n]); err != nil {
			return err
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return err
		}
	}
}

// flushWhenIdle sends what was gathered once nothing more has arrived.
func flushWhenIdle(l *link, from *bufio.Reader, to *bufio.Writer) error {
	if from.Buffered() > 0 {
		return nil
	}
	if err := l.gate(); err != nil {
		return err
	}
	return to.Flush()
}
