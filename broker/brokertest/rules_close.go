package brokertest

import (
	"context"
	"errors"

	"github.com/ackafter/ackafter/broker"
)

// Rule 30: after Close, Receive returns ErrClosed, also when there are messages.
func receiveAfterClose(r *rig) {
	source := r.open()
	r.publish(spread(3)...)
	r.receive(source, "m0", "m1", "m2")
	r.close(source)
	for range 2 {
		ctx, cancel := context.WithTimeout(r.Context(), r.timing.Prompt)
		if _, err := r.receiveOnce(ctx, source, 1); !errors.Is(err, broker.ErrClosed) {
			r.Errorf("Receive after Close: got the error %v, want %v", err, broker.ErrClosed)
		}
		cancel()
	}
}

// Rule 31: a Receive that is running when the source is closed returns
// ErrClosed.
func closeWhileReceiving(r *rig) {
	source := r.open()
	r.publish(message("k", "m0"))
	r.ack(r.receive(source, "m0")...)

	ctx, cancel := r.context()
	defer cancel()
	returned := r.receiveNothing(ctx, source)
	r.close(source)
	if got := await(r, returned, r.timing.Prompt, "Receive on a source that was closed"); !errors.Is(got.err, broker.ErrClosed) {
		r.Errorf("Receive on a source that was closed: got the error %v, want %v", got.err, broker.ErrClosed)
	}
}

// Rule 32: a second Close returns nil, and so does the Close of a source that
// was never used.
func closeTwice(r *rig) {
	unused := r.open()
	r.close(unused)
	r.close(unused)

	source := r.open()
	r.publish(message("k", "m0"))
	r.ack(r.receive(source, "m0")...)
	r.close(source)
	r.close(source)
}

// Rule 33: Close returns when its ctx has ended, whatever is unsettled, and
// nothing is lost by that.
func closeIsBounded(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)

	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	if err := bounded(ctx, r, "Close", func() error { return source.Close(ctx) }); err != nil {
		r.Logf("Close with a ctx that has ended: %v", err) // allowed: it may not have reached the broker
	}
	r.lost(got...)
	next := r.open()
	r.ack(r.receiveAtLeast(next, bodies(messages)...)...)
}

// Rule 34: acks for which Ack returned nil have reached the broker when Close
// returns nil.
func closeFlushesAcks(r *rig) {
	messages := lane(10)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[:7]...)
	r.close(source)

	next := r.open()
	r.ack(r.receive(next, deliveredBodies(got[7:])...)...)
	r.quiet(next, "the other messages were acked before Close")
}

// Rule 35: unsettled deliveries are lost when Close returns, and their messages
// come to the next source.
func closeGivesBack(r *rig) {
	messages := spread(4)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.close(source)
	for _, d := range got {
		if d.Context().Err() == nil {
			r.Errorf("%s: the source is closed, but the delivery's context goes on", body(d))
		}
	}
	r.refuse(got[0], broker.ErrLost)

	next := r.open()
	r.ack(r.receive(next, bodies(messages)...)...)
	r.quiet(next, "all messages are acked")
}

// Rule 37: Close returns when its ctx ends though the broker cannot be reached.
func closeIsBoundedWhenCut(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	restore := r.cut()
	ctx, cancel := context.WithTimeout(r.Context(), r.timing.Quiet)
	defer cancel()
	if err := bounded(ctx, r, "Close", func() error { return source.Close(ctx) }); err != nil {
		r.Logf("Close while the broker cannot be reached: %v", err) // allowed
	}
	r.lost(got...)
	restore()
	next := r.open()
	r.ack(r.receiveAtLeast(next, bodies(messages)...)...)
}

// Rule 38: a source that is a broker.HealthReporter has nothing to complain of
// while it works, and reports ErrClosed after Close.
func healthUntilClosed(r *rig) {
	source := r.open()
	reporter, ok := source.(broker.HealthReporter)
	if !ok {
		r.Logf("the source is no broker.HealthReporter")
		return
	}
	r.publish(message("k", "m0"))
	r.ack(r.receive(source, "m0")...)
	if err := reporter.Health(); err != nil {
		r.Errorf("Health of a source that works: got the error %v, want nil", err)
	}
	r.close(source)
	if err := reporter.Health(); !errors.Is(err, broker.ErrClosed) {
		r.Errorf("Health after Close: got the error %v, want %v", err, broker.ErrClosed)
	}
}
