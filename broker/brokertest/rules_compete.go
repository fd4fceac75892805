package brokertest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// crew is several sources that work on one queue at once.
type crew struct {
	*rig
	want int           // so many messages have to be acked
	all  chan struct{} // closed when they are

	mu     sync.Mutex
	acked  map[string]bool // by body
	out    map[string]held // the last delivery of each lane
	faults []string        // reported by the rule's own goroutine
}

// held is a delivery and the source that it came from.
type held struct {
	*broker.Delivery
	member int
}

func (c *crew) faultf(format string, args ...any) {
	c.faults = append(c.faults, fmt.Sprintf(format, args...))
}

// work receives, holds and acks on a source until ctx ends.
func (c *crew) work(ctx context.Context, member int, source broker.Source) {
	for {
		const limit = 2
		received, err := source.Receive(ctx, limit)
		deliveries := c.sift(member, received, err, limit)
		if len(deliveries) == 0 {
			return
		}
		for _, d := range deliveries {
			c.take(member, d)
		}
		pause(ctx, c.timing.Quiet/50) // the others get the chance to receive something wrong
		for _, d := range deliveries {
			c.done(ctx, member, d)
		}
	}
}

// sift returns what can be worked on; nothing is the end.
func (c *crew) sift(member int, deliveries []*broker.Delivery, err error, limit int) []*broker.Delivery {
	c.mu.Lock()
	defer c.mu.Unlock()
	whole, faults := received{deliveries, err}.sift(limit)
	c.faults = append(c.faults, faults...)
	switch {
	case err == nil && len(whole) == 0:
		c.faultf("source %d: Receive returned nothing to work on and no error, want it to wait", member)
	case err != nil && !errors.Is(err, context.Canceled):
		c.faultf("source %d: receive: %v", member, err)
	}
	return whole
}

func (c *crew) take(member int, d *broker.Delivery) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.acked[body(d)] {
		c.faultf("%s was acked and came again", body(d))
	}
	if d.Lane == "" {
		return
	}
	other, ok := c.out[d.Lane]
	if ok && other.member != member && !other.Settled() && other.Context().Err() == nil {
		c.faultf("the lane %q is with two sources at once: %s and %s", d.Lane, body(other.Delivery), body(d))
	}
	c.out[d.Lane] = held{d, member}
}

func (c *crew) done(ctx context.Context, member int, d *broker.Delivery) {
	err := d.Ack(context.WithoutCancel(ctx))
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case errors.Is(err, broker.ErrLost):
		return // it comes again: the sources are still sharing out the work
	case err != nil:
		c.faultf("source %d: ack %s: %v", member, body(d), err)
		return
	case c.acked[body(d)]:
		return
	}
	c.acked[body(d)] = true
	if len(c.acked) == c.want {
		close(c.all)
	}
}

// share lets two sources work on the messages until all are acked.
func share(r *rig, messages []*broker.Message) {
	r.Helper()
	c := &crew{rig: r, want: len(messages), all: make(chan struct{}), acked: make(map[string]bool), out: make(map[string]held)}
	sources := []broker.Source{r.open(), r.open()}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	var workers sync.WaitGroup
	for i, source := range sources {
		workers.Go(func() { c.work(ctx, i, source) })
	}
	r.publish(messages...)
	timer := time.NewTimer(r.timing.Wait)
	defer timer.Stop()
	select {
	case <-c.all:
	case <-timer.C:
	}
	cancel()
	await(r, start(func() bool { workers.Wait(); return true }), r.timing.Prompt, "Receive or Ack, whose ctx has ended,")

	for _, fault := range c.faults {
		r.Errorf("%s", fault)
	}
	if len(c.acked) < c.want {
		r.Fatalf("only %d of %d messages were acked within %v", len(c.acked), c.want, r.timing.Wait)
	}
	for _, source := range sources {
		r.close(source)
	}
	r.quiet(r.open(), "all messages are acked")
}

// Rule 60: several sources share the messages; none is lost, and none comes
// again that was acked.
func sourcesCompete(r *rig) {
	messages := spread(40)
	share(r, messages)
}

// Rule 61: a lane is with one source at a time.
func laneHasOneSource(r *rig) {
	var messages []*broker.Message
	for i := range 60 { // runs of five, so that two sources meet in one lane if they can
		messages = append(messages, message(fmt.Sprintf("lane-%d", i/5%4), fmt.Sprintf("m%d", i)))
	}
	share(r, messages)
}

// Rule 62: what a source had in its hands when it was closed comes to those
// that are open.
func closedSourceHandsOver(r *rig) {
	messages := spread(6)
	r.publish(messages...)
	first := r.open()
	r.receive(first, bodies(messages)...)
	second := r.open()
	r.close(first)
	got := r.receiveAtLeast(second, bodies(messages)...)
	for _, d := range got {
		if err := r.tryAck(d); err != nil && !errors.Is(err, broker.ErrLost) {
			r.Errorf("ack %s: %v", body(d), err)
		}
	}
}
