package sqs

import (
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Once something was handed out nothing is wanted until Receive is called again: a
// request that began in between would take a part of a group away from the next one.
func TestNothingIsWantedAfterTaking(t *testing.T) {
	t.Parallel()
	l := newLedger(nil, (&Config{}).withDefaults(), func() {})
	now := time.Now()
	l.want(3, now)
	if n := l.demand(); n != 3 {
		t.Errorf("wanted are %d, want 3", n)
	}
	var entries []*entry
	for _, id := range []string{"a", "b"} {
		entries = append(entries, &entry{id: id, message: &broker.Message{ID: id}, received: now})
	}
	l.add(entries, now)
	if n := l.demand(); n != 1 {
		t.Errorf("wanted beside what is here are %d, want 1", n)
	}
	if got := l.take(3); len(got) != 2 {
		t.Fatalf("taken were %d, want 2", len(got))
	}
	if n := l.demand(); n != 0 {
		t.Errorf("wanted after taking are %d, want 0", n)
	}
	if l.take(3); l.demand() != 0 {
		t.Error("taking nothing changes what is wanted")
	}
}
