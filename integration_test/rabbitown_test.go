package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/rabbitmq"
)

// What changes or breaks a whole server, on one that these tests have for
// themselves, one after the other.
func TestRabbitServer(t *testing.T) {
	t.Parallel()
	own, server := servers.OwnRabbitMQ(t)
	faults := []struct {
		name  string
		fault func(t *testing.T, own *servers.Own, r *rabbitLine) rabbitFault
		// Made now: a server that is killed right after it made a quorum queue may
		// have forgotten where the queue's data is (seen on 3.10).
		line *rabbitLine
	}{
		{"frozen for a moment", frozenShortly, newRabbitLineOn(t, server, "quorum")},
		{"frozen", frozenForLong, newRabbitLineOn(t, server, "quorum")},
		{"down", crashed, newRabbitLineOn(t, server, "quorum")},
	}
	t.Run("ack timeout", func(t *testing.T) { //nolint:paralleltest // the next one changes the server, too
		// Channels that are opened now have it.
		own.Control(t, "eval", "application:set_env(rabbit, consumer_timeout, 5000).")
		// At the same time.
		for _, check := range []func(){rabbitSlowHandler(t, server, 0), rabbitSlowHandler(t, server, rabbitConsumerTimeout), rabbitDeepPrefetch(t, server)} {
			check()
		}
	})
	own.Control(t, "eval", "application:set_env(rabbit, consumer_timeout, 1800000).")
	t.Run("alarm", func(t *testing.T) { rabbitAlarm(t, own, server) }) //nolint:paralleltest // the next one changes the server, too
	for _, row := range faults {                                       //nolint:paralleltest // the next one changes the server, too
		t.Run(row.name, func(t *testing.T) {
			r := row.line.in(t)
			r.survives(row.fault(t, own, r))
		})
	}
}

const rabbitConsumerTimeout = 5 * time.Second

// A handler that runs for longer than the broker waits for its ack: the message
// comes again, has one effect, and it is reported. It costs no attempt. Others are
// done meanwhile. It begins now; the returned function waits for the end.
func rabbitSlowHandler(t *testing.T, server *servers.RabbitMQServer, known time.Duration) (check func()) {
	t.Helper()
	r := newRabbitLineOn(t, server, "quorum")
	slow := make(chan struct{}, 1)
	slow <- struct{}{}
	c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		if m.MessageKey != "m-0" {
			return nil
		}
		select {
		case <-slow:
			<-ctx.Done() // longer than the broker likes
			return ctx.Err()
		default:
			return nil
		}
	}, &inbox.Config{BatchSize: 1}, &rabbitmq.Config{AckTimeout: known})
	began := time.Now()
	r.publish(0, 10)
	eventually(t, time.Minute, "the others are done", func() bool { return r.effects() == 9 })
	if took := time.Since(began); took > rabbitConsumerTimeout {
		t.Errorf("the others were done after %v", took)
	}
	return func() { r.checkSlowHandler(c, began) }
}

func (r *rabbitLine) checkSlowHandler(c *rabbitRun, began time.Time) {
	t := r.T
	t.Helper()
	eventually(t, time.Minute, "the slow one is done", func() bool { return r.effects() == 10 })
	t.Logf("the slow one was done after %v", time.Since(began))
	if st := c.source.Stats(); st.AckTimeouts != 1 || st.Epochs != 2 || st.Lost != 1 {
		t.Errorf("%+v, want one ack timeout", st)
	}
	if err := c.source.Health(); err == nil || !says(err, "ack timeout") {
		t.Errorf("health: %v", err)
	}
	c.stop(t)
	if len(c.ends) != 2 || !c.ends[0].AckTimeout || c.ends[1].AckTimeout {
		t.Errorf("events %+v", c.ends)
	}
	if !holds(c.tail(), "level=ERROR", "consumer_timeout", "Config.AckTimeout") {
		t.Error("the log does not say what to do")
	}
	if n := c.attempts(); n != 0 {
		t.Errorf("%d attempts have failed", n)
	}
	onceEach(t, r.pool, 10)
	r.empty()
}

// 200 messages are fetched, and what their handlers take together is far beyond
// what the broker waits for each of them: it never has to close the channel, and
// messages go back a few times at most, until as many are fetched as can be handled
// in time. It begins now; the returned function waits for the end.
func rabbitDeepPrefetch(t *testing.T, server *servers.RabbitMQServer) (check func()) {
	t.Helper()
	const messages, workers = 200, 4
	took := time.Duration(sized(200, 500)) * time.Millisecond
	r := newRabbitLineOn(t, server, "quorum")
	returned := make([]int, messages) // how often
	r.publish(0, messages)
	began := time.Now()
	c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if count, ok := m.Headers.Get("x-delivery-count"); ok {
			n, err := strconv.Atoi(string(count))
			id, err2 := strconv.Atoi(m.MessageKey[len("m-"):])
			if err != nil || err2 != nil {
				return errors.Join(err, err2)
			}
			returned[id] = n // each key is handled once
		}
		select {
		case <-time.After(took):
		case <-ctx.Done():
			return ctx.Err()
		}
		return effect(ctx, tx, m)
	}, &inbox.Config{Workers: workers, BatchSize: 1}, &rabbitmq.Config{AckTimeout: rabbitConsumerTimeout, Prefetch: messages})
	return func() { r.checkDeepPrefetch(c, began, returned) }
}

func (r *rabbitLine) checkDeepPrefetch(c *rabbitRun, began time.Time, returned []int) {
	const most = 6
	t, messages := r.T, len(returned)
	t.Helper()
	eventually(t, 2*time.Minute, "all are done", func() bool { return r.effects() == messages })
	all := time.Since(began)
	st := c.source.Stats()
	c.stop(t)
	sum, highest := 0, 0
	for _, n := range returned {
		sum, highest = sum+n, max(highest, n)
	}
	t.Logf("%d messages in %v; they went back %d times, one of them %d times; %+v", messages, all, sum, highest, st)
	if all < 2*rabbitConsumerTimeout {
		t.Errorf("all were done after %v: this shows nothing", all)
	}
	if st.AckTimeouts != 0 || st.Epochs != 1 || st.Lost != 0 {
		t.Errorf("%+v, want no ack timeout, one channel, nothing lost", st)
	}
	if highest > most || highest == 0 || st.Prefetch >= messages {
		t.Errorf("a message went back %d times, want 1 to %d; %d are fetched", highest, most, st.Prefetch)
	}
	if n := c.count(inbox.FirstAttempt); n != messages || len(c.outcomes) != messages || c.attempts() != 0 {
		t.Errorf("%d first attempts among %d outcomes, %d failed attempts", n, len(c.outcomes), c.attempts())
	}
	onceEach(t, r.pool, messages)
	r.empty()
}

// A resource alarm: consuming goes on, publishing ends with an error at its
// deadline, both say so, and it is over when the broker says that it is.
func rabbitAlarm(t *testing.T, own *servers.Own, server *servers.RabbitMQServer) {
	const before = 20
	r := newRabbitLineOn(t, server, "quorum")
	published := &rabbitEvents{}
	p, err := rabbitmq.OpenPublisher(t.Context(), []string{server.URL}, "", &rabbitmq.PublisherConfig{
		RoutingKey: r.queue, Hooks: []rabbitmq.Hook{published}, Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	release := make(chan struct{})
	r.publish(0, before)
	c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		select {
		case <-release:
		case <-ctx.Done():
			return ctx.Err()
		}
		return effect(ctx, tx, m)
	}, nil, nil)
	message := func(n int) *broker.Message { return &broker.Message{Body: fmt.Appendf(nil, `{"id":"m-%d"}`, n)} }

	own.Control(t, "set_vm_memory_high_watermark", "0")
	eventually(t, time.Minute, "publishing fails", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		began := time.Now()
		err := p.Publish(ctx, message(before))
		if took := time.Since(began); took > 10*time.Second {
			t.Errorf("Publish returned after %v", took)
		}
		return err != nil && errors.Is(err, context.DeadlineExceeded) && says(err, "alarm")
	})
	if err := p.Health(); err == nil || !says(err, "alarm") {
		t.Errorf("health of the publisher: %v", err)
	}
	if e := noted(published, &published.blocked); len(e) != 1 || !e[0].Blocked || e[0].Reason == "" {
		t.Errorf("events %+v", e)
	}
	close(release)
	eventually(t, time.Minute, "consuming goes on", func() bool { return c.count(inbox.FirstAttempt) >= before })
	eventually(t, time.Minute, "acks go on", func() bool { return c.source.Stats().Acks >= before })
	// The broker blocks those who publish, and tells nobody else.
	if err := c.source.Health(); err != nil && !says(err, "alarm") {
		t.Errorf("health of the source: %v", err)
	}
	waits := make(chan error, 1)
	go func() { waits <- p.Publish(t.Context(), message(before+1)) }()

	own.Control(t, "set_vm_memory_high_watermark", "absolute", "1GB")
	if err := <-waits; err != nil {
		t.Errorf("a publish that waited: %v", err)
	}
	eventually(t, time.Minute, "all is healthy", func() bool { return p.Health() == nil && c.source.Health() == nil })
	// The first one was not confirmed: it may have been sent or not.
	if err := p.Publish(t.Context(), message(before)); err != nil {
		t.Error(err)
	}
	if e := noted(published, &published.blocked); len(e) != 2 || e[1].Blocked {
		t.Errorf("events %+v", e)
	}
	eventually(t, time.Minute, "all are done", func() bool { return r.effects() == before+2 })
	c.stop(t)
	onceEach(t, r.pool, before+2)
	r.empty()
}

// frozenShortly freezes the server for less than its clients are patient.
func frozenShortly(t *testing.T, own *servers.Own, _ *rabbitLine) rabbitFault {
	return rabbitFault{spared: true, strike: func(*rabbitRun) {
		own.Freeze(t)
		<-time.After(4 * time.Second) // This is how long the fault lasts.
		own.Thaw(t)
	}}
}

// frozenForLong freezes it until the consumer has noticed it and could not connect
// again.
func frozenForLong(t *testing.T, own *servers.Own, r *rabbitLine) rabbitFault {
	cfg := rabbitmq.Config{Heartbeat: 2 * time.Second, DialTimeout: 2 * time.Second}
	if soak() {
		cfg = rabbitmq.Config{}
	}
	return rabbitFault{cfg: cfg, strike: func(c *rabbitRun) {
		stopped := r.beside()
		own.Freeze(t)
		frozen := time.Now()
		eventually(t, time.Minute, "it is noticed", func() bool { return c.source.Health() != nil })
		t.Logf("noticed after %v", time.Since(frozen))
		stopped()
		eventually(t, time.Minute, "connecting fails, too", func() bool { return len(noted(&c.rabbitEvents, &c.failures)) > 2 })
		own.Thaw(t)
	}}
}

// crashed kills the server and starts it again after a while.
func crashed(t *testing.T, own *servers.Own, _ *rabbitLine) rabbitFault {
	return rabbitFault{strike: func(c *rabbitRun) {
		own.Crash(t)
		crashed := time.Now()
		eventually(t, time.Minute, "it is noticed", func() bool { return c.source.Health() != nil })
		dials := len(noted(&c.rabbitEvents, &c.failures))
		length := time.Duration(sized(10, 30)) * time.Second
		<-time.After(time.Until(crashed.Add(length))) // This is how long the fault lasts.
		dials = len(noted(&c.rabbitEvents, &c.failures)) - dials
		t.Logf("%d attempts to connect in %v", dials, length)
		if dials == 0 || dials > 5+int(length.Seconds()) {
			t.Errorf("%d attempts to connect in %v", dials, length)
		}
		own.Start(t)
	}}
}

// beside starts another consumer; the returned function stops it, in time even when
// the broker does not answer.
func (r *rabbitLine) beside() (stopped func()) {
	r.Helper()
	const limit = 3 * time.Second
	c := r.start(effect, &inbox.Config{AckTimeout: limit}, nil)
	return func() {
		r.Helper()
		began := time.Now()
		c.stop(r.T)
		if took := time.Since(began); took > limit+5*time.Second {
			r.Errorf("the stop of another consumer took %v", took)
		}
	}
}
