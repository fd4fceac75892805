package kafka_test

import (
	"context"
	"testing"
	"time"

	"github.com/ackafter/ackafter/kafka"
)

type assigned chan kafka.AssignedEvent

func (c assigned) OnAssigned(_ context.Context, e kafka.AssignedEvent) { c <- e }

type revoked chan kafka.RevokedEvent

func (c revoked) OnRevoked(_ context.Context, e kafka.RevokedEvent) { c <- e }

// A handler of 8 s, a session of 3 s, and a member that joins in the midst of it:
// the handler finishes, its ack is committed, nobody is thrown out.
func TestRealDrainOutlivesSession(t *testing.T) {
	t.Parallel()
	l := newLab(t, realBrokers(t), 2, nil)
	l.numbers(0, 1)
	l.numbers(1, 1)
	begins, ends := make(assigned, 10), make(revoked, 10)
	cfg := l.config()
	cfg.HeartbeatInterval, cfg.SessionTimeout = 500*time.Millisecond, 3*time.Second
	cfg.RebalanceTimeout, cfg.DrainTimeout = time.Minute, 40*time.Second
	cfg.Hooks = []kafka.Hook{begins, ends}
	first := l.open(cfg)
	member := (<-begins).Member
	ds := l.receive(first, 2)

	other := *cfg
	other.Hooks = nil
	second := l.open(&other)
	<-ds[0].Recall
	<-time.After(8 * time.Second)
	l.ack(ds...)
	e := <-ends
	if e.Lost != 0 || e.Err != nil || e.Drain < 7*time.Second {
		t.Errorf("event is %+v, want that nothing is lost", e)
	}
	for id, o := range l.committed(2) {
		if o != 1 {
			t.Errorf("partition %d: committed is %d, want 1", id, o)
		}
	}
	if again := <-begins; again.Member != member {
		t.Errorf("the member %s has become %s: it was thrown out", member, again.Member)
	}
	l.eventually("both have a partition", func() bool {
		return len(first.Stats().Partitions) == 1 && len(second.Stats().Partitions) == 1
	})
	if n := first.Stats().StaleAcks; n != 0 {
		t.Errorf("%d acks were dropped", n)
	}
	for _, s := range []*kafka.Source{first, second} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if again, err := s.Receive(ctx, 10); err == nil {
			t.Errorf("got %q again", bodies(again))
		}
		cancel()
	}
}
