package brokertest

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
)

func TestHarnessIsChecked(t *testing.T) {
	t.Parallel()
	right := Harness{Setup: fault{}.setup}
	change := func(f func(h *Harness)) Harness {
		h := right
		f(&h)
		return h
	}
	for _, tt := range []struct {
		name string
		h    Harness
		want string
	}{
		{"no setup", change(func(h *Harness) { h.Setup = nil }), "Harness.Setup is nil"},
		{"unknown feature", change(func(h *Harness) { h.Without = []Feature{"wings"} }), `Harness.Without has "wings"`},
		{"negative Wait", change(func(h *Harness) { h.Timing.Wait = -1 }), "Harness.Timing.Wait is -1ns, must not be negative"},
		{"negative Quiet", change(func(h *Harness) { h.Timing.Quiet = -1 }), "Harness.Timing.Quiet is -1ns, must not be negative"},
		{"negative Prompt", change(func(h *Harness) { h.Timing.Prompt = -1 }), "Harness.Timing.Prompt is -1ns, must not be negative"},
		{"negative Delay", change(func(h *Harness) { h.Timing.Delay = -1 }), "Harness.Timing.Delay is -1ns, must not be negative"},
		{"negative Idle", change(func(h *Harness) { h.Timing.Idle = -1 }), "Harness.Timing.Idle is -1ns, must not be negative"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if _, err := tt.h.complete(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got the error %v, want %q in it", err, tt.want)
			}
		})
	}
}

func TestTimingDefaults(t *testing.T) {
	t.Parallel()
	h, err := Harness{Setup: fault{}.setup}.complete()
	if err != nil {
		t.Fatal(err)
	}
	want := Timing{Wait: 30 * time.Second, Quiet: 500 * time.Millisecond, Prompt: 3 * time.Second, Delay: time.Second, Idle: 3 * time.Second}
	if h.Timing != want {
		t.Errorf("defaults are %+v, want %+v", h.Timing, want)
	}
	set := Timing{Wait: 1, Quiet: 2, Prompt: 3, Delay: 4, Idle: 5}
	h, err = Harness{Setup: fault{}.setup, Timing: set}.complete()
	if err != nil || h.Timing != set {
		t.Errorf("got %+v and the error %v, want %+v unchanged", h.Timing, err, set)
	}
}

// A hook that is missing is a failure, unless the adapter says so.
func TestMissingHookIsReported(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		remove  func(q *Queue)
		without []Feature
		want    string
	}{
		{"Open", func(q *Queue) { q.Open = nil }, nil, "Queue.Open is nil, must be a function"},
		{"Publish", func(q *Queue) { q.Publish = nil }, nil, "Queue.Publish is nil, must be a function"},
		{"Lose", func(q *Queue) { q.Lose = nil }, nil, `Queue.Lose is nil, must be a function unless Harness.Without has "lose hook"`},
		{"Recall", func(q *Queue) { q.Recall = nil }, nil, `Queue.Recall is nil, must be a function unless Harness.Without has "recall hook"`},
		{"Crash", func(q *Queue) { q.Crash = nil }, nil, `Queue.Crash is nil, must be a function unless Harness.Without has "crash hook"`},
		{"Cut", func(q *Queue) { q.Cut = nil }, nil, `Queue.Cut is nil, must be a function unless Harness.Without has "cut hook"`},
		{"Committed", func(q *Queue) { q.Committed = nil }, nil, `Queue.Committed is nil, must be a function unless Harness.Without has "committed hook"`},
		{"declared", func(q *Queue) { *q = Queue{Open: q.Open, Publish: q.Publish} }, []Feature{Lose, Recall, Crash, Cut, Committed}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			setup := func(t testing.TB) Queue {
				q := fault{}.setup(t)
				tt.remove(&q)
				return q
			}
			result := check(t, Harness{Setup: setup, Without: tt.without}, rules[0])
			if got := strings.Join(result.failures, "\n"); got != "" && tt.want == "" || !strings.Contains(got, tt.want) {
				t.Errorf("reported %q, want %q", got, tt.want)
			}
		})
	}
}

// A hook that fails ends the rule and is named.
func TestFailingHookIsReported(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name   string
		spoil  func(q *Queue)
		number string
		want   string
	}{
		{"Open", func(q *Queue) {
			q.Open = func(context.Context) (broker.Source, error) { return nil, errBroken }
		}, "01", "Queue.Open: connection refused"},
		{"Open nil", func(q *Queue) {
			q.Open = func(context.Context) (broker.Source, error) { return nil, nil }
		}, "01", "Queue.Open returned nil and no error"},
		{"Publish", func(q *Queue) {
			q.Publish = func(context.Context, ...*broker.Message) error { return errBroken }
		}, "01", "Queue.Publish: connection refused"},
		{"Publish beside Receive", func(q *Queue) {
			publish := q.Publish
			q.Publish = func(ctx context.Context, messages ...*broker.Message) error {
				if string(messages[0].Body) == "m49" {
					_ = publish(ctx, messages...) // never fails
					return errBroken
				}
				return publish(ctx, messages...)
			}
		}, "05", "Queue.Publish: connection refused"},
		{"Lose", func(q *Queue) {
			q.Lose = func(context.Context, broker.Source) error { return errBroken }
		}, "20", "Queue.Lose: connection refused"},
		{"Recall", func(q *Queue) {
			q.Recall = func(context.Context, broker.Source) error { return errBroken }
		}, "25", "Queue.Recall: connection refused"},
		{"Crash", func(q *Queue) {
			q.Crash = func(context.Context, broker.Source) error { return errBroken }
		}, "22", "Queue.Crash: connection refused"},
		{"Cut", func(q *Queue) {
			q.Cut = func(context.Context) (func() error, error) { return nil, errBroken }
		}, "24", "Queue.Cut: connection refused"},
		{"restore", func(q *Queue) {
			cut := q.Cut
			q.Cut = func(ctx context.Context) (func() error, error) {
				restore, err := cut(ctx)
				return func() error { return errors.Join(restore(), errBroken) }, err
			}
		}, "24", "Queue.Cut: restore: connection refused"},
		{"Committed", func(q *Queue) {
			q.Committed = func(context.Context) (map[string]int64, error) { return nil, errBroken }
		}, "18", "Queue.Committed: connection refused"},
		{"Committed empty", func(q *Queue) {
			q.Committed = func(context.Context) (map[string]int64, error) { return nil, nil }
		}, "18", `the committed offset of "memory:orders" is -1, want 6`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			setup := func(t testing.TB) Queue {
				q := fault{}.setup(t)
				tt.spoil(&q)
				return q
			}
			i := slices.IndexFunc(rules, func(r rule) bool { return strings.HasPrefix(r.name, tt.number) })
			result := check(t, Harness{Setup: setup}, rules[i])
			if got := strings.Join(result.failures, "\n"); !strings.Contains(got, tt.want) {
				t.Errorf("reported %q, want %q in it", got, tt.want)
			}
		})
	}
}

// Rules about a declared lack are skipped, and no others.
func TestWithoutSkips(t *testing.T) {
	t.Parallel()
	used := make(map[Feature]bool)
	for _, r := range rules {
		for _, f := range r.needs {
			used[f] = true
			result := check(t, Harness{Setup: fault{}.setup, Without: []Feature{f}}, r)
			if !strings.Contains(result.skipped, string(f)) || result.Failed() {
				t.Errorf("rule %s without %q: skipped %q, failures %q; want it skipped", r.name, f, result.skipped, result.failures)
			}
		}
	}
	// These change what a rule asks for instead.
	for _, f := range []Feature{BinaryHeaders, BinaryBody} {
		used[f] = true
	}
	for _, f := range features {
		if !used[f] {
			t.Errorf("no rule needs the feature %q", f)
		}
	}
}

// An adapter that lacks a feature passes when it says so.
func TestDeclaredLackPasses(t *testing.T) {
	t.Parallel()
	for name, without := range map[string][]Feature{
		"takes a body for text":                            {BinaryBody},
		"takes headers for text":                           {BinaryHeaders},
		"makes an empty body nil":                          {NilBody},
		"makes an empty key nil":                           {NilKey},
		"keeps one header of a name":                       {RepeatedHeaders},
		"takes the time of receipt":                        {Times},
		"has no positions":                                 {Positions},
		"does not count attempts":                          {Attempts},
		"ignores the delay of a nack":                      {NackDelay},
		"has no lanes":                                     {Lanes},
		"holds acks back until the earlier ones are there": {SelectiveAck},
		"loses what it has when nobody calls it":           {IdleMembership, Committed},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, s := range sabotages() {
				if s.name != name {
					continue
				}
				for _, r := range rules {
					if result := check(t, Harness{Setup: s.fault().setup, Without: without}, r); result.Failed() {
						t.Errorf("rule %s fails: %q", r.name, result.failures)
					}
				}
				return
			}
			t.Errorf("there is no broken adapter that %s", name)
		})
	}
}
