package main

import (
	"context"
	"encoding/json"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// Batches go by ascending id, no faster than the rate.
func TestRetryAtARate(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(120, nil)...)
	term.run("dead", "retry", "--all", "--rate", "50/s", "--dry-run").expect(t, exitOK, "would be retried: 120 messages, in 2s")
	if len(fake.calls) > 0 {
		t.Fatal("a dry run changed something")
	}
	o := term.run("dead", "retry", "--all", "--rate", "50/s")
	o.expect(t, exitOK, "retried 120 messages\n")
	o.lacks(t, "passed over", "of about")
	var ids []int64
	for _, call := range fake.calls {
		if len(call) > 5 {
			t.Errorf("a batch of %d", len(call))
		}
		ids = append(ids, call...)
	}
	if len(ids) != 120 || !slices.IsSorted(ids) {
		t.Errorf("ids %v", ids)
	}
	// The first batch does not wait.
	if want := 2300 * time.Millisecond; term.clock.elapsed != want {
		t.Errorf("waited %v, want %v", term.clock.elapsed, want)
	}
}

// A long one says how far it came.
func TestRetryProgress(t *testing.T) {
	t.Parallel()
	term, _ := onFake(t, parkedRows(120, nil)...)
	o := term.run("dead", "retry", "--all", "--rate", "10/s")
	o.expect(t, exitOK, "retried 120 messages\n", "retried 51 of about 120, up to id 51\n", "retried 101 of about 120, up to id 101\n")
	o = term.run("dead", "retry", "--consumer", "nobody")
	o.expect(t, exitNotFound, "retried 0 messages", "nothing to be retried")
}

func TestRetryLimit(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(1300, nil)...)
	term.run("dead", "retry", "--all", "--limit", "700").expect(t, exitOK, "retried 700 messages")
	if got := [2]int{fake.state(inbox.ParkedRetry), fake.state(inbox.ParkedDead)}; got != [2]int{700, 600} {
		t.Errorf("retried and left: %v", got)
	}
	term.run("dead", "retry", "--all", "--after", "1000").expect(t, exitOK, "retried 300 messages")
	if n := slices.Max(fake.pages); n > pageSize {
		t.Errorf("a page of %d rows", n)
	}
}

// Conflicts and unknown effects are left to a person, who names them.
func TestRetryPassesOver(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(8, func(r *inbox.ParkedRecord) {
		switch r.ID {
		case 1:
			r.Reason = inbox.ReasonConflict
		case 2:
			r.Reason = inbox.ReasonEffectsUnknown
		case 3:
			r.State = inbox.ParkedWaiting
		case 4:
			r.State = inbox.ParkedDiscarded
		case 5:
			r.LeasedUntil = pinned.Add(time.Second)
		case 6:
			r.ParkedAt = pinned // Not before the command began.
		}
	})...)
	for _, args := range [][]string{{"dead", "retry", "--all", "--dry-run"}, {"dead", "retry", "--all"}} {
		o := term.run(args...)
		o.expect(t, exitOK, "retried", "2 messages\n", "passed over 1: conflict (look at them", "passed over 1: effects unknown (look at them",
			"passed over 1: in work at the moment, or changed since")
		o.lacks(t, "waiting", "discarded")
	}
	if n := fake.state(inbox.ParkedRetry); n != 2 {
		t.Errorf("retried %d", n)
	}
	term.run("dead", "retry", "--reason", "conflict").expect(t, exitOK, "retried 1 message\n")
	term.run("dead", "retry", "4", "3", "2", "2", "99").expect(t, exitOK, "retried 1 message\n", "passed over 1: in state waiting",
		"passed over 1: in state discarded", "passed over 1: not there")
	term.run("dead", "retry", "99").expect(t, exitNotFound, "nothing to be retried")
	if last := fake.calls[len(fake.calls)-1]; !slices.Equal(last, []int64{2}) {
		t.Errorf("the last batch was %v", last)
	}
}

// A signal lets the batch end that is under way, and the output says how to go on.
func TestRetryInterrupted(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(1300, nil)...)
	ctx, cancel := context.WithCancel(t.Context())
	term.ctx = ctx
	fake.before = func(ctx context.Context, call int) error {
		if call == 2 {
			cancel()
		}
		return ctx.Err()
	}
	o := term.run("dead", "retry", "--all")
	o.expect(t, exitFailure, "retried 1,000 messages\n", "interrupted", "stopped after 1,000 messages", "--after 1000 does the rest")
	if n := fake.state(inbox.ParkedRetry); n != 1000 {
		t.Errorf("retried %d", n)
	}
	term.ctx = nil
	term.run("dead", "retry", "--all", "--after", "1000").expect(t, exitOK, "retried 300 messages\n")
}

// The wait for the rate ends, too.
func TestRetryInterruptedInAWait(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(3, nil)...)
	ctx, cancel := context.WithCancel(t.Context())
	term.ctx, term.clock = ctx, nil
	fake.before = func(context.Context, int) error {
		cancel()
		return nil
	}
	o := term.run("dead", "retry", "1", "2", "3", "--rate", "1/h")
	o.expect(t, exitFailure, "retried 1 message\n", "interrupted", "the ids after 1 are left")
}

func TestRetryFails(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(1300, nil)...)
	fake.before = func(_ context.Context, call int) error {
		if call == 2 {
			return errors.New("connection reset")
		}
		return nil
	}
	o := term.run("dead", "retry", "--all", "--json")
	o.expect(t, exitFailure, "ids 501 to 1000: connection reset", "stopped after 500 messages", "--after 500 does the rest")
	var shown struct {
		Action  string
		Count   int
		Stopped bool
		Last    int64 `json:"last_id"`
	}
	if err := json.Unmarshal([]byte(o.stdout), &shown); err != nil || !shown.Stopped || shown.Count != 500 || shown.Last != 500 || shown.Action != "retried" {
		t.Errorf("%+v, %v", shown, err)
	}
	fake.before = func(ctx context.Context, _ int) error {
		<-ctx.Done()
		return ctx.Err()
	}
	term.run("dead", "retry", "7", "--timeout", "5ms").expect(t, exitFailure, "not done within 5ms")
	fake.before = func(context.Context, int) error { return errors.New("connection reset") }
	term.run("dead", "retry", "--all", "--limit", "1").expect(t, exitFailure, "connection reset", "retried 0 messages")
	fake.before = nil
	term.run("dead", "retry", "--all").expect(t, exitOK, "retried 800 messages")
}

// --timeout is for each call: a long command outlives it.
func TestEveryCallHasADeadline(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(600, nil)...)
	term.must("dead", "export", "--bodies", "--limit", "2")
	term.must("dead", "retry", "--all")
	for i, d := range fake.deadlines {
		if d.IsZero() || i > 0 && !d.After(fake.deadlines[i-1]) {
			t.Fatalf("deadlines %v", fake.deadlines)
		}
	}
	if len(fake.deadlines) < 6 {
		t.Errorf("only %d calls", len(fake.deadlines))
	}
}

func TestDiscardNeedsANote(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(3, func(r *inbox.ParkedRecord) {
		if r.ID == 3 {
			r.State = inbox.ParkedDiscarded
		}
	})...)
	term.run("dead", "discard", "--consumer", "billing", "--dry-run").expect(t, exitOK, "would be discarded: 2 messages")
	term.run("dead", "discard", "2", "3", "--note", " jo: garbage ").expect(t, exitOK, "discarded 1 message\n", "passed over 1: discarded already")
	if fake.note != "jo: garbage" {
		t.Errorf("note %q", fake.note)
	}
	term.run("dead", "discard", "--failure", "f1", "--note", "jo: garbage", "--yes").expect(t, exitOK, "discarded 1 message\n")
	term.run("dead", "discard", "2", "--note", "jo: garbage").expect(t, exitNotFound, "nothing to be discarded")
	if n := fake.state(inbox.ParkedDiscarded); n != 3 {
		t.Errorf("discarded %d", n)
	}
}

func TestRate(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]struct {
		rate  time.Duration
		batch int
	}{
		"":           {0, pageSize},
		"50/s":       {20 * time.Millisecond, 5},
		"1/s":        {time.Second, 1},
		"100/m":      {600 * time.Millisecond, 1},
		"3600/h":     {time.Second, 1},
		"1000000/s":  {time.Microsecond, pageSize},
		"1000000/h":  {3600 * time.Microsecond, 27},
		"1000/s":     {time.Millisecond, 100},
		"20/h":       {3 * time.Minute, 1},
		"10000000/s": {-1, 0},
		"50":         {-1, 0},
		"/s":         {-1, 0},
		"1.5/s":      {-1, 0},
	} {
		r, err := parseRate(text)
		if want.rate < 0 {
			if err == nil {
				t.Errorf("%q: no error", text)
			}
			continue
		}
		if err != nil || time.Duration(r) != want.rate || r.batch() != want.batch {
			t.Errorf("%q: %v, batch of %d, %v", text, time.Duration(r), r.batch(), err)
		}
	}
}

func TestWhen(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Time{
		"":                          {},
		"90m":                       ago(90 * time.Minute),
		"7d":                        ago(7 * 24 * time.Hour),
		"2026-03-09T10:00:00Z":      time.Date(2026, 3, 9, 10, 0, 0, 0, time.UTC),
		"2026-03-09T10:00:00+02:00": time.Date(2026, 3, 9, 8, 0, 0, 0, time.UTC),
	} {
		w, err := parseWhen("since", text)
		if got := w.at(pinned); err != nil || !got.Equal(want) {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}
