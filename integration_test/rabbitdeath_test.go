package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"testing"
	"time"

	toxiclient "github.com/Shopify/toxiproxy/v2/client"
	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/rabbitmq"
)

// case R4: what takes the channel or the connection away while five messages are in
// work: it consumes again within 10 s of the cause's end, by itself, without losing
// a message or keeping a goroutine.
func TestRabbitSilentDeath(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		fault func(t *testing.T, r *rabbitLine) rabbitFault
	}{
		{"(a) channel closed by the broker", doubledAck},
		{"(b) connection closed by the broker", forcedClose},
		{"(c) cannot be reached", refusedConnections},
		{"(e) black hole", swallowedTraffic},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, "quorum")
			r.survives(row.fault(t, r))
		})
	}
}

// rabbitFault is what takes a channel away.
type rabbitFault struct {
	cfg rabbitmq.Config
	// strike returns when the cause has ended.
	strike func(c *rabbitRun)
	cause  string // what the source says of it
	// spared tells that the channel outlives it.
	spared bool
}

func doubledAck(t *testing.T, r *rabbitLine) rabbitFault {
	wire := &stutter{}
	return rabbitFault{cfg: rabbitmq.Config{Dial: wire.dial}, cause: "unknown delivery tag", strike: func(c *rabbitRun) {
		wire.on.Store(true)
		r.publish(19, 1) // It was handled before, so it is acked at once.
		eventually(t, time.Minute, "the channel is closed", func() bool { return len(noted(&c.rabbitEvents, &c.ends)) > 0 })
	}}
}

func forcedClose(_ *testing.T, r *rabbitLine) rabbitFault {
	return rabbitFault{cfg: rabbitmq.Config{ClientID: r.queue}, cause: "CONNECTION_FORCED", strike: func(*rabbitRun) {
		r.closeConnections(r.queue)
	}}
}

func refusedConnections(t *testing.T, r *rabbitLine) rabbitFault {
	proxy, host := r.proxy()
	return rabbitFault{cfg: rabbitmq.Config{Dial: proxy.dial}, strike: func(*rabbitRun) {
		cure, err := proxy.refuse([]string{host})
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Duration(sized(4, 30)) * time.Second) // This is how long the fault lasts.
		if err := cure(); err != nil {
			t.Fatal(err)
		}
	}}
}

func swallowedTraffic(t *testing.T, r *rabbitLine) rabbitFault {
	proxy, host := r.proxy()
	cfg := rabbitmq.Config{Dial: proxy.dial, Heartbeat: 2 * time.Second, DialTimeout: 2 * time.Second}
	return rabbitFault{cfg: cfg, strike: func(c *rabbitRun) {
		cure, err := proxy.poison("timeout", toxiclient.Attributes{"timeout": 0}, []string{host})
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, time.Minute, "it is noticed", func() bool { return c.source.Health() != nil })
		eventually(t, time.Minute, "connecting fails, too", func() bool { return len(noted(&c.rabbitEvents, &c.failures)) > 1 })
		if err := cure(); err != nil {
			t.Fatal(err)
		}
	}}
}

// survives runs a consumer through a fault.
func (r *rabbitLine) survives(f rabbitFault) {
	r.Helper()
	const held, before, after = 5, 20, 10
	release := make(chan struct{})
	r.publish(0, before)
	c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if n, _ := strconv.Atoi(strings.TrimPrefix(m.MessageKey, "m-")); n < held {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-release:
			}
		}
		return effect(ctx, tx, m)
	}, &inbox.Config{Workers: held + 2, BatchSize: 1, HandlerTimeout: 5 * time.Minute}, &f.cfg)
	eventually(r.T, time.Minute, "all others are done", func() bool { return c.count(inbox.FirstAttempt) == before-held })
	eventually(r.T, time.Minute, "their acks are sent", func() bool { return c.source.Stats().Acks == before-held })
	baseline := goroutinesOf(r.queue)
	f.strike(c)
	over := time.Now()
	r.ch = r.channel() // The old one may be gone, too.
	r.publish(before, after)
	close(release)
	eventually(r.T, time.Minute, "all are done", func() bool { return r.effects() == before+after })
	r.Logf("all done %v after the end of the fault; %+v", time.Since(over), c.source.Stats())
	ends, consuming := noted(&c.rabbitEvents, &c.ends), noted(&c.rabbitEvents, &c.consuming)
	switch {
	case f.spared:
		if len(ends) > 0 {
			r.Errorf("the channel has ended: %+v", ends)
		}
	case len(ends) == 0 || len(consuming) != len(ends)+1:
		r.Errorf("%d channels have ended, it consumed %d times", len(ends), len(consuming))
	default:
		if ends[0].Lost < held || ends[0].Err == nil || !says(ends[0].Err, f.cause) {
			r.Errorf("ended %+v, want %d lost and %q", ends[0], held, f.cause)
		}
		if took := consuming[len(consuming)-1].Sub(over); took > 10*time.Second {
			r.Errorf("consuming again after %v", took)
		}
	}
	if err := c.source.Health(); err != nil {
		r.Errorf("health: %v", err)
	}
	eventually(r.T, time.Minute, fmt.Sprintf("%d goroutines, as before", baseline), func() bool { return goroutinesOf(r.queue) <= baseline })
	c.stop(r.T)
	eventually(r.T, 10*time.Second, "no goroutine is left behind", func() bool { return goroutinesOf(r.queue) == 0 })
	onceEach(r.T, r.pool, before+after)
	if n := c.attempts(); n != 0 {
		r.Errorf("%d attempts have failed", n)
	}
	r.empty()
}

// labelled runs f so that the goroutines that it starts, and those that they start,
// are counted by goroutinesOf.
func labelled(t *testing.T, name string, f func()) {
	t.Helper()
	pprof.Do(t.Context(), pprof.Labels("goroutinesOf", name), func(context.Context) { f() })
}

// goroutinesOf counts goroutines, whatever other tests do at the same time.
func goroutinesOf(name string) int {
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		return -1
	}
	n := 0
	for record := range strings.SplitSeq(profile.String(), "\n\n") {
		if strings.Contains(record, strconv.Quote(name)) {
			times, _, _ := strings.Cut(record, " ")
			if times, err := strconv.Atoi(times); err == nil {
				n += times
			}
		}
	}
	return n
}

// case R4 (d): the queue is deleted while it is consumed from.
func TestRabbitDeletedQueue(t *testing.T) {
	t.Parallel()
	for _, kind := range rabbitKinds {
		t.Run("stop/"+kind, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, kind)
			r.publish(0, 3)
			c := r.start(effect, nil, nil)
			eventually(t, time.Minute, "all are done", func() bool { return r.effects() == 3 })
			r.delete()
			err := c.ended(t, time.Minute)
			if !errors.Is(err, rabbitmq.ErrNoQueue) || !says(err, r.queue) {
				t.Errorf("Run = %v, want %v", err, rabbitmq.ErrNoQueue)
			}
			t.Log(err)
			if len(c.deleted) != 1 || c.deleted[0].Queue != r.queue {
				t.Errorf("events %+v", c.deleted)
			}
			eventually(t, 10*time.Second, "no goroutine is left behind", func() bool { return goroutinesOf(r.queue) == 0 })
			onceEach(t, r.pool, 3)
		})
	}
	t.Run("wait", func(t *testing.T) {
		t.Parallel()
		r := newRabbitLine(t, "quorum")
		r.publish(0, 3)
		c := r.start(effect, nil, &rabbitmq.Config{OnQueueDeleted: rabbitmq.QueueDeletedWait})
		eventually(t, time.Minute, "all are done", func() bool { return r.effects() == 3 })
		baseline := goroutinesOf(r.queue)
		r.delete()
		eventually(t, time.Minute, "Health says so", func() bool { return errors.Is(c.source.Health(), rabbitmq.ErrNoQueue) })
		eventually(t, time.Minute, "it tries again", func() bool { return len(noted(&c.rabbitEvents, &c.failures)) > 3 })
		r.declare("quorum", nil)
		there := time.Now()
		r.publish(2, 3) // One of them was handled before.
		eventually(t, time.Minute, "what comes now is done", func() bool { return r.effects() == 5 })
		if took := time.Since(there); took > 10*time.Second {
			t.Errorf("consuming again after %v", took)
		}
		if err := c.source.Health(); err != nil {
			t.Errorf("health: %v", err)
		}
		eventually(t, time.Minute, "the goroutines are as before", func() bool { return goroutinesOf(r.queue) <= baseline })
		c.stop(t)
		if len(c.deleted) != 1 {
			t.Errorf("events %+v, want one", c.deleted)
		}
		onceEach(t, r.pool, 5)
		r.empty()
	})
}

func (r *rabbitLine) delete() {
	r.Helper()
	if _, err := r.ch.QueueDelete(r.queue, false, false, false); err != nil {
		r.Fatal(err)
	}
}
