package integration_test

import (
	"context"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/rabbitmq"
)

const (
	siblings         = 20
	siblingsPrefetch = 10
	siblingsWorkers  = 4
	siblingsCommits  = 3
)

// case R3: kill -9 right after the third commit, with ten messages fetched and four
// in work. What was not acked is redelivered, and all end with one effect each.
func TestRabbitCrashAmongSiblings(t *testing.T) {
	t.Parallel()
	for _, kind := range rabbitKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, kind)
			r.publish(0, siblings)
			self, err := os.Executable()
			if err != nil {
				t.Fatal(err)
			}
			child := &process{t: t, path: self, log: filepath.Join(t.TempDir(), "child.log"), env: []string{
				"ACKAFTER_CHILD=siblings", "CHILD_URL=" + r.pool.Config().ConnString(), "CHILD_BROKER=" + r.server.URL, "CHILD_QUEUE=" + r.queue,
			}}
			child.start()
			state := child.wait(2 * time.Minute)
			if state == nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the child ended with %v, not by its own kill: %s", state, child.tail())
			}
			effects, rows := count(t, r.pool, "select count(*) from effects"), count(t, r.pool, "select count(*) from inbox")
			both := count(t, r.pool, "select count(*) from effects e join inbox i on i.message_key = e.key")
			if effects != rows || both != rows || effects < siblingsCommits || effects >= siblingsCommits+siblingsWorkers {
				t.Errorf("after the kill: %d effects, %d inbox rows, %d agree", effects, rows, both)
			}
			c := r.start(effect, &inbox.Config{Workers: siblingsWorkers}, &rabbitmq.Config{Prefetch: siblingsPrefetch})
			eventually(t, time.Minute, "all are done", func() bool { return r.effects() == siblings })
			c.stop(t)
			onceEach(t, r.pool, siblings)
			first, replays := c.count(inbox.FirstAttempt), c.count(inbox.Replay)
			if first != siblings-effects || replays > effects {
				t.Errorf("after the kill with %d effects: %d first attempts, %d replays", effects, first, replays)
			}
			t.Logf("killed with %d effects; then %d first attempts and %d replays", effects, first, replays)
			r.empty()
		})
	}
}

// siblingsChild is the main function of the process that dies.
func siblingsChild(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	queue := os.Getenv("CHILD_QUEUE")
	consumer, err := inbox.New(&countingStore{Store: store}, queue, keyfunc.JSON("id"), effect, &inbox.Config{Workers: siblingsWorkers, BatchSize: 1})
	if err != nil {
		return err
	}
	src, err := rabbitmq.Open(ctx, []string{os.Getenv("CHILD_BROKER")}, queue, &rabbitmq.Config{Prefetch: siblingsPrefetch})
	if err != nil {
		return err
	}
	return consumer.Run(ctx, src)
}

// countingStore is a store whose process dies after its third commit.
type countingStore struct {
	inbox.Store[pgx.Tx]
	commits atomic.Int64
}

func (s *countingStore) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[pgx.Tx], error) {
	b, err := s.Store.Begin(ctx, claims, o)
	return countingBatch{b, s}, err
}

type countingBatch struct {
	inbox.Batch[pgx.Tx]
	store *countingStore
}

func (b countingBatch) Commit(ctx context.Context) error {
	err := b.Batch.Commit(ctx)
	if err == nil && b.store.commits.Add(1) == siblingsCommits {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	}
	return err
}
