package brokertest

import (
	"fmt"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Rule 10: an acked message does not come again, neither to its source nor to
// the next one.
func ackIsFinal(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	r.ack(r.receive(source, bodies(messages)...)...)
	r.quiet(source, "all messages are acked")
	r.close(source)
	r.quiet(r.open(), "all messages are acked")
}

// Rule 11: a nacked message comes again, to its source, until it is acked.
func nackComesAgain(r *rig) {
	r.publish(message("k", "m0"))
	source := r.open()
	for range 3 {
		r.nack(0, r.receive(source, "m0")...)
	}
	r.ack(r.receive(source, "m0")...)
	r.quiet(source, "the message is acked")
}

// Rule 12: a nacked message does not come before its delay has passed, and does
// not hold up others meanwhile.
func nackDelay(r *rig) {
	r.publish(message("k", "m0"))
	source := r.open()
	first := r.receive(source, "m0")
	start := time.Now()
	r.nack(r.timing.Delay, first...)

	r.publish(message("other", "m1"))
	got := r.receiveInOrder(source, "m1", "m0")
	if took := time.Since(start); took < r.timing.Delay {
		r.Errorf("m0 came again after %v, want not before its delay of %v", took, r.timing.Delay)
	}
	r.ack(got...)
}

// Rule 13 (case R1): a second settlement returns ErrSettled, reaches nobody and
// does not hurt the other deliveries.
func ackTwice(r *rig) {
	messages := lane(3)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[0])
	r.refuse(got[0], broker.ErrSettled)
	r.refuse(got[0], broker.ErrSettled)
	r.ack(got[1])
	r.close(source)

	next := r.open()
	r.ack(r.receive(next, body(got[2]))...)
	r.quiet(next, "only the third message was not acked")
}

// Rule 14: the context of a delivery does not end because it, or another one, is
// settled.
func settledDeliveryIsNotLost(r *rig) {
	messages := spread(2)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[0])
	for _, d := range got {
		if err := d.Context().Err(); err != nil {
			r.Errorf("%s: the delivery's context ended (%v) after an ack, want it to go on", body(d), err)
		}
	}
	r.ack(got[1])
}

// Rule 15 (case K1): an ack speaks for its own message only. Messages before it
// that were not acked come again after a Close.
func acksOutOfOrder(r *rig) { outOfOrder(r, r.close) }

// Rule 16 (case K1): the same after a crash.
func acksOutOfOrderCrash(r *rig) { outOfOrder(r, r.crash) }

func outOfOrder(r *rig, end func(broker.Source)) {
	messages := lane(5)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[4], got[2])
	end(source)

	next := r.open()
	r.receiveAtLeast(next, body(got[0]), body(got[1]), body(got[3]))
}

// Rule 17: an acked message does not come again though an earlier one was not
// acked.
func selectiveAck(r *rig) {
	messages := lane(5)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[4], got[2])
	r.close(source)

	next := r.open()
	r.ack(r.receive(next, body(got[0]), body(got[1]), body(got[3]))...)
	r.quiet(next, "the other messages were acked")
}

// Rule 18 (case K1): the committed offset never passes a message that is not
// acked, never goes back, and ends behind the last one.
func committedNeverPasses(r *rig) {
	messages := lane(6)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	partition := got[0].Message.Source
	highest := int64(-1)
	sample := func(limit int64) {
		r.Helper()
		ctx, cancel := r.context()
		defer cancel()
		committed, err := r.queue.Committed(ctx)
		if err != nil {
			r.Fatalf("Queue.Committed: %v", err)
		}
		offset, ok := committed[partition]
		if !ok {
			return
		}
		if offset < highest {
			r.Errorf("the committed offset went back from %d to %d", highest, offset)
		}
		if offset > limit {
			r.Errorf("the committed offset is %d, want at most %d: the message there is not acked", offset, limit)
		}
		highest = max(highest, offset)
	}
	acked := make([]bool, len(got))
	for _, i := range []int{1, 0, 5, 3, 4, 2} {
		r.ack(got[i])
		acked[i] = true
		first := 0
		for first < len(acked) && acked[first] {
			first++
		}
		limit := got[len(got)-1].Message.Position.Offset + 1
		if first < len(got) {
			limit = got[first].Message.Position.Offset
		}
		for range 5 {
			sample(limit)
			pause(r.Context(), r.timing.Quiet/5)
		}
	}
	r.close(source)
	end := got[len(got)-1].Message.Position.Offset + 1
	sample(end)
	if highest != end {
		r.Errorf("all is acked and the source is closed, but the committed offset of %q is %d, want %d", partition, highest, end)
	}
}

// Rule 19: deliveries may be settled by many goroutines at once.
func concurrentAcks(r *rig) {
	const n = 200
	messages := make([]*broker.Message, n)
	for i := range messages {
		messages[i] = message(fmt.Sprintf("key-%d", i%20), fmt.Sprintf("m%d", i))
	}
	r.publish(messages...)
	source := r.open()
	ctx, cancel := r.context()
	defer cancel()
	failed := make(chan error, 2*n)
	var workers sync.WaitGroup
	for received := 0; received < n; {
		deliveries, err := r.receiveOnce(ctx, source, 17)
		if err != nil {
			r.Fatalf("receive: %v; got only %d of %d", err, received, n)
		}
		received += len(deliveries)
		for _, d := range deliveries {
			workers.Go(func() {
				if err := d.Ack(ctx); err != nil {
					failed <- fmt.Errorf("ack %s: %w", body(d), err)
				}
			})
		}
	}
	await(r, start(func() bool { workers.Wait(); return true }), r.timing.Wait, "Ack")
	for len(failed) > 0 {
		r.Errorf("%v", <-failed)
	}
	r.close(source)
	r.quiet(r.open(), "all messages are acked")
}
