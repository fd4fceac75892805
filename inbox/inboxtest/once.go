package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// TB is the part of testing.TB that the checks for users need.
type TB interface {
	Helper()
	Context() context.Context
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// twins is how many deliveries of the message come at the same moment.
const twins = 4

// Once delivers m as at-least-once brokers do and checks that the handler's work
// is done once: first to twins at the same moment, then again, then again with
// another broker id and position, as after a replay of the topic. It runs the
// real path of consumer, on the store that it was made with.
//
// state returns what the handler's work has left in the database, in a form that
// reflect.DeepEqual compares: rows, a count. It is called after the first round
// and after each further delivery, and must not change. Nil compares nothing.
//
// Once returns the result of the first attempt. It ends the test when the
// message is not handled at all.
func Once[Tx any](t TB, consumer *inbox.Consumer[Tx], m *broker.Message, state func() any) inbox.Result {
	t.Helper()
	first := together(t, consumer, m)
	var want any
	if state != nil {
		want = state()
	}
	replayed := *m
	replayed.ID += "-replayed"
	replayed.Position = broker.At(m.Position.Offset + 1_000_000)
	for _, again := range []struct {
		what string
		m    *broker.Message
	}{
		{"delivered again", m},
		{"replayed with another broker id", &replayed},
	} {
		r, err := consumer.Process(t.Context(), again.m)
		switch {
		case err != nil:
			t.Errorf("inboxtest: %s: %v", again.what, err)
			continue
		case r.Outcome != inbox.Replay:
			t.Errorf("inboxtest: %s: the outcome is %q, want %q: does the key depend on the broker's id or position?", again.what, r.Outcome, inbox.Replay)
		case string(r.Value) != string(first.Value):
			t.Errorf("inboxtest: %s: the result given back is not that of the first attempt", again.what)
		}
		if state == nil {
			continue
		}
		if now := state(); !reflect.DeepEqual(now, want) {
			t.Errorf("inboxtest: %s: the handler's work changed from %v to %v", again.what, want, now)
		}
	}
	return first
}

// together delivers m to several calls at the same moment, of which exactly one
// must be the first attempt.
func together[Tx any](t TB, consumer *inbox.Consumer[Tx], m *broker.Message) inbox.Result {
	t.Helper()
	var wg sync.WaitGroup
	results := make([]inbox.Result, twins)
	errs := make([]error, twins)
	for i := range twins {
		wg.Go(func() { results[i], errs[i] = consumer.Process(t.Context(), m) })
	}
	wg.Wait()
	var first *inbox.Result
	for i := range twins {
		switch {
		case errs[i] != nil:
			t.Fatalf("inboxtest: the message is not handled: %v", errs[i])
		case results[i].Outcome == inbox.FirstAttempt && first != nil:
			t.Errorf("inboxtest: the handler's work was committed for two twins")
		case results[i].Outcome == inbox.FirstAttempt:
			first = &results[i]
		case results[i].Outcome != inbox.Replay:
			t.Fatalf("inboxtest: the outcome of a twin is %q, want %q or %q", results[i].Outcome, inbox.FirstAttempt, inbox.Replay)
		}
	}
	if first == nil {
		t.Fatalf("inboxtest: the message was handled before this test: give it a fresh key or database")
		return inbox.Result{}
	}
	return *first
}

// Conflict checks that other, which must have the key of a message that was
// handled before and another body, is found to be a conflict and leaves the
// handler's work alone. state is as for Once.
func Conflict[Tx any](t TB, consumer *inbox.Consumer[Tx], other *broker.Message, state func() any) {
	t.Helper()
	var before any
	if state != nil {
		before = state()
	}
	r, err := consumer.Process(t.Context(), other)
	if r.Outcome != inbox.Conflict {
		t.Errorf("inboxtest: the outcome is %q (error: %v), want %q", r.Outcome, err, inbox.Conflict)
	}
	if state != nil {
		if after := state(); !reflect.DeepEqual(before, after) {
			t.Errorf("inboxtest: a conflict changed the handler's work from %v to %v", before, after)
		}
	}
}

// RolledBack checks that a message that fails leaves nothing: the handler must
// return an error for m, its work and its key must be gone, and state, as for
// Once, unchanged. It returns the handler's error.
func RolledBack[Tx any](t TB, consumer *inbox.Consumer[Tx], store inbox.Store[Tx], m *broker.Message, state func() any) error {
	t.Helper()
	var before any
	if state != nil {
		before = state()
	}
	r, err := consumer.Process(t.Context(), m)
	if err == nil {
		t.Fatalf("inboxtest: the handler did not fail: outcome %q", r.Outcome)
		return fmt.Errorf("inboxtest: outcome %q", r.Outcome)
	}
	if r.Key.MessageKey != "" {
		if row, lookupErr := store.Lookup(t.Context(), r.Key); row != nil {
			t.Errorf("inboxtest: the key of a failed message is kept: it would never run again")
		} else if lookupErr != nil && !errors.Is(lookupErr, inbox.ErrNotFound) {
			t.Errorf("inboxtest: look up the key: %v", lookupErr)
		}
	}
	if state != nil {
		if after := state(); !reflect.DeepEqual(before, after) {
			t.Errorf("inboxtest: a failed message changed the handler's work from %v to %v", before, after)
		}
	}
	return err
}
