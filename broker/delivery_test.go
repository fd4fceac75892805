package broker_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// recorder is a settler that writes down its calls.
type recorder struct {
	mu    sync.Mutex
	calls []string
	err   error
}

func (r *recorder) note(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, fmt.Sprintf(format, args...))
}

func (r *recorder) Ack(context.Context, *broker.Delivery) error {
	r.note("ack")
	return r.err
}

func (r *recorder) Nack(_ context.Context, _ *broker.Delivery, delay time.Duration) error {
	r.note("nack %v", delay)
	return r.err
}

// observer also hears of refusals.
type observer struct{ recorder }

func (o *observer) Refused(_ *broker.Delivery, err error) { o.note("refused: %v", err) }

var (
	_ broker.Settler         = (*recorder)(nil)
	_ broker.RefusalObserver = (*observer)(nil)
)

func deliver(ctx context.Context, s broker.Settler) *broker.Delivery {
	return broker.NewDelivery(ctx, &broker.Message{ID: "orders/3/4711"}, "lane", s)
}

func TestNewDelivery(t *testing.T) {
	t.Parallel()
	m := &broker.Message{}
	d := broker.NewDelivery(t.Context(), m, "lane", &recorder{})
	if d.Message != m || d.Lane != "lane" || d.Context() != t.Context() || d.Settled() || d.Attempt != 0 {
		t.Errorf("got %+v", d)
	}
}

func TestFirstSettlementDecides(t *testing.T) {
	t.Parallel()
	ack := func(ctx context.Context, d *broker.Delivery) error { return d.Ack(ctx) }
	nack := func(ctx context.Context, d *broker.Delivery) error { return d.Nack(ctx, time.Second) }
	for _, tt := range []struct {
		name          string
		first, second func(context.Context, *broker.Delivery) error
		want          string
	}{
		{"ack, ack", ack, ack, "[ack refused: delivery is already settled]"},
		{"ack, nack", ack, nack, "[ack refused: delivery is already settled]"},
		{"nack, ack", nack, ack, "[nack 1s refused: delivery is already settled]"},
		{"nack, nack", nack, nack, "[nack 1s refused: delivery is already settled]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := &observer{}
			d := deliver(t.Context(), s)
			if err := tt.first(t.Context(), d); err != nil || !d.Settled() {
				t.Errorf("first: got the error %v, settled %v", err, d.Settled())
			}
			if err := tt.second(t.Context(), d); !errors.Is(err, broker.ErrSettled) {
				t.Errorf("second: got the error %v, want %v", err, broker.ErrSettled)
			}
			if got := fmt.Sprint(s.calls); got != tt.want {
				t.Errorf("calls are %s, want %s", got, tt.want)
			}
		})
	}
}

// An ack after the loss must not reach the broker (case R2).
func TestLostDeliveryIsNotSettled(t *testing.T) {
	t.Parallel()
	s := &observer{}
	ctx, cancel := context.WithCancel(t.Context())
	one, two := deliver(ctx, s), deliver(ctx, s)
	cancel()
	if err := one.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack: got the error %v, want %v", err, broker.ErrLost)
	}
	if err := two.Nack(t.Context(), 0); !errors.Is(err, broker.ErrLost) {
		t.Errorf("nack: got the error %v, want %v", err, broker.ErrLost)
	}
	if err := one.Ack(t.Context()); !errors.Is(err, broker.ErrSettled) {
		t.Errorf("second ack: got the error %v, want %v", err, broker.ErrSettled)
	}
	want := "[refused: " + broker.ErrLost.Error() + " refused: " + broker.ErrLost.Error() + " refused: " + broker.ErrSettled.Error() + "]"
	if got := fmt.Sprint(s.calls); got != want {
		t.Errorf("calls are %s, want %s", got, want)
	}
}

func TestRefusalObserverIsOptional(t *testing.T) {
	t.Parallel()
	s := &recorder{}
	d := deliver(t.Context(), s)
	if err := d.Ack(t.Context()); err != nil {
		t.Error(err)
	}
	if err := d.Ack(t.Context()); !errors.Is(err, broker.ErrSettled) {
		t.Errorf("got the error %v, want %v", err, broker.ErrSettled)
	}
	if got := fmt.Sprint(s.calls); got != "[ack]" {
		t.Errorf("calls are %s, want [ack]", got)
	}
}

func TestNackDelayIsNeverNegative(t *testing.T) {
	t.Parallel()
	for delay, want := range map[time.Duration]string{-time.Hour: "[nack 0s]", 0: "[nack 0s]", time.Hour: "[nack 1h0m0s]"} {
		s := &recorder{}
		if err := deliver(t.Context(), s).Nack(t.Context(), delay); err != nil {
			t.Error(err)
		}
		if got := fmt.Sprint(s.calls); got != want {
			t.Errorf("a delay of %v calls %s, want %s", delay, got, want)
		}
	}
}

// The adapter's error comes through as it is, and the delivery stays settled.
func TestAdapterErrorComesThrough(t *testing.T) {
	t.Parallel()
	broken := errors.New("connection refused")
	d := deliver(t.Context(), &recorder{err: broken})
	if err := d.Ack(t.Context()); !errors.Is(err, broken) || !d.Settled() {
		t.Errorf("got the error %v, settled %v", err, d.Settled())
	}
	if err := deliver(t.Context(), &recorder{err: broken}).Nack(t.Context(), 0); !errors.Is(err, broken) {
		t.Errorf("got the error %v", err)
	}
}

func TestRefusalNamesTheMessage(t *testing.T) {
	t.Parallel()
	d := deliver(t.Context(), &recorder{})
	if err := d.Ack(t.Context()); err != nil {
		t.Error(err)
	}
	want := `broker: ack "orders/3/4711": delivery is already settled`
	if err := d.Ack(t.Context()); err == nil || err.Error() != want {
		t.Errorf("got the error %v, want %s", err, want)
	}
	want = `broker: nack "orders/3/4711": delivery is already settled`
	if err := d.Nack(t.Context(), 0); err == nil || err.Error() != want {
		t.Errorf("got the error %v, want %s", err, want)
	}
}

// Exactly one of many settlements at once gets through.
func TestConcurrentSettlements(t *testing.T) {
	t.Parallel()
	for range 200 {
		s := &recorder{}
		d := deliver(t.Context(), s)
		var won atomic.Int32
		var all sync.WaitGroup
		for i := range 4 {
			all.Go(func() {
				err := d.Ack(t.Context())
				if i%2 == 1 {
					err = d.Nack(t.Context(), 0)
				}
				switch {
				case err == nil:
					won.Add(1)
				case !errors.Is(err, broker.ErrSettled):
					t.Errorf("got the error %v", err)
				}
			})
		}
		all.Wait()
		if len(s.calls) != 1 || won.Load() > 1 {
			t.Fatalf("%d calls reached the settler and %d callers won, want one", len(s.calls), won.Load())
		}
	}
}
