package integration_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
)

// The points at which a child process kills itself with SIGKILL, at the message
// with the key victimKey.
const (
	afterClaim   = "after the claim"
	inHandler    = "in the handler"
	beforeCommit = "before COMMIT"
	afterCommit  = "after COMMIT, before the ack"

	victimKey = "o-7"
)

// case D3: kill -9 at each point of a message's path, from each broker to PostgreSQL.
func TestKillPoints(t *testing.T) {
	t.Parallel()
	for batch, without := range map[string]string{"1": "sqs", "50": "sqs-fifo"} {
		if soak() {
			without = "" // All pairs take long: the leases of the dead have to end.
		}
		for _, point := range []string{afterClaim, inHandler, beforeCommit, afterCommit} {
			t.Run(point+"/batch="+batch, func(t *testing.T) {
				t.Parallel()
				onEach(t, func(t *testing.T, s supply) { killAt(t, s, point, batch) }, without)
			})
		}
	}
}

func killAt(t *testing.T, s supply, point, batch string) {
	url := servers.PostgresDurable(t)
	pool := openPool(t, url)
	if _, err := pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	const messages, subscriber = 20, "killpoints"
	place := s.at(subscriber)
	place.Lease = time.Second // the messages of the dead come again soon
	bodies := make([]string, messages)
	for i := range bodies {
		bodies[i] = fmt.Sprintf(`{"id":"o-%d"}`, i)
	}
	s.produce(bodies...)
	eventually(t, time.Minute, "the broker counts the messages", func() bool { return !s.drained(subscriber) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &process{t: t, path: self, log: filepath.Join(t.TempDir(), "child.log"), env: []string{
		"ACKAFTER_CHILD=killpoint", "CHILD_URL=" + url, place.environment(), "CHILD_POINT=" + point, "CHILD_BATCH=" + batch,
	}}
	p.start()
	state := p.wait(2 * time.Minute)
	if state == nil || state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the child ended with %v, not by its own kill: %s", state, p.tail())
	}
	effects, rows := count(t, pool, "select count(*) from effects"), count(t, pool, "select count(*) from inbox")
	both := count(t, pool, "select count(*) from effects e join inbox i on i.message_key = e.key")
	if effects != rows || both != rows {
		t.Errorf("after the kill: %d effects, %d inbox rows, %d agree", effects, rows, both)
	}
	victim := count(t, pool, "select count(*) from effects where key = $1", victimKey)
	if want := map[bool]int{true: 1, false: 0}[point == afterCommit]; victim != want {
		t.Errorf("after the kill %d effects of the victim, want %d", victim, want)
	}

	p.env = append(p.env, "CHILD_POINT=")
	p.start()
	defer func() { _ = p.end(syscall.SIGKILL) }()
	eventually(t, 2*time.Minute, "nothing is left; log: "+p.tail(), func() bool { return s.drained(subscriber) })
	if err := p.end(syscall.SIGTERM); err != nil {
		t.Errorf("the second child stopped with %v: %s", err, p.tail())
	}
	for query, want := range map[string]int{
		"select count(*) from effects":                                         messages,
		"select count(distinct key) from effects":                              messages,
		"select count(*) from effects e join inbox i on i.message_key = e.key": messages,
		"select count(*) from inbox":                                           messages,
		"select count(*) from inbox_parked":                                    0,
	} {
		if n := count(t, pool, query); n != want {
			t.Errorf("at the end %s = %d, want %d", query, n, want)
		}
	}
}

// killpointChild is the main function of the child process.
func killpointChild(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	handler := func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		dieAt(afterClaim, m.MessageKey)
		if err := effect(ctx, tx, m); err != nil {
			return err
		}
		dieAt(inHandler, m.MessageKey)
		return nil
	}
	batch := 50
	if os.Getenv("CHILD_BATCH") == "1" {
		batch = 1
	}
	consumer, err := inbox.New(mortalStore{store}, "killpoints", keyfunc.JSON("id"), handler, &inbox.Config{Workers: 2, BatchSize: batch})
	if err != nil {
		return err
	}
	return runAtPlace(ctx, consumer)
}

// runAtPlace runs a consumer of a process of its own, on what the environment names.
func runAtPlace(ctx context.Context, consumer *inbox.Consumer[pgx.Tx]) error {
	place, err := parsePlace(os.Getenv(envPlace))
	if err != nil {
		return err
	}
	src, err := place.open(ctx, nil)
	if err != nil {
		return err
	}
	return consumer.Run(ctx, src)
}

func dieAt(point, key string) {
	if key != victimKey || os.Getenv("CHILD_POINT") != point {
		return
	}
	_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// mortalStore is a store whose process dies around a COMMIT.
type mortalStore struct{ inbox.Store[pgx.Tx] }

func (s mortalStore) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[pgx.Tx], error) {
	b, err := s.Store.Begin(ctx, claims, o)
	return mortalBatch{b, claims}, err
}

type mortalBatch struct {
	inbox.Batch[pgx.Tx]
	claims []inbox.Claim
}

func (b mortalBatch) Commit(ctx context.Context) error {
	for _, c := range b.claims {
		dieAt(beforeCommit, c.MessageKey)
	}
	err := b.Batch.Commit(ctx)
	for _, c := range b.claims {
		dieAt(afterCommit, c.MessageKey)
	}
	return err
}
