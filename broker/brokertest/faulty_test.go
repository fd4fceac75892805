package brokertest

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
)

// fault is what an adapter does wrong. Its functions replace what the right
// adapter does; nil ones leave it right.
type fault struct {
	config    *memory.Config
	opened    func(q *faultyQueue)
	published func(q *faultyQueue, messages []*broker.Message)
	deliver   func(d *broker.Delivery)                  // changes a delivery before it is handed over
	message   func(s *faultySource, m *broker.Message)  // changes a message before it is handed over
	context   func(ctx context.Context) context.Context // replaces the context of a delivery
	receive   func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error)
	ack       func(ctx context.Context, s *faultySource, inner *broker.Delivery) error
	nack      func(ctx context.Context, s *faultySource, inner *broker.Delivery, delay time.Duration) error
	refused   func(s *faultySource, err error)
	health    func(err error) error
	lose      func(s *faultySource)
	recall    func(s *faultySource)
	crash     func(s *faultySource)
	cut       func(q *faultyQueue)
	close     func(ctx context.Context, s *faultySource) error
	committed func(q *faultyQueue) int64
}

// faultyQueue is a memory queue with a broken adapter, or with a right one when
// nothing is set in its fault. It adds what memory does not have, a committed
// offset and a network that can be cut.
type faultyQueue struct {
	fault
	*memory.Queue
	name string
	end  chan struct{} // closed when the rule is over: nothing may block beyond it

	mu      sync.Mutex
	sources []*faultySource
	acked   map[int64]bool
	down    chan struct{} // closed when the network is back; nil when it is there
}

func (f fault) setup(t testing.TB) Queue {
	q := &faultyQueue{fault: f, Queue: memory.New("orders", f.config), name: "memory:orders", end: make(chan struct{}), acked: make(map[int64]bool)}
	t.Cleanup(func() {
		close(q.end)
		for _, s := range q.sources {
			_ = s.inner.Close(context.WithoutCancel(t.Context())) // never fails
		}
	})
	return Queue{
		Open: func(context.Context) (broker.Source, error) {
			if q.opened != nil {
				q.opened(q)
			}
			s := &faultySource{faultyQueue: q, inner: q.Source()}
			q.mu.Lock()
			defer q.mu.Unlock()
			q.sources = append(q.sources, s)
			return s, nil
		},
		Publish: func(_ context.Context, messages ...*broker.Message) error {
			if q.published != nil {
				q.published(q, messages)
				return nil
			}
			q.Publish(messages...)
			return nil
		},
		Lose: func(_ context.Context, source broker.Source) error {
			s := own(t, source)
			if q.lose != nil {
				q.lose(s)
				return nil
			}
			s.inner.Revoke()
			return nil
		},
		Recall: func(_ context.Context, source broker.Source) error {
			s := own(t, source)
			if q.recall != nil {
				q.recall(s)
				return nil
			}
			s.inner.Recall()
			return nil
		},
		Crash: func(ctx context.Context, source broker.Source) error {
			s := own(t, source)
			if q.crash != nil {
				q.crash(s)
				return nil
			}
			return s.inner.Close(ctx)
		},
		Cut: func(context.Context) (func() error, error) {
			down := make(chan struct{})
			q.mu.Lock()
			defer q.mu.Unlock()
			q.down = down
			if q.cut != nil {
				q.cut(q)
			}
			return func() error {
				q.mu.Lock()
				defer q.mu.Unlock()
				q.down = nil
				close(down)
				return nil
			}, nil
		},
		Committed: func(context.Context) (map[string]int64, error) {
			q.mu.Lock()
			defer q.mu.Unlock()
			if q.committed != nil {
				return map[string]int64{q.name: q.committed(q)}, nil
			}
			return map[string]int64{q.name: q.contiguous()}, nil
		},
	}
}

// own returns the source as what Open returned.
func own(t testing.TB, source broker.Source) *faultySource {
	s, ok := source.(*faultySource)
	if !ok {
		t.Fatalf("the suite passed a %T to a hook, want what Open returned", source)
	}
	return s
}

// contiguous returns the first offset that is not acked.
func (q *faultyQueue) contiguous() int64 {
	offset := int64(0)
	for q.acked[offset] {
		offset++
	}
	return offset
}

// faultySource wraps a memory source.
type faultySource struct {
	*faultyQueue
	inner *memory.Source

	mu       sync.Mutex
	held     []*broker.Delivery // inner deliveries that are not settled, in their order
	buffered []*broker.Delivery // for faults that keep something back
	closed   bool
	scratch  []byte // for a fault
}

func (s *faultySource) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	if s.receive != nil {
		return s.receive(ctx, s, limit)
	}
	return s.wait(ctx, limit)
}

// isDown returns nil, or what is closed when the network is back.
func (q *faultyQueue) isDown() <-chan struct{} {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.down
}

// next receives from the inner source and wraps what comes.
func (s *faultySource) next(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	inner, err := s.inner.Receive(ctx, limit)
	if err != nil {
		return nil, err
	}
	outer := make([]*broker.Delivery, len(inner))
	for i, d := range inner {
		outer[i] = s.wrap(d) //nolint:contextcheck // a delivery outlives the Receive that returned it
	}
	return outer, nil
}

func (s *faultySource) wrap(inner *broker.Delivery) *broker.Delivery {
	m := *inner.Message
	if s.message != nil {
		s.message(s, &m)
	}
	ctx := inner.Context()
	if s.context != nil {
		ctx = s.context(ctx)
	}
	outer := broker.NewDelivery(ctx, &m, inner.Lane, &faultySettler{s, inner})
	outer.Attempt, outer.Recall = inner.Attempt, inner.Recall
	if s.deliver != nil {
		s.deliver(outer)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held = append(s.held, inner)
	return outer
}

// out returns the inner deliveries that are out, in their order.
func (s *faultySource) out() []*broker.Delivery {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []*broker.Delivery
	for _, d := range s.held {
		if !d.Settled() && d.Context().Err() == nil {
			out = append(out, d)
		}
	}
	s.held = out
	return append([]*broker.Delivery(nil), out...)
}

// ackAll acks what is out, so that the messages are lost.
func (s *faultySource) ackAll() {
	for _, d := range s.out() {
		_ = d.Ack(context.Background()) // the fault is to lose them, whatever it says
	}
}

func (s *faultySource) Health() error {
	err := s.inner.Health()
	if s.health != nil {
		return s.health(err)
	}
	return err
}

func (s *faultySource) Close(ctx context.Context) error {
	if s.close != nil {
		return s.close(ctx, s)
	}
	return s.inner.Close(ctx)
}

// rightAck acks and remembers the offset as done.
func (s *faultySource) rightAck(ctx context.Context, inner *broker.Delivery) error {
	if err := inner.Ack(ctx); err != nil {
		return err
	}
	s.faultyQueue.mu.Lock()
	defer s.faultyQueue.mu.Unlock()
	s.acked[inner.Message.Position.Offset] = true
	return nil
}

// faultySettler settles a delivery of a faultySource.
type faultySettler struct {
	source *faultySource
	inner  *broker.Delivery
}

func (s *faultySettler) Ack(ctx context.Context, _ *broker.Delivery) error {
	if s.source.ack != nil {
		return s.source.ack(ctx, s.source, s.inner)
	}
	return s.source.rightAck(ctx, s.inner)
}

func (s *faultySettler) Nack(ctx context.Context, _ *broker.Delivery, delay time.Duration) error {
	if s.source.nack != nil {
		return s.source.nack(ctx, s.source, s.inner, delay)
	}
	return s.inner.Nack(ctx, delay)
}

func (s *faultySettler) Refused(_ *broker.Delivery, err error) {
	if s.source.refused != nil {
		s.source.refused(s.source, err)
	}
}

var errBroken = errors.New("connection refused")
