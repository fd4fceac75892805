package kafka

import (
	"errors"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
)

// logged returns how many lines of a log say all of that.
func logged(log *buffer, says ...string) int {
	n := 0
lines:
	for line := range strings.Lines(log.String()) {
		for _, s := range says {
			if !strings.Contains(line, s) {
				continue lines
			}
		}
		n++
	}
	return n
}

// However often it fails: each failure is an event, the trouble is one line in
// the log, and so is its end, which is one event.
func TestReconnectedFetch(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	network, log, events := &cuttable{}, &buffer{}, newSpy()
	cfg := quick(t)
	cfg.Dial, cfg.Hooks = network.dial, []Hook{events}
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	cfg.SessionTimeout, cfg.HeartbeatInterval = time.Minute, 20*time.Second // stays in its generation
	cfg.CommitInterval, cfg.WatchInterval, cfg.LagInterval = -1, -1, -1
	s := openSource(t, c, []string{"orders"}, cfg)
	await(t, events.assigned)
	awaitCommitted(t, c, "orders", 0, 0)
	network.cut()
	var last ReconnectEvent
	for range 5 {
		if last = await(t, events.reconnects); last.What != "orders/0" || last.Err == nil {
			t.Fatalf("event is %+v", last)
		}
	}
	if len(events.back) != 0 {
		t.Error("it is said to work while it does not")
	}
	if err := s.Health(); err == nil || !strings.Contains(err.Error(), "partition orders/0") {
		t.Errorf("health is %v", err)
	}
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	e := await(t, events.back)
	if e.What != "orders/0" || e.Attempts < 5 || e.After <= 0 {
		t.Errorf("event is %+v after %+v", e, last)
	}
	eventually(t, "healthy again", func() bool { return s.Health() == nil })
	if n := logged(log, "failed, trying again", "what=fetch", "partition=orders/0"); n != 1 {
		t.Errorf("the trouble is logged %d times: %s", n, log)
	}
	if n := logged(log, "works again", "what=fetch", "partition=orders/0"); n != 1 {
		t.Errorf("its end is logged %d times: %s", n, log)
	}
	if len(events.back) != 0 {
		t.Error("the end is told more than once")
	}
}

func TestReconnectedGroup(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	network, log, events := &cuttable{}, &buffer{}, newSpy()
	cfg := quick(t)
	cfg.Dial, cfg.Hooks, cfg.DrainTimeout = network.dial, []Hook{events}, -1
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	openSource(t, c, []string{"orders"}, cfg)
	await(t, events.assigned)
	network.cut()
	for tries := 0; tries < 3; {
		if e := await(t, events.reconnects); e.What == "group" {
			tries++
		}
	}
	if err := network.restore(); err != nil {
		t.Fatal(err)
	}
	for {
		e := await(t, events.back)
		if e.What != "group" {
			continue
		}
		if e.Attempts < 3 || e.After <= 0 {
			t.Errorf("event is %+v", e)
		}
		break
	}
	await(t, events.assigned)
	for _, what := range []string{"failed, trying again", "works again"} {
		if n := logged(log, what, "join the group"); n != 1 {
			t.Errorf("%q is logged %d times: %s", what, n, log)
		}
	}
	for _, what := range []string{"partitions assigned", "partitions revoked"} {
		if n := logged(log, what, "generation=1"); n != 1 {
			t.Errorf("%q is logged %d times for one generation: %s", what, n, log)
		}
	}
}

// A rebalance is no trouble with the brokers.
func TestRebalanceIsNoReconnect(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	events := newSpy()
	cfg := quick(t)
	cfg.Hooks = []Hook{events}
	openSource(t, c, []string{"orders"}, cfg)
	for range 3 {
		await(t, events.assigned)
		rebalance(c)
	}
	await(t, events.assigned)
	for len(events.reconnects) > 0 {
		t.Errorf("event is %+v", <-events.reconnects)
	}
	if n := len(events.back); n != 0 {
		t.Errorf("%d events that something works again", n)
	}
}

// Each dropped ack is an event and is counted; the log has a line for all.
func TestLateAcksAreLoggedTogether(t *testing.T) {
	t.Parallel()
	const n = 300
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	produce(t, producer(t, c), numbered("orders", 0, n)...)
	log, events := &buffer{}, newSpy()
	cfg := quick(t)
	cfg.Hooks, cfg.DrainTimeout = []Hook{events}, -1
	cfg.Logger = slog.New(slog.NewTextHandler(log, nil))
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, n)
	rebalance(c)
	if e := await(t, events.revoked); e.Lost != n {
		t.Errorf("event is %+v", e)
	}
	for _, d := range ds {
		if err := d.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
			t.Fatalf("got %v, want ErrLost", err)
		}
	}
	if len(events.stale) != n || s.Stats().StaleAcks != n {
		t.Errorf("%d events, %d counted, want %d", len(events.stale), s.Stats().StaleAcks, n)
	}
	if got := logged(log, "acks came too late"); got != 1 {
		t.Errorf("%d lines, want 1: %s", got, log)
	}
}

func TestLateAcksCount(t *testing.T) {
	t.Parallel()
	var l lateAcks
	now := time.Now()
	for i, tc := range []struct {
		after time.Duration
		want  int
	}{{0, 1}, {0, 0}, {time.Second, 0}, {retry.RemindEvery, 3}, {retry.RemindEvery, 0}, {2 * retry.RemindEvery, 2}} {
		if got := l.note(now.Add(tc.after)); got != tc.want {
			t.Errorf("ack %d: %d to log, want %d", i, got, tc.want)
		}
	}
}

// Each pause that is logged has a line for its end; one that follows soon is not
// logged.
func TestPauseLog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		log := &buffer{}
		f := &fetcher{
			session: &session{Source: &Source{log: slog.New(slog.NewTextHandler(log, nil))}},
			part:    &partition{topicPartition: topicPartition{"orders", 3}},
		}
		pause := func() {
			f.logPause(t.Context(), PauseEvent{Paused: true, For: pauseNotice})
			<-time.After(time.Second)
			f.logPause(t.Context(), PauseEvent{For: time.Second})
		}
		check := func(want int) {
			t.Helper()
			for _, what := range []string{"fetching is paused", "fetching goes on"} {
				if n := logged(log, what, "partition=orders/3", "level=INFO"); n != want {
					t.Errorf("%q is logged %d times, want %d: %s", what, n, want, log)
				}
			}
		}
		for range 10 {
			pause()
		}
		check(1)
		<-time.After(retry.RemindEvery)
		for range 10 {
			pause()
		}
		check(2)
	})
}
