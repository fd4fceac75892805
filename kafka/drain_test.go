package kafka

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A handler that needs longer than the session lasts finishes while another
// member joins: its ack is committed, nobody is thrown out, nothing comes again.
func TestDrainOutlivesSession(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(2, "orders"))
	p := producer(t, c)
	produce(t, p, numbered("orders", 0, 1)...)
	produce(t, p, numbered("orders", 1, 1)...)
	events := newSpy()
	cfg := quick(t)
	cfg.SessionTimeout, cfg.RebalanceTimeout, cfg.DrainTimeout = time.Second, time.Minute, 30*time.Second
	cfg.Hooks = []Hook{events}
	first := openSource(t, c, []string{"orders"}, cfg)
	member := await(t, events.assigned).Member
	ds := receive(t, first, 2)

	other := *cfg
	other.Hooks = nil
	second := openSource(t, c, []string{"orders"}, &other)
	await(t, recalled(ds[0].Recall))
	<-time.After(2500 * time.Millisecond)
	ack(t, ds...)
	e := await(t, events.revoked)
	if e.Lost != 0 || e.Err != nil || e.Drain < 2*time.Second {
		t.Errorf("event is %+v, want that nothing is lost", e)
	}
	if again := await(t, events.assigned); again.Member != member {
		t.Errorf("the member %s has become %s: it was thrown out", member, again.Member)
	}
	for id := range int32(2) {
		if got := committed(c, "orders", id); got != 1 {
			t.Errorf("orders/%d: committed is %d, want 1", id, got)
		}
	}
	eventually(t, "both are members", func() bool { return len(second.Stats().Partitions) == 1 && len(first.Stats().Partitions) == 1 })
	receiveNothing(t, first)
	receiveNothing(t, second)
}

// recalled passes a signal on as an event.
func recalled(c <-chan struct{}) <-chan struct{} {
	events := make(chan struct{}, 1)
	go func() {
		<-c
		events <- struct{}{}
	}()
	return events
}

// Who has lost the place in the group need not finish: nobody takes the commit.
func TestDrainEndsWhenThrownOut(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, 1)...)
	events := newSpy()
	cfg := quick(t)
	cfg.RebalanceTimeout, cfg.DrainTimeout, cfg.Hooks = time.Minute, 50*time.Second, []Hook{events}
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, 1)
	var beats atomic.Int32
	c.ControlKey(int16(kmsg.Heartbeat), func(req kmsg.Request) (kmsg.Response, error, bool) {
		c.KeepControl()
		res := req.ResponseKind().(*kmsg.HeartbeatResponse)
		switch beats.Add(1) {
		case 1:
			res.ErrorCode = kerr.RebalanceInProgress.Code
		case 2, 3:
			res.ErrorCode = kerr.NotCoordinator.Code // passes
		case 4:
			res.ErrorCode = kerr.UnknownMemberID.Code
		default:
			return nil, nil, false
		}
		return res, nil, true
	})
	e := await(t, events.revoked)
	if e.Lost != 1 || e.Drain > 40*time.Second || beats.Load() < 4 {
		t.Errorf("event is %+v after %d heartbeats, want an early end", e, beats.Load())
	}
	if ds[0].Context().Err() == nil {
		t.Error("the delivery is not lost")
	}
	ack(t, receive(t, s, 1)...)
	awaitCommitted(t, c, "orders", 0, 1)
}

func TestHeartbeatAnswers(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	s := openSource(t, c, []string{"orders"}, quick(t))
	eventually(t, "joined", func() bool { return s.Stats().Joined })
	me := epoch{s.Stats().Generation, s.Stats().Member}
	for _, tc := range []struct {
		name        string
		member      epoch
		beat, alive error
	}{
		{"member", me, nil, nil},
		{"past generation", epoch{me.generation - 1, me.member}, kafkago.IllegalGeneration, nil},
		{"unknown member", epoch{me.generation, "who"}, kafkago.UnknownMemberId, nil},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		if err := s.coordinator.heartbeat(ctx, tc.member); !errors.Is(err, tc.beat) {
			t.Errorf("%s: heartbeat gives %v, want %v", tc.name, err, tc.beat)
		}
		if err := s.coordinator.alive(ctx, tc.member); !errors.Is(err, tc.alive) {
			t.Errorf("%s: alive gives %v, want %v", tc.name, err, tc.alive)
		}
		cancel()
	}
}
