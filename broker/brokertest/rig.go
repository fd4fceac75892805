package brokertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// tb is the part of testing.TB that the rules use. It is narrow so that a test
// of the suite can record what a rule reports.
type tb interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	Logf(format string, args ...any)
	Cleanup(func())
	Context() context.Context
}

// rig drives one queue for one rule. Its methods end the rule when something
// that they need does not happen in time.
type rig struct {
	tb
	queue   Queue
	timing  Timing
	without []Feature
}

func (r *rig) has(f Feature) bool { return !slices.Contains(r.without, f) }

// context returns a context that is bounded by Timing.Wait.
func (r *rig) context() (context.Context, context.CancelFunc) {
	return context.WithTimeout(r.Context(), r.timing.Wait)
}

// open opens a source that is closed at the end of the rule at the latest.
func (r *rig) open() broker.Source {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	source, err := r.queue.Open(ctx)
	if err != nil {
		r.Fatalf("Queue.Open: %v", err)
	}
	if source == nil {
		r.Fatalf("Queue.Open returned nil and no error")
	}
	r.Cleanup(func() {
		// The test's own context has ended by now.
		ctx, cancel := context.WithTimeout(context.Background(), r.timing.Wait)
		defer cancel()
		_ = bounded(ctx, r, "Close", func() error { return source.Close(ctx) }) // rules about Close look at its error themselves
	})
	return source
}

// publish sends messages.
func (r *rig) publish(messages ...*broker.Message) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	if err := r.queue.Publish(ctx, messages...); err != nil {
		r.Fatalf("Queue.Publish: %v", err)
	}
}

// message returns a message that is told by its body.
func message(key, body string) *broker.Message {
	return &broker.Message{Key: []byte(key), Body: []byte(body)}
}

// spread returns n messages m0, m1, .. with different keys.
func spread(n int) []*broker.Message {
	messages := make([]*broker.Message, n)
	for i := range messages {
		messages[i] = message(fmt.Sprintf("key-%d", i), fmt.Sprintf("m%d", i))
	}
	return messages
}

// lane returns n messages m0, m1, .. with one key.
func lane(n int) []*broker.Message {
	messages := make([]*broker.Message, n)
	for i := range messages {
		messages[i] = message("lane", fmt.Sprintf("m%d", i))
	}
	return messages
}

func bodies(messages []*broker.Message) []string {
	names := make([]string, len(messages))
	for i, m := range messages {
		names[i] = string(m.Body)
	}
	return names
}

func body(d *broker.Delivery) string { return string(d.Message.Body) }

func deliveredBodies(deliveries []*broker.Delivery) []string {
	names := make([]string, len(deliveries))
	for i, d := range deliveries {
		names[i] = body(d)
	}
	return names
}

// received is what a call of Receive returned.
type received struct {
	deliveries []*broker.Delivery
	err        error
}

// receiveOnce calls Receive once and checks what holds for every call.
func (r *rig) receiveOnce(ctx context.Context, source broker.Source, limit int) ([]*broker.Delivery, error) {
	r.Helper()
	got := bounded(ctx, r, "Receive", func() received {
		deliveries, err := source.Receive(ctx, limit)
		return received{deliveries, err}
	})
	return r.checkReceived(got, limit)
}

// checkReceived checks what holds for every call of Receive, and ends the rule
// when nothing is left to go on with.
func (r *rig) checkReceived(got received, limit int) ([]*broker.Delivery, error) {
	r.Helper()
	whole, faults := got.sift(limit)
	for _, fault := range faults {
		r.Errorf("%s", fault)
	}
	if got.err == nil && len(whole) == 0 {
		r.Fatalf("Receive returned nothing to work on and no error, want it to wait")
	}
	return whole, got.err
}

// sift returns the deliveries that can be worked on, and what is wrong.
func (got received) sift(limit int) (whole []*broker.Delivery, faults []string) {
	n := len(got.deliveries)
	if got.err != nil {
		if n > 0 {
			faults = append(faults, fmt.Sprintf("Receive returned %d deliveries together with the error %v, want none: they would be lost", n, got.err))
		}
		return nil, faults
	}
	if n < 1 || n > limit {
		faults = append(faults, fmt.Sprintf("Receive(limit %d) returned %d deliveries, want 1..%d", limit, n, limit))
	}
	for _, d := range got.deliveries {
		if d == nil || d.Message == nil {
			faults = append(faults, "Receive returned a delivery that is nil, or has no message")
			continue
		}
		if d.Settled() {
			faults = append(faults, fmt.Sprintf("%s: the delivery is settled already when it is handed over", body(d)))
		}
		whole = append(whole, d)
	}
	return whole, faults
}

// receive collects exactly the messages with these bodies, each once and in any
// order, and returns them in the order of their arrival.
func (r *rig) receive(source broker.Source, want ...string) []*broker.Delivery {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	var got []*broker.Delivery
	for len(got) < len(want) {
		deliveries, err := r.receiveOnce(ctx, source, len(want)-len(got))
		if err != nil {
			r.Fatalf("receive: %v; want %v, got only %v", err, want, deliveredBodies(got))
		}
		got = append(got, deliveries...)
	}
	if names := deliveredBodies(got); !sameElements(names, want) {
		r.Fatalf("received %v, want exactly %v in any order", names, want)
	}
	return got
}

// receiveInOrder is receive for messages whose order counts.
func (r *rig) receiveInOrder(source broker.Source, want ...string) []*broker.Delivery {
	r.Helper()
	got := r.receive(source, want...)
	if names := deliveredBodies(got); !slices.Equal(names, want) {
		r.Errorf("received %v, want the order %v", names, want)
	}
	return got
}

// receiveAtLeast collects messages until all wanted ones were there. Others may
// come too: a log delivers again what lies behind the first one that is not
// acked.
func (r *rig) receiveAtLeast(source broker.Source, want ...string) []*broker.Delivery {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	missing := slices.Clone(want)
	var got []*broker.Delivery
	for len(missing) > 0 {
		deliveries, err := r.receiveOnce(ctx, source, 10)
		if err != nil {
			r.Fatalf("receive: %v; %v never came, only %v", err, missing, deliveredBodies(got))
		}
		if len(got) > 100*len(want) {
			r.Fatalf("%v never came in %d deliveries of others", missing, len(got))
		}
		for _, d := range deliveries {
			got = append(got, d)
			missing = slices.DeleteFunc(missing, func(name string) bool { return name == body(d) })
		}
	}
	return got
}

// quiet checks that nothing arrives for Timing.Quiet.
func (r *rig) quiet(source broker.Source, why string) {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), r.timing.Quiet)
	defer cancel()
	deliveries, err := r.receiveOnce(ctx, source, 10)
	switch {
	case err == nil:
		r.Errorf("received %v, want nothing: %s", deliveredBodies(deliveries), why)
	case !errors.Is(err, context.DeadlineExceeded):
		r.Errorf("Receive returned %v, want the error of its ctx, %v", err, context.DeadlineExceeded)
	}
}

func (r *rig) ack(deliveries ...*broker.Delivery) {
	r.Helper()
	for _, d := range deliveries {
		if err := r.tryAck(d); err != nil {
			r.Fatalf("ack %s: %v", body(d), err)
		}
	}
}

func (r *rig) tryAck(d *broker.Delivery) error {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	return bounded(ctx, r, "Ack", func() error { return d.Ack(ctx) })
}

func (r *rig) nack(delay time.Duration, deliveries ...*broker.Delivery) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	for _, d := range deliveries {
		if err := bounded(ctx, r, "Nack", func() error { return d.Nack(ctx, delay) }); err != nil {
			r.Fatalf("nack %s: %v", body(d), err)
		}
	}
}

func (r *rig) close(source broker.Source) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	if err := bounded(ctx, r, "Close", func() error { return source.Close(ctx) }); err != nil {
		r.Fatalf("close: %v", err)
	}
}

func (r *rig) crash(source broker.Source) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	if err := r.queue.Crash(ctx, source); err != nil {
		r.Fatalf("Queue.Crash: %v", err)
	}
}

// lose calls the hook and waits until the deliveries are lost.
func (r *rig) lose(source broker.Source, deliveries ...*broker.Delivery) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	if err := r.queue.Lose(ctx, source); err != nil {
		r.Fatalf("Queue.Lose: %v", err)
	}
	r.lost(deliveries...)
}

// lost waits until the contexts of the deliveries have ended.
func (r *rig) lost(deliveries ...*broker.Delivery) {
	r.Helper()
	ctx, cancel := r.context()
	defer cancel()
	for _, d := range deliveries {
		select {
		case <-d.Context().Done():
		case <-ctx.Done():
			r.Fatalf("%s: the delivery is lost, but its context did not end within %v", body(d), r.timing.Wait)
		}
	}
}

// refuse checks that settling returns the error.
func (r *rig) refuse(d *broker.Delivery, want error) {
	r.Helper()
	if err := r.tryAck(d); !errors.Is(err, want) {
		r.Errorf("ack %s: got the error %v, want %v", body(d), err, want)
	}
}

// start runs f in a goroutine. f must not end the rule (Fatalf).
func start[T any](f func() T) <-chan T {
	result := make(chan T, 1)
	go func() { result <- f() }()
	return result
}

// await waits for the result of start and ends the rule when it takes too
// long, so that a source that hangs cannot hang the suite.
func await[T any](r *rig, result <-chan T, limit time.Duration, what string) T {
	r.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case v := <-result:
		return v
	case <-timer.C:
		r.Fatalf("%s has not returned after %v", what, limit)
		panic("unreachable: Fatalf does not return")
	}
}

// bounded calls f, which must return when ctx ends.
func bounded[T any](ctx context.Context, r *rig, what string, f func() T) T {
	r.Helper()
	result := start(f)
	select {
	case v := <-result:
		return v
	case <-ctx.Done():
		return await(r, result, r.timing.Prompt, what+", whose ctx has ended,")
	}
}

// pause lets time pass; it ends early with ctx.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

func sameElements(a, b []string) bool {
	a, b = slices.Clone(a), slices.Clone(b)
	sort.Strings(a)
	sort.Strings(b)
	return slices.Equal(a, b)
}

func join(names []string) string { return strings.Join(names, " ") }
