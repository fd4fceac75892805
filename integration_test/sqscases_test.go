package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/sqs"
)

// sqsRun is a consumer of a queue that runs, and what it tells.
type sqsRun struct {
	inboxEvents
	source *sqs.Source
	cancel context.CancelFunc
	done   chan error
}

// start runs a consumer; cfg and source may be nil.
func (q *sqsQueue) start(pool *pgxpool.Pool, h inbox.Handler[pgx.Tx], cfg *inbox.Config, source *sqs.Config) *sqsRun {
	q.Helper()
	store, err := inboxpgx.New(pool)
	if err != nil {
		q.Fatal(err)
	}
	run := &sqsRun{done: make(chan error, 1)}
	if cfg == nil {
		cfg = &inbox.Config{}
	}
	if source == nil {
		source = &sqs.Config{}
	}
	cfg.Hooks = append(cfg.Hooks, inbox.Hook(&run.inboxEvents))
	cfg.Logger, source.Logger = slog.New(slog.DiscardHandler), slog.New(slog.DiscardHandler)
	if source.Endpoint == "" {
		source.Endpoint = q.address
	}
	c, err := inbox.New(store, "consumer", keyfunc.JSON("id"), h, cfg)
	if err != nil {
		q.Fatal(err)
	}
	ctx, cancel := context.WithCancel(q.Context())
	q.Cleanup(cancel)
	run.cancel = cancel
	opening, opened := context.WithTimeout(ctx, time.Minute)
	defer opened()
	if run.source, err = sqs.Open(opening, q.name, source); err != nil {
		q.Fatal(err)
	}
	go func() { run.done <- c.Run(ctx, run.source) }()
	return run
}

// stop stops the consumer in order.
func (c *sqsRun) stop(t *testing.T) {
	t.Helper()
	c.cancel()
	if err := <-c.done; err != nil {
		t.Errorf("Run = %v", err)
	}
}

// case S3: a fails once, so b and d of its group wait, and c does not.
func TestGroupOrderAroundAFailure(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 50} {
		t.Run("batch="+strconv.Itoa(batch), func(t *testing.T) {
			t.Parallel()
			pool := openPool(t, servers.Postgres(t))
			steps := newSteps(t, pool)
			q := newSQSQueue(t, true, nil)
			q.send(sqsMessage{"g1", `{"id":"a"}`}, sqsMessage{"g1", `{"id":"b"}`}, sqsMessage{"g2", `{"id":"c"}`}, sqsMessage{"g1", `{"id":"d"}`})
			c := q.start(pool, steps.handle, &inbox.Config{BatchSize: batch}, nil)
			// What waits for another attempt may be parked, so the queue tells nothing.
			eventually(t, time.Minute, "all are handled", func() bool { return c.count(inbox.FirstAttempt) == 4 && q.drained() })
			c.stop(t)
			steps.check(t)
		})
	}
}

// A queue has a redrive policy: SQS moves a message to the dead letter queue that was
// received too often. What is sent back by hand has a new MessageId, and is handled
// once: m-0, whose acks never arrived, is a replay; m-1, which was never done, runs.
func TestRedriven(t *testing.T) {
	t.Parallel()
	for name, fifo := range sqsKinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := openPool(t, servers.Postgres(t))
			if _, err := pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
				t.Fatal(err)
			}
			dead := newSQSQueue(t, fifo, nil)
			q := newSQSQueue(t, fifo, map[string]string{
				"RedrivePolicy": fmt.Sprintf(`{"deadLetterTargetArn":%q,"maxReceiveCount":2}`, dead.arn()),
			})
			q.send(inGroups(ids(0, 2)...)...)

			// Nothing is deleted, and m-1 is given back until SQS has enough of it.
			var runs atomic.Int64
			stuck := q.start(pool, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				runs.Add(1)
				if m.MessageKey == "m-1" {
					<-ctx.Done()
					return ctx.Err()
				}
				return effect(ctx, tx, m)
			}, &inbox.Config{BatchSize: 1, AckTimeout: time.Second}, &sqs.Config{
				Client: noDeletes{q.client}, VisibilityTimeout: time.Second, Heartbeat: -1, WaitTime: time.Second,
			})
			eventually(t, time.Minute, "both are dead letters", func() bool {
				visible, inFlight := dead.depth()
				return visible == 2 && inFlight == 0 && q.drained()
			})
			stuck.stop(t)
			if n := stuck.count(inbox.FirstAttempt); n != 1 || runs.Load() != 3 {
				t.Errorf("%d messages were done in %d runs; want m-0 in its first one, and m-1 not in two", n, runs.Load())
			}
			if n := count(t, pool, "select count(*) from effects"); n != 1 {
				t.Errorf("%d effects before the redrive, want 1", n)
			}

			c := q.start(pool, effect, nil, nil)
			old := dead.moveTo(q)
			eventually(t, time.Minute, "nothing is left", func() bool { return len(c.ids()) == 2 && q.drained() })
			// Once more, as someone does who is not sure.
			q.send(inGroups(ids(0, 2)...)...)
			eventually(t, time.Minute, "nothing is left", func() bool { return len(c.ids()) == 4 && q.drained() })
			c.stop(t)
			for _, id := range c.ids() {
				if slices.Contains(old, id) {
					t.Errorf("the message %s has its old MessageId", id)
				}
			}
			if c.count(inbox.FirstAttempt) != 1 || c.count(inbox.Replay) != 3 {
				t.Errorf("%d first attempts and %d replays, want 1 and 3", c.count(inbox.FirstAttempt), c.count(inbox.Replay))
			}
			onceEach(t, pool, 2)
			q.empty()
			dead.empty()
		})
	}
}

// noDeletes is a client that cannot delete.
type noDeletes struct{ sqs.Client }

var errNoDelete = errors.New("the network is cut")

func (noDeletes) DeleteMessage(context.Context, *awssqs.DeleteMessageInput, ...func(*awssqs.Options)) (*awssqs.DeleteMessageOutput, error) {
	return nil, errNoDelete
}

func (noDeletes) DeleteMessageBatch(context.Context, *awssqs.DeleteMessageBatchInput, ...func(*awssqs.Options)) (*awssqs.DeleteMessageBatchOutput, error) {
	return nil, errNoDelete
}

// moveTo sends all messages of a queue to another one, and deletes them, as an
// operator does. It returns the MessageIds that they had.
func (q *sqsQueue) moveTo(to *sqsQueue) (old []string) {
	q.Helper()
	ctx, cancel := q.within(time.Minute)
	defer cancel()
	for !q.drained() {
		got, err := q.client.ReceiveMessage(ctx, &awssqs.ReceiveMessageInput{
			QueueUrl: &q.url, MessageSystemAttributeNames: []types.MessageSystemAttributeName{types.MessageSystemAttributeNameAll},
		})
		if err != nil {
			q.Fatal(err)
		}
		for _, m := range got.Messages {
			to.send(sqsMessage{m.Attributes["MessageGroupId"], *m.Body})
			if _, err := q.client.DeleteMessage(ctx, &awssqs.DeleteMessageInput{QueueUrl: &q.url, ReceiptHandle: m.ReceiptHandle}); err != nil {
				q.Fatal(err)
			}
			old = append(old, *m.MessageId)
		}
	}
	return old
}

// ids are the MessageIds of all that was done.
func (w *inboxEvents) ids() (all []string) {
	w.events.Lock()
	defer w.events.Unlock()
	for _, e := range w.outcomes {
		all = append(all, e.Message.ID)
	}
	return all
}
