package brokertest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Adapters that behave in another way than memory does, but within the
// contract: the suite must not forbid more than the contract does.
var variants = map[string]func() fault{
	"hands out one at a time": always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			if s.isDown() == nil {
				limit = 1
			}
			return s.wait(ctx, limit)
		},
	}),
	"is slow": always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			pause(ctx, 50*time.Millisecond)
			return s.wait(ctx, limit)
		},
		ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
			pause(ctx, 20*time.Millisecond)
			return s.rightAck(ctx, inner)
		},
		lose: func(s *faultySource) { time.AfterFunc(2*time.Second, func() { s.inner.Revoke() }) },
		close: func(ctx context.Context, s *faultySource) error {
			pause(ctx, 100*time.Millisecond)
			return s.inner.Close(context.WithoutCancel(ctx))
		},
	}),
	"shares out anew when a source comes": always(fault{
		opened: func(q *faultyQueue) {
			time.AfterFunc(30*time.Millisecond, func() {
				q.mu.Lock()
				sources := slices.Clone(q.sources)
				q.mu.Unlock()
				if len(sources) < 2 {
					return
				}
				for _, s := range sources {
					s.inner.Revoke()
				}
			})
		},
	}),
	"says in Close that its ctx ended": always(fault{
		close: func(ctx context.Context, s *faultySource) error {
			_ = s.inner.Close(ctx) // never fails
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.closed {
				return nil
			}
			s.closed = true
			return ctx.Err()
		},
	}),
	"loses all when the broker cannot be reached": always(fault{
		cut: func(q *faultyQueue) {
			for _, s := range q.sources {
				s.inner.Revoke()
			}
		},
	}),
	"has no ids, and its own headers": always(fault{
		message: func(_ *faultySource, m *broker.Message) {
			m.ID = ""
			m.Time = m.Time.Truncate(time.Second)
			m.Headers = append(broker.Headers{{Name: "x-stamp", Value: []byte("1")}}, m.Headers...)
		},
	}),
}

// wait is what a right adapter does in Receive.
func (s *faultySource) wait(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	if down := s.isDown(); down != nil {
		select {
		case <-down:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.next(ctx, limit)
}

func TestRightVariantPasses(t *testing.T) {
	t.Parallel()
	for name, variant := range variants {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, r := range rules {
				result := check(t, Harness{Setup: variant().setup}, r)
				if result.Failed() || result.skipped != "" {
					t.Errorf("rule %s: failures %q, skipped %q; want a pass", r.name, result.failures, result.skipped)
				}
			}
		})
	}
}
