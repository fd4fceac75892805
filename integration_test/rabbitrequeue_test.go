package integration_test

import (
	"context"
	"errors"
	"net/url"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/rabbitmq"
)

// case R5: a message that always fails, with 100 good ones behind it. It gets its
// attempts with backoff and is a dead letter then; the others do not wait for it; and
// the broker delivers each of them once.
func TestRabbitPoison(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		kind  string
		batch int
	}{{"classic", 50}, {"quorum", 50}, {"quorum", 1}} {
		t.Run(row.kind+"/batch="+strconv.Itoa(row.batch), func(t *testing.T) {
			t.Parallel()
			const good, attempts, backoff = 100, 4, 300 * time.Millisecond
			r := newRabbitLine(t, row.kind)
			var mu sync.Mutex
			var runs []time.Time // of the one that fails
			r.publishBodies(`{"id":"bad"}`)
			r.publish(0, good)
			began := time.Now()
			c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				if err := effect(ctx, tx, m); err != nil {
					return err
				}
				if m.MessageKey != "bad" {
					return nil
				}
				mu.Lock()
				defer mu.Unlock()
				runs = append(runs, time.Now())
				if m.Attempt != len(runs) {
					t.Errorf("run %d is attempt %d", len(runs), m.Attempt)
				}
				return errors.New("always")
			}, &inbox.Config{BatchSize: row.batch, Retry: inbox.Retry{MaxAttempts: attempts, Backoff: backoff}}, nil)
			eventually(t, time.Minute, "the good ones are done", func() bool { return r.effects() == good })
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the good ones were done after %v", took)
			}
			eventually(t, time.Minute, "the bad one is dead", func() bool { return c.count(inbox.Dead) == 1 })
			counts := r.settledCounts(good + 1).Stats
			c.stop(t)
			if len(runs) != attempts || c.attempts() != attempts-1 {
				t.Fatalf("%d runs, %d retries; want %d attempts", len(runs), c.attempts(), attempts)
			}
			for i, most := 1, backoff; i < len(runs); i, most = i+1, most*2 {
				least := c.delay(i - 1)
				if least <= 0 || least > most {
					t.Errorf("attempt %d was to come after %v, want a random part of %v", i+1, least, most)
				}
				if pause := runs[i].Sub(runs[i-1]); pause < least {
					t.Errorf("attempt %d came %v after the one before, want at least %v", i+1, pause, least)
				}
			}
			for query, want := range map[string]int{
				"select count(*) from effects":                                good,
				"select count(distinct key) from effects":                     good,
				"select count(*) from inbox where status = 'done'":            good,
				"select count(*) from inbox_parked":                           1,
				"select attempts from inbox_parked where message_key = 'bad'": attempts,
				"select count(*) from inbox_parked where error ~ 'always' and state = 'dead' and reason = 'attempts exhausted'": 1,
			} {
				if got := count(t, r.pool, query); got != want {
					t.Errorf("%s = %d, want %d", query, got, want)
				}
			}
			if counts.Deliver != good+1 || counts.Redeliver != 0 || counts.Ack != good+1 {
				t.Errorf("the broker counts %+v, want each message delivered once", counts)
			}
			r.empty()
		})
	}
}

// case R5: the database is down for longer than the ack timeout, on a queue whose
// broker drops what comes back four times. No message is lost, whether the consumer
// keeps the messages meanwhile or has to give them back.
func TestRabbitDeliveryLimitOutlastsOutage(t *testing.T) {
	t.Parallel()
	own := servers.OwnPostgres(t)
	server := servers.RabbitMQ(t)
	const messages, limit = 50, 3
	length := time.Duration(sized(15, 120)) * time.Second
	rows := []struct {
		name    string
		timeout time.Duration
		back    int // how often messages go back
		line    *rabbitLine
		run     *rabbitRun
	}{{name: "kept", timeout: 0}, {name: "given back", timeout: 4 * time.Second, back: 1}}
	for i := range rows {
		row := &rows[i]
		row.line = newRabbitLineTo(t, newDatabase(t, own.Address, row.name), server, "quorum", amqp.Table{"x-delivery-limit": limit})
		row.run = row.line.start(effect, nil, &rabbitmq.Config{AckTimeout: row.timeout})
		row.line.publish(0, 1)
		eventually(t, time.Minute, "the first one is done", func() bool { return row.run.count(inbox.FirstAttempt) == 1 })
	}
	own.Crash(t)
	down := time.Now()
	for _, row := range rows {
		row.line.publish(1, messages)
	}
	<-time.After(time.Until(down.Add(length))) // This is how long the database is down.
	for _, row := range rows {
		eventually(t, 20*time.Second, row.name+": the broker has all messages", row.line.has(messages))
		if n := row.line.counts(); n.Stats.Ack != 1 || n.Stats.Redeliver > row.back*messages {
			t.Errorf("%s: the broker counts %+v, want none acked", row.name, n)
		}
		if st := row.run.source.Stats(); st.Paused != (row.back > 0) || st.Epochs != 1 || st.AckTimeouts != 0 {
			t.Errorf("%s: %+v", row.name, st)
		}
	}
	own.Start(t)
	for _, row := range rows {
		eventually(t, time.Minute, row.name+": all are done", func() bool { return row.run.count(inbox.FirstAttempt) == messages+1 })
		n := row.line.settledCounts(messages + 1)
		row.run.stop(t)
		onceEach(t, row.line.pool, messages+1)
		if n := row.run.attempts(); n != 0 {
			t.Errorf("%s: %d attempts have failed", row.name, n)
		}
		t.Logf("%s: the broker counts %+v; %+v", row.name, n.Stats, row.run.source.Stats())
		if n.Stats.Redeliver != row.back*messages {
			t.Errorf("%s: %d messages came again, want %d", row.name, n.Stats.Redeliver, row.back*messages)
		}
		row.line.empty()
	}
}

// newDatabase makes one on a server, and returns its address.
func newDatabase(t *testing.T, server, name string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), server)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), "create database "+pgx.Identifier{name}.Sanitize()); err != nil {
		t.Fatal(err)
	}
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	return u.String()
}
