package integration_test

import (
	"context"
	"errors"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/rabbitmq"
)

var rabbitKinds = []string{"classic", "quorum"}

// case R1: a delivery is acked twice by the loop of its user. Only the first one
// reaches the broker, and the others are not touched.
func TestRabbitDoubleAck(t *testing.T) {
	t.Parallel()
	r := newRabbitLine(t, "quorum")
	events := &rabbitEvents{}
	s := r.open(&rabbitmq.Config{Hooks: []rabbitmq.Hook{events}})
	c := r.consumer(effect, nil)
	r.publish(0, 3)
	for i, d := range receive(t, s, 3) {
		if _, err := c.Process(t.Context(), d.Message); err != nil {
			t.Fatal(err)
		}
		if err := d.Ack(t.Context()); err != nil {
			t.Errorf("ack of number %d: %v", i, err)
		}
		if err := d.Ack(t.Context()); !errors.Is(err, broker.ErrSettled) {
			t.Errorf("second ack of number %d: %v, want %v", i, err, broker.ErrSettled)
		}
	}
	eventually(t, time.Minute, "three acks are sent", func() bool { return s.Stats().Acks == 3 })
	// The broker would have closed the channel by the time that it answers to this.
	r.publish(3, 1)
	for _, d := range receive(t, s, 1) {
		if _, err := c.Process(t.Context(), d.Message); err != nil {
			t.Fatal(err)
		}
		if err := d.Ack(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if st := s.Stats(); st.Epochs != 1 || st.Lost != 0 || len(noted(events, &events.ends)) != 0 {
		t.Errorf("the channel has ended: %+v", st)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Error(err)
	}
	onceEach(t, r.pool, 4)
	r.empty()
}

// case R1: the broker gets an ack twice all the same, and closes the channel. It is
// open again within 5 s, on the same connection, and the others end with one effect
// each.
func TestRabbitDoubleAckOnTheWire(t *testing.T) {
	t.Parallel()
	for _, kind := range rabbitKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, kind)
			wire := &stutter{}
			r.publish(0, 3)
			var held, runs atomic.Int64
			c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				runs.Add(1)
				if m.MessageKey != "m-0" {
					if held.Add(1) <= 2 {
						<-ctx.Done() // until the channel is gone
						return ctx.Err()
					}
				} else {
					// Not before the others are out.
					eventuallyIn(ctx, func() bool { return held.Load() == 2 })
				}
				return effect(ctx, tx, m)
			}, &inbox.Config{BatchSize: 1}, &rabbitmq.Config{Dial: wire.dial})
			wire.on.Store(true)
			eventually(t, time.Minute, "the channel has ended", func() bool { return len(noted(&c.rabbitEvents, &c.ends)) == 1 })
			gone := time.Now()
			eventually(t, time.Minute, "the others are done", func() bool { return c.count(inbox.FirstAttempt) == 3 })
			c.stop(t)
			consuming := noted(&c.rabbitEvents, &c.consuming)
			if took := consuming[1].Sub(gone); took > 5*time.Second {
				t.Errorf("the channel was open again after %v", took)
			}
			if e := c.ends[0]; e.Lost != 2 || !says(e.Err, "unknown delivery tag") {
				t.Errorf("ended %+v, want two that are lost by a double ack", e)
			}
			if n := wire.dials.Load(); n != 1 {
				t.Errorf("%d connections, want 1", n)
			}
			onceEach(t, r.pool, 3)
			if n := c.attempts(); n != 0 || runs.Load() != 5 {
				t.Errorf("%d attempts have failed in %d runs, want 0 in 5", n, runs.Load())
			}
			r.empty()
		})
	}
}

// eventuallyIn polls until ok or the end of ctx.
func eventuallyIn(ctx context.Context, ok func() bool) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// stutter is a network on which the first ack that is sent while it is on arrives
// twice.
type stutter struct {
	on    atomic.Bool
	dials atomic.Int64
}

func (s *stutter) dial(ctx context.Context, network, address string) (net.Conn, error) {
	s.dials.Add(1)
	conn, err := new(net.Dialer).DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	return &stutterConn{Conn: conn, stutter: s}, nil
}

type stutterConn struct {
	net.Conn
	*stutter
}

// Write implements net.Conn. The client writes frame by frame: the type (1: a
// method), the channel (2 bytes), the size (4), the class (2), the method (2).
func (c *stutterConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if err != nil || len(b) < 11 || b[0] != 1 || b[8] != 60 || b[10] != 80 || !c.on.CompareAndSwap(true, false) {
		return n, err
	}
	if _, err := c.Conn.Write(b); err != nil {
		return n, err
	}
	return n, nil
}

// case R2: a late ack after a reconnect, in the loop of the inbox. m1 is acked, m2
// and m3 are in work when the connection is cut.
func TestRabbitLateAck(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		// old is what the handler of m2 does that was running at the cut, after its
		// effect; again is closed when m2 has come again.
		old   func(ctx context.Context, again <-chan struct{}) error
		stale int // acks that come too late
	}{
		// It commits, so its ack comes too late.
		{"finishes", func(ctx context.Context, _ <-chan struct{}) error { <-ctx.Done(); return nil }, 1},
		{"obeys", func(ctx context.Context, _ <-chan struct{}) error { <-ctx.Done(); return ctx.Err() }, 0},
		// It is left behind, and its transaction is gone when it comes to its end.
		{"stays", func(_ context.Context, again <-chan struct{}) error { <-again; return nil }, 0},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, "quorum")
			proxy, host := r.proxy()
			var mu sync.Mutex
			started := map[string]int{}
			again := make(chan struct{})
			atCut := make(chan string, 2)
			r.publish(1, 3)
			c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				mu.Lock()
				started[m.MessageKey]++
				first := started[m.MessageKey] == 1
				mu.Unlock()
				switch {
				case m.MessageKey == "m-1" || !first:
					if m.MessageKey == "m-2" {
						close(again)
					}
					return effect(ctx, tx, m)
				case m.MessageKey == "m-3":
					atCut <- m.MessageKey
					<-ctx.Done()
					return ctx.Err()
				}
				if err := effect(ctx, tx, m); err != nil {
					return err
				}
				atCut <- m.MessageKey
				return row.old(ctx, again)
			}, &inbox.Config{BatchSize: 1}, &rabbitmq.Config{Dial: proxy.dial, MaxBackoff: 100 * time.Millisecond})
			<-atCut
			<-atCut
			eventually(t, time.Minute, "the ack of m1 is there", r.has(2))
			cut(t, proxy, host)
			eventually(t, time.Minute, "all are done", func() bool { return c.count(inbox.FirstAttempt)+c.count(inbox.Replay) == 3+row.stale })
			c.stop(t)
			if n := c.count(inbox.FirstAttempt); n != 3 {
				t.Errorf("%d messages were handled, want 3", n)
			}
			if st := c.source.Stats(); int(st.StaleAcks) != row.stale || len(c.stale) != row.stale || c.late != row.stale {
				t.Errorf("%d late acks were dropped, %d and %d events; want %d", st.StaleAcks, len(c.stale), c.late, row.stale)
			}
			if n := c.attempts(); n != 0 {
				t.Errorf("%d attempts have failed", n)
			}
			r.exactly("m-1", "m-2", "m-3")
			r.empty()
		})
	}
}

// case R2: the same in a loop of a user's own, in which the handler of m2 ends when
// m2 and m3 have come again.
func TestRabbitLateAckInAnOwnLoop(t *testing.T) {
	t.Parallel()
	for _, kind := range rabbitKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, kind)
			proxy, host := r.proxy()
			s := r.open(&rabbitmq.Config{Dial: proxy.dial, MaxBackoff: 100 * time.Millisecond})
			release, inHandler := make(chan struct{}), make(chan struct{})
			var once sync.Once
			c := r.consumer(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				if m.MessageKey == "m-2" {
					once.Do(func() { close(inHandler) })
					<-release
				}
				return effect(ctx, tx, m)
			}, &inbox.Config{LockTimeout: time.Minute})
			process := func(d *broker.Delivery) inbox.Outcome {
				result, err := c.Process(t.Context(), d.Message)
				if err != nil {
					t.Error(err)
				}
				return result.Outcome
			}
			r.publish(1, 3)
			old := receive(t, s, 3)
			process(old[0])
			if err := old[0].Ack(t.Context()); err != nil {
				t.Fatal(err)
			}
			eventually(t, time.Minute, "the ack of m1 is there", r.has(2))
			first := make(chan inbox.Outcome, 1)
			go func() { first <- process(old[1]) }()
			<-inHandler
			cut(t, proxy, host)
			second := receive(t, s, 2)
			outcomes := make(chan inbox.Outcome, 1)
			go func() { outcomes <- process(second[0]) }()
			close(release)
			if o := [2]inbox.Outcome{<-first, <-outcomes}; o != [2]inbox.Outcome{inbox.FirstAttempt, inbox.Replay} {
				t.Errorf("m2 ended with %v", o)
			}
			if err := old[1].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
				t.Errorf("late ack: %v, want %v", err, broker.ErrLost)
			}
			process(second[1])
			for _, d := range second {
				if err := d.Ack(t.Context()); err != nil {
					t.Error(err)
				}
			}
			if st := s.Stats(); st.StaleAcks != 1 || st.Epochs != 2 || st.Lost != 2 {
				t.Errorf("%+v, want 1 late ack, 2 channels and 2 lost deliveries", st)
			}
			if err := s.Close(t.Context()); err != nil {
				t.Error(err)
			}
			r.exactly("m-1", "m-2", "m-3")
			r.empty()
		})
	}
}

// has tells whether the queue has so many messages.
func (r *rabbitLine) has(messages int) func() bool {
	return func() bool {
		r.Helper()
		n, _ := r.totals()
		return n == messages
	}
}

// proxy puts a bad network in front of the server; host is its address there.
func (r *rabbitLine) proxy() (p *proxies, host string) {
	r.Helper()
	u, err := url.Parse(r.server.URL)
	if err != nil {
		r.Fatal(err)
	}
	return newProxies(r.T, u.Host), u.Host
}

// cut breaks all connections for a moment.
func cut(t *testing.T, p *proxies, host string) {
	t.Helper()
	cure, err := p.refuse([]string{host})
	if err != nil {
		t.Fatal(err)
	}
	if err := cure(); err != nil {
		t.Fatal(err)
	}
}

// exactly checks that these keys have one effect and one inbox row each, and that
// there is nothing else.
func (r *rabbitLine) exactly(keys ...string) {
	r.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects":                                         len(keys),
		"select count(distinct key) from effects":                              len(keys),
		"select count(*) from effects e join inbox i on i.message_key = e.key": len(keys),
		"select count(*) from inbox":                                           len(keys),
		"select count(*) from inbox_parked":                                    0,
	} {
		if got := count(r.T, r.pool, query); got != want {
			r.Errorf("%s = %d, want %d", query, got, want)
		}
	}
	if got := count(r.T, r.pool, "select count(*) from effects where key = any($1)", keys); got != len(keys) {
		r.Errorf("%d of these have an effect: %v", got, keys)
	}
}
