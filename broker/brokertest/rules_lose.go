package brokertest

import (
	"context"
	"errors"
	"slices"

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

// Rule 25: before the broker takes deliveries away that a source can tell of, the
// source asks for them: their Recall channels are closed while they can still be
// settled. What is acked then is done; what is given back comes again.
func recallAsksFirst(r *rig) {
	messages := lane(3)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	for _, d := range got {
		if d.Recall == nil || d.Recalled() {
			r.Fatalf("%s: Recall is nil or closed at the hand-over, want it open", body(d))
		}
	}
	r.recall(source, got...)
	r.ack(got[0])
	r.nack(0, got[1:]...)
	r.ackAll(source, false, "m1", "m2")
	r.quiet(source, "all messages are acked")
}

// recall calls the hook and waits until the deliveries are recalled, and not lost.
func (r *rig) recall(source broker.Source, deliveries ...*broker.Delivery) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	if err := r.queue.Recall(ctx, source); err != nil {
		r.Fatalf("Queue.Recall: %v", err)
	}
	for _, d := range deliveries {
		select {
		case <-d.Recall:
		case <-ctx.Done():
			r.Fatalf("%s: the delivery is recalled, but Recall was not closed within %v", body(d), r.timing.Wait)
		}
		if d.Context().Err() != nil {
			r.Fatalf("%s: Recall was closed when the delivery was lost already, want it closed before", body(d))
		}
	}
}

// ackAll receives and acks exactly what is wanted, in order if that is wanted, too;
// the broker may take deliveries away meanwhile.
func (r *rig) ackAll(source broker.Source, ordered bool, want ...string) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	for len(want) > 0 {
		deliveries, err := r.receiveOnce(ctx, source, 10)
		if err != nil {
			r.Fatalf("receive: %v; %v never came", err, want)
		}
		for _, d := range deliveries {
			i := slices.Index(want, body(d))
			if i < 0 || (ordered && i > 0) {
				r.Fatalf("received %s, want %v", body(d), want)
			}
			err := r.tryAck(d)
			if errors.Is(err, broker.ErrLost) {
				break // And so are the others.
			}
			if err != nil {
				r.Fatalf("ack %s: %v", body(d), err)
			}
			want = slices.Delete(want, i, i+1)
		}
	}
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
