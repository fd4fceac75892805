package brokertest

import (
	"context"
	"errors"

	"github.com/ackafter/ackafter/broker"
)

// Rule 20: deliveries that the broker takes away end their contexts, and their
// messages come again.
func lostComesAgain(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	r.lose(source, r.receive(source, bodies(messages)...)...)
	r.ack(r.receive(source, bodies(messages)...)...)
	r.quiet(source, "all messages are acked")
}

// Rule 21 (case R2): an ack that comes after the loss returns ErrLost and
// removes nothing: neither its own message, which was delivered again, nor
// another one.
func ackAfterLoss(r *rig) {
	messages := lane(3)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[0])
	r.lose(source, got[1], got[2])

	again := r.receiveAtLeast(source, body(got[1]), body(got[2]))
	r.refuse(got[1], broker.ErrLost)
	r.refuse(got[1], broker.ErrSettled)
	for _, d := range again {
		if d.Settled() || d.Context().Err() != nil {
			r.Errorf("%s: the new delivery was touched by the late ack of the old one", body(d))
		}
	}
	r.close(source)

	next := r.open()
	r.ack(r.receiveAtLeast(next, body(got[1]), body(got[2]))...)
}

// Rule 22: what a crashed source had not acked comes to the next one.
func crashComesAgain(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	r.receive(source, bodies(messages)...)
	r.crash(source)
	next := r.open()
	r.ack(r.receive(next, bodies(messages)...)...)
	r.close(next)
	r.quiet(r.open(), "all messages are acked")
}

// Rule 23: deliveries stay with a source while nobody calls it, also beyond
// session timeouts and leases.
func idleKeepsDeliveries(r *rig) {
	messages := lane(2)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	pause(r.Context(), r.timing.Idle)
	for _, d := range got {
		if err := d.Context().Err(); err != nil {
			r.Errorf("%s: the delivery was lost (%v) while the source was idle for %v", body(d), err, r.timing.Idle)
		}
	}
	r.ack(got...)
	r.close(source)
	r.quiet(r.open(), "all messages are acked")
}

// Rule 24 (case R4): a source survives that the broker cannot be reached for a
// while. Receive waits meanwhile, and nothing that is not acked is lost.
func cutIsSurvived(r *rig) {
	messages := spread(6)
	r.publish(messages[:3]...)
	source := r.open()
	r.receive(source, "m0", "m1", "m2")
	restore := r.cut()
	ctx, cancel := context.WithTimeout(r.Context(), r.timing.Quiet)
	defer cancel()
	if _, err := r.receiveOnce(ctx, source, 10); err != nil && !errors.Is(err, context.DeadlineExceeded) {
		r.Errorf("Receive while the broker cannot be reached: got the error %v, want it to wait for its ctx", err)
	}
	restore()
	r.publish(messages[3:]...)

	// Whether the first three are lost and come again on this source, or only
	// when it is closed, depends on how long the broker waits.
	got := r.receiveAtLeast(source, "m3", "m4", "m5")
	r.close(source)
	next := r.open()
	r.ack(r.receiveAtLeast(next, bodies(messages)...)...)
	r.Logf("received after the cut: %v", deliveredBodies(got))
}

// cut makes the broker unreachable until the returned function is called.
func (r *rig) cut() (restore func()) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	undo, err := r.queue.Cut(ctx)
	if err != nil {
		r.Fatalf("Queue.Cut: %v", err)
	}
	restored := false
	restore = func() {
		if restored {
			return
		}
		restored = true
		if err := undo(); err != nil {
			r.Errorf("Queue.Cut: restore: %v", err)
		}
	}
	r.Cleanup(restore)
	return restore
}
