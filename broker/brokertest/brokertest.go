// Package brokertest is the conformance suite for broker adapters: the rules of
// [broker.Source], [broker.Delivery] and [broker.Settler] as tests. An adapter's
// test is a constructor plus one call:
//
//	func TestSource(t *testing.T) {
//		brokertest.Run(t, brokertest.Harness{
//			Setup:   func(t testing.TB) brokertest.Queue { ... },
//			Without: []brokertest.Feature{brokertest.Attempts},
//		})
//	}
//
// Every rule runs as a subtest with a queue of its own. What a broker cannot do
// is said in Harness.Without, and only that is skipped: a feature that is
// forgotten fails.
//
// The suite depends on the standard library alone, so that an adapter's users
// download nothing for it.
package brokertest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Harness is what the suite needs to know about an adapter.
type Harness struct {
	// Setup makes a fresh queue (a topic and a group, a queue) that is empty and
	// that nothing else uses, and registers its end with t.Cleanup. It is called
	// once for every rule, from several goroutines. Required.
	Setup func(t testing.TB) Queue

	// Without names what the broker cannot do. Rules about it are skipped, with
	// a message. Default: none.
	Without []Feature

	// Timing says how patient the suite is. The zero value means the defaults.
	Timing Timing
}

// Queue is one queue on the broker, or whatever the adapter receives from.
type Queue struct {
	// Open opens a source. It is called several times for one queue: the sources
	// are instances of one subscriber (one consumer group) and share its
	// progress. It may return before the source takes part. Required.
	Open func(ctx context.Context) (broker.Source, error)

	// Publish sends messages with the broker's own client, in order, and returns
	// when the broker has them. Key, Headers, Body and Time are set, the rest is
	// not; what the broker cannot carry may be left out. Messages with equal keys
	// must get into one lane. It may be called before the first Open, and those
	// messages must be delivered. Required.
	Publish func(ctx context.Context, messages ...*broker.Message) error

	// Lose makes the broker take all unsettled deliveries away from an open
	// source, which then goes on and receives them again: a rebalance, a cut
	// connection, an expired visibility. It may return before the source has
	// noticed. Required, unless Harness.Without has Lose.
	Lose func(ctx context.Context, source broker.Source) error

	// Recall makes the broker ask an open source for its unsettled deliveries, and
	// leaves at least a second to settle them before it takes them away, if it
	// does: the begin of a rebalance. It may return before the source has noticed.
	// Required, unless Harness.Without has Recall.
	Recall func(ctx context.Context, source broker.Source) error

	// Crash ends a source as kill -9 ends its process: nothing that is buffered
	// is sent. The suite still calls Close afterwards, ignoring its error.
	// Required, unless Harness.Without has Crash.
	Crash func(ctx context.Context, source broker.Source) error

	// Cut makes the broker unreachable for the sources of this queue, new and old
	// ones (a proxy in front of it), until the returned function is called.
	// Publish is not called meanwhile. Required, unless Harness.Without has Cut.
	Cut func(ctx context.Context) (restore func() error, err error)

	// Committed returns, for each Message.Source, the offset from which the
	// broker would deliver to a new source: all below it is done. Sources
	// without a commit are left out. Required, unless Harness.Without has
	// Committed.
	Committed func(ctx context.Context) (map[string]int64, error)
}

// Feature is something that not every broker can do. A feature that is not in
// Harness.Without is tested.
type Feature string

// The features. Each comment says what is expected unless it is in
// Harness.Without.
const (
	// Lanes: deliveries with equal Message.Key have equal Lane, not empty.
	Lanes Feature = "lanes"
	// NackDelay: a nacked message is not delivered before the delay has passed,
	// and other lanes are not held up by it.
	NackDelay Feature = "nack delay"
	// Competing: several open sources share the messages of the queue.
	Competing Feature = "competing sources"
	// SelectiveAck: an acked message does not come again even when an earlier
	// one is not acked. A log with one committed offset cannot do it.
	SelectiveAck Feature = "selective ack"
	// IdleMembership: unsettled deliveries stay with a source that nobody calls
	// for Timing.Idle.
	IdleMembership Feature = "idle membership"
	// Attempts: Delivery.Attempt counts from 1.
	Attempts Feature = "attempts"
	// Positions: messages have a Source and a Position that grows within it.
	Positions Feature = "positions"
	// Keys: Message.Key comes through, any bytes.
	Keys Feature = "keys"
	// NilKey: a nil and an empty key are told apart.
	NilKey Feature = "nil key"
	// Headers: text headers come through.
	Headers Feature = "headers"
	// BinaryHeaders: header values may be any bytes, or empty.
	BinaryHeaders Feature = "binary headers"
	// RepeatedHeaders: a header name may come several times, order kept.
	RepeatedHeaders Feature = "repeated headers"
	// BinaryBody: a body may be any bytes.
	BinaryBody Feature = "binary body"
	// EmptyBody: a body may be empty.
	EmptyBody Feature = "empty body"
	// NilBody: a nil and an empty body are told apart.
	NilBody Feature = "nil body"
	// Times: Message.Time comes through, to the second or better.
	Times Feature = "times"
	// Lose: Queue.Lose is there.
	Lose Feature = "lose hook"
	// Recall: Queue.Recall is there, and deliveries have a Recall channel.
	Recall Feature = "recall hook"
	// Crash: Queue.Crash is there.
	Crash Feature = "crash hook"
	// Cut: Queue.Cut is there.
	Cut Feature = "cut hook"
	// Committed: Queue.Committed is there.
	Committed Feature = "committed hook"
)

var features = []Feature{
	Lanes, NackDelay, Competing, SelectiveAck, IdleMembership, Attempts, Positions, Keys, NilKey, Headers, BinaryHeaders,
	RepeatedHeaders, BinaryBody, EmptyBody, NilBody, Times, Lose, Recall, Crash, Cut, Committed,
}

// Timing says how patient the suite is. Zero means the default; negative values
// are an error.
type Timing struct {
	// Wait is how long something that must happen may take: opening a source,
	// a message that has to arrive, also after a source was lost, crashed or
	// closed; so it must be longer than the broker needs to notice that.
	// Default 30 s.
	Wait time.Duration
	// Quiet is how long nothing may arrive until the suite believes that nothing
	// will. A shorter time overlooks faults, and never reports false ones.
	// Default 500 ms.
	Quiet time.Duration
	// Prompt is how long something may take that must happen at once: Receive
	// after its ctx has ended, Close with a ctx that has ended. Default 3 s.
	Prompt time.Duration
	// Delay is the delay of a nack. It should be several times longer than a
	// message needs through the broker. Default 1 s.
	Delay time.Duration
	// Idle is how long a source is left alone; it should be longer than the
	// broker's session timeout or visibility time. Default 3 s.
	Idle time.Duration
}

// Run checks all rules, each in a subtest that runs in parallel to the others,
// and returns when all are done.
func Run(t *testing.T, h Harness) {
	t.Helper()
	h, err := h.complete()
	if err != nil {
		t.Fatal(err)
	}
	// The group makes Run wait for its parallel subtests.
	t.Run("rules", func(t *testing.T) {
		for _, r := range rules {
			t.Run(r.name, func(t *testing.T) {
				t.Parallel()
				h.run(t, r)
			})
		}
	})
}

// run checks one rule.
func (h Harness) run(t testing.TB, r rule) {
	t.Helper()
	for _, f := range r.needs {
		if slices.Contains(h.Without, f) {
			t.Skipf("brokertest: the broker is declared to be without: %s", f)
			return
		}
	}
	q := h.Setup(t)
	if err := h.checkQueue(q); err != nil {
		t.Fatal(err)
		return
	}
	r.check(&rig{tb: t, queue: q, timing: h.Timing, without: h.Without})
}

// complete fills in the defaults and tells what is wrong.
func (h Harness) complete() (Harness, error) {
	if h.Setup == nil {
		return h, errors.New("brokertest: Harness.Setup is nil, must be a function")
	}
	for _, f := range h.Without {
		if !slices.Contains(features, f) {
			return h, fmt.Errorf("brokertest: Harness.Without has %q, must be one of the package's features", f)
		}
	}
	for _, d := range []struct {
		name     string
		value    *time.Duration
		fallback time.Duration
	}{
		{"Wait", &h.Timing.Wait, 30 * time.Second},
		{"Quiet", &h.Timing.Quiet, 500 * time.Millisecond},
		{"Prompt", &h.Timing.Prompt, 3 * time.Second},
		{"Delay", &h.Timing.Delay, time.Second},
		{"Idle", &h.Timing.Idle, 3 * time.Second},
	} {
		if *d.value < 0 {
			return h, fmt.Errorf("brokertest: Harness.Timing.%s is %v, must not be negative", d.name, *d.value)
		}
		if *d.value == 0 {
			*d.value = d.fallback
		}
	}
	return h, nil
}

func (h Harness) checkQueue(q Queue) error {
	for _, f := range []struct {
		name    string
		missing bool
		feature Feature
	}{
		{"Open", q.Open == nil, ""},
		{"Publish", q.Publish == nil, ""},
		{"Lose", q.Lose == nil, Lose},
		{"Recall", q.Recall == nil, Recall},
		{"Crash", q.Crash == nil, Crash},
		{"Cut", q.Cut == nil, Cut},
		{"Committed", q.Committed == nil, Committed},
	} {
		switch {
		case !f.missing:
		case f.feature == "":
			return fmt.Errorf("brokertest: Queue.%s is nil, must be a function", f.name)
		case !slices.Contains(h.Without, f.feature):
			return fmt.Errorf("brokertest: Queue.%s is nil, must be a function unless Harness.Without has %q", f.name, f.feature)
		}
	}
	return nil
}
