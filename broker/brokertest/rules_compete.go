package brokertest

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/ackafter/ackafter/broker"
)

// crew is several sources that work on one queue at once.
type crew struct {
	*rig
	mu      sync.Mutex
	holding map[string]*broker.Delivery // the last delivery of a key that is not settled, by key
	holder  map[string]int
	acked   map[string]int // by body
	all     chan struct{}  // closed when want bodies are acked
	want    int
}

// work receives and acks on a source until ctx ends.
func (c *crew) work(ctx context.Context, member int, source broker.Source) {
	for {
		deliveries, err := source.Receive(ctx, 2)
		if errors.Is(err, context.Canceled) {
			return
		}
		if err != nil {
			c.Errorf("source %d: receive: %v", member, err)
			return
		}
		for _, d := range deliveries {
			c.take(member, d)
		}
		for _, d := range deliveries {
			c.done(ctx, member, d)
		}
	}
}

func (c *crew) take(member int, d *broker.Delivery) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.acked[body(d)] > 0 {
		c.Errorf("%s was acked and came again", body(d))
	}
	other := c.holding[d.Lane]
	if d.Lane != "" && other != nil && c.holder[d.Lane] != member && !other.Settled() && other.Context().Err() == nil {
		c.Errorf("the lane %q is with two sources at once: %s and %s", d.Lane, body(other), body(d))
	}
	c.holding[d.Lane], c.holder[d.Lane] = d, member
}

func (c *crew) done(ctx context.Context, member int, d *broker.Delivery) {
	err := d.Ack(context.WithoutCancel(ctx))
	if errors.Is(err, broker.ErrLost) {
		return // it comes again: the sources are still sharing out the work
	}
	if err != nil {
		c.Errorf("source %d: ack %s: %v", member, body(d), err)
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.acked[body(d)]++
	if len(c.acked) == c.want {
		select {
		case <-c.all:
		default:
			close(c.all)
		}
	}
}

func newCrew(r *rig, want int) *crew {
	return &crew{
		rig: r, holding: make(map[string]*broker.Delivery), holder: make(map[string]int),
		acked: make(map[string]int), all: make(chan struct{}), want: want,
	}
}

// share lets two sources work on the messages until all are acked.
func (c *crew) share(messages []*broker.Message) {
	c.Helper()
	sources := []broker.Source{c.open(), c.open()}
	ctx, cancel := context.WithCancel(c.Context())
	var workers sync.WaitGroup
	defer workers.Wait()
	defer cancel()
	for i, source := range sources {
		workers.Go(func() { c.work(ctx, i, source) })
	}
	c.publish(messages...)
	c.await()
	cancel()
	workers.Wait()
	for _, source := range sources {
		c.close(source)
	}
	c.quiet(c.open(), "all messages are acked")
}

func (c *crew) await() {
	c.Helper()
	ctx, cancel := c.context()
	defer cancel()
	select {
	case <-c.all:
	case <-ctx.Done():
		c.mu.Lock()
		defer c.mu.Unlock()
		c.Errorf("only %d of %d messages were acked within %v", len(c.acked), c.want, c.timing.Wait)
	}
}

// Rule 60: several sources share the messages; none is lost, and none comes
// again that was acked.
func sourcesCompete(r *rig) {
	messages := spread(40)
	newCrew(r, len(messages)).share(messages)
}

// Rule 61: a lane is with one source at a time.
func laneHasOneSource(r *rig) {
	var messages []*broker.Message
	for i := range 60 {
		messages = append(messages, message(fmt.Sprintf("lane-%d", i%4), fmt.Sprintf("m%d", i)))
	}
	newCrew(r, len(messages)).share(messages)
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
		ctx, cancel := r.context()
		if err := d.Ack(ctx); err != nil && !errors.Is(err, broker.ErrLost) {
			r.Errorf("ack %s: %v", body(d), err)
		}
		cancel()
	}
}
