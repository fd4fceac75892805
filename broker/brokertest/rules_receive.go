package brokertest

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Rule 01: Receive returns at least one and at most limit deliveries.
func receiveLimit(r *rig) {
	messages := spread(10)
	r.publish(messages...)
	source := r.open()
	ctx, cancel := r.context()
	defer cancel()
	var got []*broker.Delivery
	for len(got) < len(messages) {
		deliveries, err := r.receiveOnce(ctx, source, 3)
		if err != nil {
			r.Fatalf("receive: %v; got only %v", err, deliveredBodies(got))
		}
		got = append(got, deliveries...)
	}
	if names := deliveredBodies(got); !sameElements(names, bodies(messages)) {
		r.Errorf("received %v, want each of %v once", names, bodies(messages))
	}
}

// Rule 02: Receive blocks while there is nothing, and goes on when there is.
func receiveBlocksWhileEmpty(r *rig) {
	source := r.open()
	r.quiet(source, "nothing was published")

	ctx, cancel := r.context()
	defer cancel()
	waiting := r.receiveNothing(ctx, source)
	r.publish(message("k", "m0"))
	deliveries, err := r.checkReceived(await(r, waiting, r.timing.Wait+r.timing.Prompt, "Receive"), 1)
	if err != nil {
		r.Fatalf("a message was published while Receive was waiting, but it returned %v", err)
	}
	if names := deliveredBodies(deliveries); join(names) != "m0" {
		r.Errorf("received %v, want [m0]", names)
	}
}

// Rule 03: Receive does not wait for messages that are not there to fill its
// limit.
func receiveDoesNotLinger(r *rig) {
	source := r.open()
	r.publish(message("k", "m0"))
	r.ack(r.receive(source, "m0")...) // the source takes part from here on

	r.publish(message("k", "m1"))
	ctx, cancel := context.WithTimeout(r.Context(), r.timing.Prompt)
	defer cancel()
	deliveries, err := r.receiveOnce(ctx, source, 1000)
	if err != nil {
		r.Fatalf("Receive(limit 1000) with one message there: nothing within %v: %v", r.timing.Prompt, err)
	}
	if names := deliveredBodies(deliveries); join(names) != "m1" {
		r.Errorf("received %v, want [m1]", names)
	}
	r.ack(deliveries...)
}

// Rule 04: when its ctx ends, or has ended before, Receive returns ctx's error
// promptly.
func receiveEndsWithCtx(r *rig) {
	source := r.open()
	r.publish(message("k", "m0"))
	r.ack(r.receive(source, "m0")...)

	ended, cancel := context.WithCancel(r.Context())
	cancel()
	if _, err := r.receiveOnce(ended, source, 1); !errors.Is(err, context.Canceled) {
		r.Errorf("Receive with a ctx that has ended: got the error %v, want %v", err, context.Canceled)
	}

	ctx, cancel := r.context()
	defer cancel()
	returned := r.receiveNothing(ctx, source)
	cancel()
	if got := await(r, returned, r.timing.Prompt, "Receive, whose ctx was cancelled,"); !errors.Is(got.err, context.Canceled) {
		r.Errorf("Receive whose ctx was cancelled: got the error %v, want %v", got.err, context.Canceled)
	}
}

// receiveNothing starts a Receive of one message for which there is nothing and
// returns when it is waiting, as far as Timing.Quiet can tell.
func (r *rig) receiveNothing(ctx context.Context, source broker.Source) <-chan received {
	r.Helper()
	returned := start(func() received {
		deliveries, err := source.Receive(ctx, 1)
		return received{deliveries, err}
	})
	timer := time.NewTimer(r.timing.Quiet)
	defer timer.Stop()
	select {
	case got := <-returned:
		r.Fatalf("Receive returned %d deliveries and the error %v, want it to wait: there is nothing", len(got.deliveries), got.err)
	case <-timer.C:
	}
	return returned
}

// Rule 05: a Receive that ends with its ctx loses nothing, however the end and
// a message race.
func receiveCtxLosesNothing(r *rig) {
	const n = 50
	source := r.open()
	r.publish(message("k", "first"))
	r.ack(r.receive(source, "first")...)

	ctx, cancel := r.context()
	defer cancel()
	published := start(func() error {
		for i := range n {
			if err := r.queue.Publish(ctx, message(fmt.Sprintf("key-%d", i), fmt.Sprintf("m%d", i))); err != nil {
				return err
			}
		}
		return nil
	})
	seen := make(map[string]bool)
	step := 100 * time.Microsecond
	for i := 0; len(seen) < n; i++ {
		if i%20 == 19 && step < r.timing.Quiet/5 {
			step *= 2 // so that a slow source gets its turn, too
		}
		if ctx.Err() != nil {
			r.Fatalf("only %d of %d messages came within %v: the others were lost by a Receive whose ctx ended", len(seen), n, r.timing.Wait)
		}
		short, cancel := context.WithTimeout(ctx, time.Duration(i%20)*step)
		deliveries, err := r.receiveOnce(short, source, 3)
		cancel()
		if err != nil && !errors.Is(err, context.DeadlineExceeded) {
			r.Fatalf("receive: %v", err)
		}
		for _, d := range deliveries {
			if seen[body(d)] {
				r.Fatalf("%s was delivered twice", body(d))
			}
			seen[body(d)] = true
			r.ack(d)
		}
	}
	if err := await(r, published, r.timing.Wait, "Queue.Publish"); err != nil {
		r.Fatalf("Queue.Publish: %v", err)
	}
}

// Rule 06: a message that is out is not handed out a second time.
func receiveDeliversOnce(r *rig) {
	messages := spread(5)
	r.publish(messages...)
	source := r.open()
	deliveries := r.receive(source, bodies(messages)...)
	r.quiet(source, "all messages are out and unsettled")
	for _, d := range deliveries {
		if err := d.Context().Err(); err != nil {
			r.Errorf("%s: the delivery's context ended (%v) though nothing took it away", body(d), err)
		}
	}
	r.ack(deliveries...)
}

// Rule 07: a subscriber that is new gets what was published before it came
// (case K3).
func publishedBeforeOpen(r *rig) {
	r.publish(spread(3)...)
	first := r.open()
	r.ack(r.receive(first, "m0", "m1", "m2")...)
	r.close(first)

	r.publish(message("another key", "m3"), message("and another", "m4"))
	second := r.open()
	r.ack(r.receive(second, "m3", "m4")...)
}
