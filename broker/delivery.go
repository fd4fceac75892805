package broker

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Delivery is one hand-over of a message by a [Source]. It is settled (acked
// or nacked) at most once: the first call of Ack or Nack decides and every
// later one returns [ErrSettled] without reaching the broker. It is lost when
// the broker will hand the message to somebody else whatever we do (partition
// revoked, channel closed, visibility expired): its context ends, and settling
// it returns [ErrLost] without reaching the broker.
//
// All methods may be called concurrently.
type Delivery struct {
	// Message is what was delivered; never nil.
	Message *Message

	// Lane is the ordering domain: deliveries of one lane must be worked on one
	// at a time, in the order in which they were received. Empty means that the
	// delivery has no order towards any other.
	Lane string

	// Attempt is the broker's own count of deliveries of this message, from 1.
	// 0 when the broker does not count.
	Attempt int

	// Recall is closed when the source wants the delivery back (a rebalance, a
	// broker that shuts down): what was not started should be nacked at once,
	// what runs may still be finished and acked until Context ends. Until it is
	// settled or lost, nothing else of its lane is handed out. Nil: the source
	// never asks. An adapter shares one channel among the deliveries that
	// it asks for together, and closes it before it takes them away; when it
	// cannot tell beforehand, it need not.
	Recall <-chan struct{}

	// Tag is the adapter's own handle (offset, delivery tag, receipt handle).
	// Nobody else reads it.
	Tag any

	ctx     context.Context
	settler Settler
	settled atomic.Bool
}

// Settler is the adapter's end of a delivery. The methods are called at most
// once per delivery, both together, and possibly from several goroutines for
// different deliveries.
type Settler interface {
	// Ack tells the broker that this message is done, and says nothing about
	// others. A nil error means that the broker has it or will get it before
	// Source.Close returns nil. An adapter retries what can be retried before it
	// returns an error. ErrLost (wrapped or not) says that the delivery's epoch
	// is over: nothing was sent.
	Ack(ctx context.Context, d *Delivery) error

	// Nack gives the message back so that it is delivered again, to this or
	// another process, not before delay has passed (0: at once). Deliveries of
	// a lane that are given back come again in their order, and before messages
	// of the lane that were not delivered yet. Errors as for Ack.
	Nack(ctx context.Context, d *Delivery, delay time.Duration) error
}

// RefusalObserver is an optional interface of a [Settler], found by type
// assertion. Refused is told of every Ack or Nack that did not reach the
// settler, so that an adapter can count and log them; err is ErrSettled or
// ErrLost. It is called by the goroutine that settles and must not block.
type RefusalObserver interface {
	Refused(d *Delivery, err error)
}

// NewDelivery returns an unsettled delivery of m. The adapter cancels ctx when
// the delivery is lost, and sets Attempt, Recall and Tag before it hands the delivery
// over. It is for adapters and tests. None of ctx, m and s may be nil.
func NewDelivery(ctx context.Context, m *Message, lane string, s Settler) *Delivery {
	return &Delivery{Message: m, Lane: lane, ctx: ctx, settler: s}
}

// Context ends when the delivery is lost. It does not end when it is settled.
func (d *Delivery) Context() context.Context { return d.ctx }

// Recalled tells whether the source wants the delivery back.
func (d *Delivery) Recalled() bool {
	select {
	case <-d.Recall: // A nil channel is never ready.
		return true
	default:
		return false
	}
}

// Settled tells whether Ack or Nack was called.
func (d *Delivery) Settled() bool { return d.settled.Load() }

// Ack tells the broker that the message is done and must not come again.
//
// It returns ErrSettled when the delivery was settled before, ErrLost when the
// delivery was lost (the message will come again), else the adapter's error:
// then the message may or may not come again.
func (d *Delivery) Ack(ctx context.Context) error {
	if err := d.settle(); err != nil {
		return fmt.Errorf("broker: ack %q: %w", d.Message.ID, err)
	}
	return d.settler.Ack(ctx, d)
}

// Nack gives the message back; it is delivered again not before delay has
// passed. Zero or negative: at once. Errors as for Ack.
func (d *Delivery) Nack(ctx context.Context, delay time.Duration) error {
	if err := d.settle(); err != nil {
		return fmt.Errorf("broker: nack %q: %w", d.Message.ID, err)
	}
	return d.settler.Nack(ctx, d, max(delay, 0))
}

// settle claims the right to settle for its caller.
func (d *Delivery) settle() error {
	var err error
	switch {
	case d.settled.Swap(true):
		err = ErrSettled
	case d.ctx.Err() != nil:
		err = ErrLost
	default:
		return nil
	}
	if o, ok := d.settler.(RefusalObserver); ok {
		o.Refused(d, err)
	}
	return err
}
