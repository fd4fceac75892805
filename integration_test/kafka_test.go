package integration_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// pipeline is Kafka -> inbox -> PostgreSQL with a handler of the test.
type pipeline struct {
	t     *testing.T
	topic *topic
	pool  *pgxpool.Pool
	url   string
}

func newPipeline(t *testing.T) *pipeline {
	t.Helper()
	return newPipelineOn(t, servers.Kafka(t))
}

func newPipelineOn(t *testing.T, brokers []string) *pipeline {
	t.Helper()
	url := servers.Postgres(t)
	p := &pipeline{t: t, topic: newTopic(t, brokers, 1), pool: openPool(t, url), url: url}
	if _, err := p.pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	return p
}

// produce writes n messages with the ids m-0, m-1, ... and keys of their own.
func (p *pipeline) produce(n int) {
	p.t.Helper()
	w := &kafkago.Writer{Addr: kafkago.TCP(p.topic.brokers...), Topic: p.topic.name, RequiredAcks: kafkago.RequireAll}
	defer w.Close()
	ms := make([]kafkago.Message, n)
	for i := range ms {
		ms[i] = kafkago.Message{Key: fmt.Appendf(nil, "k%d", i), Value: fmt.Appendf(nil, `{"id":"m-%d"}`, i)}
	}
	if err := w.WriteMessages(p.t.Context(), ms...); err != nil {
		p.t.Fatal(err)
	}
}

// effect writes the row of a message.
func effect(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	_, err := tx.Exec(ctx, "insert into effects values ($1)", m.MessageKey)
	return err
}

// run starts a consumer; the returned function stops it and waits.
func (p *pipeline) run(h inbox.Handler[pgx.Tx], cfg *inbox.Config) (stop func() error) {
	p.t.Helper()
	ctx, cancel := context.WithCancel(p.t.Context())
	done := make(chan error, 1)
	go func() {
		done <- consume(ctx, p.pool, p.topic.brokers, p.topic.name, h, cfg)
	}()
	return func() error {
		cancel()
		return <-done
	}
}

// consume reads a topic, in the group of the topic's name, until ctx ends.
func consume(ctx context.Context, pool *pgxpool.Pool, brokers []string, topic string, h inbox.Handler[pgx.Tx], cfg *inbox.Config) error {
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	c, err := inbox.New(store, topic, keyfunc.JSON("id"), h, cfg)
	if err != nil {
		return err
	}
	src, err := kafka.Open(ctx, brokers, topic, []string{topic}, &kafka.Config{
		SessionTimeout: 6 * time.Second, CommitInterval: 20 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	return c.Run(ctx, src)
}

// committed returns the group's offset of partition 0, -1 for none.
func (p *pipeline) committed() int64 {
	ctx, cancel := context.WithTimeout(p.t.Context(), 10*time.Second)
	defer cancel()
	r, err := p.topic.client.OffsetFetch(ctx, &kafkago.OffsetFetchRequest{GroupID: p.topic.name, Topics: map[string][]int{p.topic.name: {0}}})
	if err != nil || r.Error != nil || len(r.Topics[p.topic.name]) == 0 {
		return -1
	}
	return r.Topics[p.topic.name][0].CommittedOffset
}

func (p *pipeline) effects() int { return count(p.t, p.pool, "select count(*) from effects") }

// once checks that n messages have one effect and one inbox row each, and that
// nothing else is there.
func (p *pipeline) once(n int) {
	p.t.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects":                                         n,
		"select count(distinct key) from effects":                              n,
		"select count(*) from effects e join inbox i on i.message_key = e.key": n,
		"select count(*) from inbox":                                           n,
		"select count(*) from inbox_parked":                                    0,
	} {
		if got := count(p.t, p.pool, query); got != want {
			p.t.Errorf("%s = %d, want %d", query, got, want)
		}
	}
}

// k1Handler takes long for the message at offset 3.
func k1Handler(slow time.Duration, started, ended func()) inbox.Handler[pgx.Tx] {
	return func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		took := 10 * time.Millisecond
		if m.Position.Offset == 3 {
			started()
			took = slow
		}
		select {
		case <-time.After(took):
		case <-ctx.Done():
			return ctx.Err()
		}
		if m.Position.Offset == 3 {
			ended()
		}
		return effect(ctx, tx, m)
	}
}

// case K1: offsets neither overtake nor go back.
func TestOffsetsNeitherOvertakeNorGoBack(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	p.produce(10)
	var slowDone atomic.Bool
	stop := p.run(k1Handler(2*time.Second, func() {}, func() { slowDone.Store(true) }), &inbox.Config{Workers: 4})
	var last int64 = -1
	passed := 0 // samples in which others were done behind the slow one
	eventually(t, time.Minute, "the committed offset is 10", func() bool {
		// Read the flag before the offset: it may turn between the two.
		done, behind := slowDone.Load(), p.effects()
		at := p.committed()
		if at >= 0 && at < last {
			t.Errorf("the committed offset went back from %d to %d", last, at)
		}
		if at > 3 && !done && !slowDone.Load() {
			t.Errorf("offset %d is committed while offset 3 is in work", at)
		}
		if !done && behind >= 5 {
			passed++
		}
		last = max(last, at)
		return at == 10
	})
	if passed == 0 {
		t.Error("nothing was done while offset 3 was in work: the lanes of one partition do not run in parallel")
	}
	if err := stop(); err != nil {
		t.Errorf("Run = %v", err)
	}
	p.once(10)
}

// case K1, second half: kill -9 while offset 3 is in work.
func TestOffsetsAfterKill(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	p.produce(10)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	child := &process{t: t, path: self, log: filepath.Join(t.TempDir(), "child.log"), env: []string{
		"ACKAFTER_CHILD=k1", "CHILD_URL=" + p.url, "CHILD_BROKERS=" + strings.Join(p.topic.brokers, ","), "CHILD_TOPIC=" + p.topic.name,
	}}
	child.start()
	eventually(t, time.Minute, "some effects behind offset 3", func() bool { return p.effects() >= 5 })
	if err := child.end(syscall.SIGKILL); err == nil {
		t.Fatalf("the child had ended: %s", child.tail())
	}
	if at := p.committed(); at > 3 {
		t.Errorf("offset %d is committed, offset 3 was never done", at)
	}
	stop := p.run(effect, nil)
	eventually(t, time.Minute, "lag 0", func() bool { return p.topic.lag(p.topic.name) == 0 })
	if err := stop(); err != nil {
		t.Errorf("Run = %v", err)
	}
	p.once(10)
}

func k1Child(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	h := k1Handler(time.Minute, func() {}, func() {})
	return consume(ctx, pool, strings.Split(os.Getenv("CHILD_BROKERS"), ","), os.Getenv("CHILD_TOPIC"), h, &inbox.Config{Workers: 4})
}

// case K6: somebody else's cancel is a failure like any other.
func TestForeignCancel(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	p.produce(10)
	var failed, early atomic.Bool
	stop := p.run(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if m.Position.Offset == 5 && !failed.Swap(true) {
			sub, cancel := context.WithCancel(ctx)
			cancel()
			_, err := tx.Exec(sub, "select 1")
			return fmt.Errorf("ask the stock: %w", err)
		}
		if m.Position.Offset == 5 {
			early.Store(p.committed() > 5) //nolint:contextcheck // The test asks, not the handler.
		}
		return effect(ctx, tx, m)
	}, nil)
	eventually(t, time.Minute, "lag 0", func() bool { return p.topic.lag(p.topic.name) == 0 })
	if err := stop(); err != nil {
		t.Errorf("Run = %v", err)
	}
	if !failed.Load() || early.Load() {
		t.Errorf("failed %v, committed beyond offset 5 before it was done: %v", failed.Load(), early.Load())
	}
	p.once(10)
}

// case K7: shutdown is not a failure.
func TestShutdownIsNotAFailure(t *testing.T) {
	t.Parallel()
	t.Run("rolled back", func(t *testing.T) {
		t.Parallel()
		p := newPipeline(t)
		p.produce(1)
		started := make(chan struct{}, 9)
		stop := p.run(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			if err := effect(ctx, tx, m); err != nil {
				return err
			}
			started <- struct{}{}
			select {
			case <-time.After(5 * time.Second):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}, &inbox.Config{ShutdownTimeout: time.Second})
		<-started
		begin := time.Now()
		if err := stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
		if took := time.Since(begin); took > 4*time.Second {
			t.Errorf("the stop took %v with a grace of 1s", took)
		}
		p.once(0)
		if at := p.committed(); at > 0 {
			t.Errorf("offset %d is committed", at)
		}
		attempt := make(chan int, 1)
		stop = p.run(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			attempt <- m.Attempt
			return effect(ctx, tx, m)
		}, nil)
		eventually(t, time.Minute, "lag 0", func() bool { return p.topic.lag(p.topic.name) == 0 })
		if n := <-attempt; n != 1 {
			t.Errorf("attempt %d after the restart, want 1", n)
		}
		if err := stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
		p.once(1)
	})
	t.Run("the ack still leaves", func(t *testing.T) {
		t.Parallel()
		p := newPipeline(t)
		p.produce(1)
		started := make(chan struct{}, 9)
		stop := p.run(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			started <- struct{}{}
			select {
			case <-time.After(700 * time.Millisecond):
				return effect(ctx, tx, m)
			case <-ctx.Done():
				return errors.New("cancelled although the grace was not over")
			}
		}, &inbox.Config{ShutdownTimeout: 5 * time.Second})
		<-started
		if err := stop(); err != nil {
			t.Errorf("Run = %v", err)
		}
		p.once(1)
		if at := p.committed(); at != 1 {
			t.Errorf("committed offset %d after the stop, want 1", at)
		}
	})
}
