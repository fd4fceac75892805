package kafka_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"
	_ "modernc.org/sqlite"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// The adapter beneath the loop, with a broker and a database in this process: the
// cases that are about both. The integration tests have them on real servers.

// shop is a topic of one partition and a database file.
type shop struct {
	t       *testing.T
	cluster *kfake.Cluster
	db      *sql.DB
	events  chan inbox.OutcomeEvent
}

func newShop(t *testing.T, records ...*kgo.Record) *shop {
	t.Helper()
	c, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"), kfake.GroupMinSessionTimeout(100*time.Millisecond))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	cl, err := kgo.NewClient(kgo.SeedBrokers(c.ListenAddrs()...))
	if err != nil {
		t.Fatal(err)
	}
	defer cl.Close()
	for _, r := range records {
		r.Topic = "orders"
		if err := cl.ProduceSync(t.Context(), r).FirstErr(); err != nil {
			t.Fatal(err)
		}
	}
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(t.TempDir(), "shop.db")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	tables, err := migrations.Script(migrations.SQLite())
	if err != nil {
		t.Fatal(err)
	}
	for _, query := range []string{tables, "create table effects (n integer primary key autoincrement, key text)"} {
		if _, err := db.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	return &shop{t: t, cluster: c, db: db, events: make(chan inbox.OutcomeEvent, 1000)}
}

// OnOutcome implements inbox.OnOutcome.
func (s *shop) OnOutcome(_ context.Context, e inbox.OutcomeEvent) { s.events <- e }

// outcomes returns the next n, in their order.
func (s *shop) outcomes(n int) []inbox.OutcomeEvent {
	s.t.Helper()
	var all []inbox.OutcomeEvent
	for len(all) < n {
		select {
		case e := <-s.events:
			all = append(all, e)
		case <-time.After(60 * time.Second):
			s.t.Fatalf("%d of %d outcomes within 60 s", len(all), n)
		}
	}
	return all
}

// run starts a consumer; the returned function stops it and waits.
func (s *shop) run(h inbox.Handler[*sql.Tx], cfg inbox.Config) (stop func()) {
	s.t.Helper()
	store, err := inboxsql.New(s.db)
	if err != nil {
		s.t.Fatal(err)
	}
	log := slog.New(slog.NewTextHandler(testLog{s.t}, nil))
	cfg.Hooks, cfg.Logger = []inbox.Hook{s}, log
	c, err := inbox.New(store, "billing", keyfunc.JSON("id"), h, &cfg)
	if err != nil {
		s.t.Fatal(err)
	}
	src, err := kafka.Open(s.t.Context(), s.cluster.ListenAddrs(), "billing", []string{"orders"}, &kafka.Config{
		HeartbeatInterval: 50 * time.Millisecond, SessionTimeout: 6 * time.Second, CommitInterval: 20 * time.Millisecond, Logger: log,
	})
	if err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(s.t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx, src) }()
	return func() {
		s.t.Helper()
		cancel()
		if err := <-ended; err != nil {
			s.t.Errorf("Run = %v", err)
		}
	}
}

func (s *shop) committed() int64 {
	if info := s.cluster.GroupInfo("billing"); info != nil {
		if o, ok := info.Commits["orders"][0]; ok {
			return o.Offset
		}
	}
	return -1
}

func (s *shop) count(query string) int {
	s.t.Helper()
	var n int
	if err := s.db.QueryRowContext(s.t.Context(), query).Scan(&n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

// once checks that n messages have one effect and one inbox row each, and that
// nothing else is there.
func (s *shop) once(n int) {
	s.t.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects":                                         n,
		"select count(distinct key) from effects":                              n,
		"select count(*) from effects e join inbox i on i.message_key = e.key": n,
		"select count(*) from inbox":                                           n,
		"select count(*) from inbox_parked":                                    0,
	} {
		if got := s.count(query); got != want {
			s.t.Errorf("%s = %d, want %d", query, got, want)
		}
	}
}

// effect writes the row of a message.
func effect(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
	_, err := tx.ExecContext(ctx, "insert into effects (key) values (?)", m.MessageKey)
	return err
}

// ids returns records with the bodies {"id":"0"}, {"id":"1"}, ..., each with a
// key of its own.
func ids(n int) []*kgo.Record {
	records := make([]*kgo.Record, n)
	for i := range records {
		records[i] = &kgo.Record{Key: fmt.Append(nil, i), Value: fmt.Appendf(nil, `{"id":"%d"}`, i)}
	}
	return records
}

// case K6: somebody else's cancel is a failure like any other.
func TestLoopForeignCancel(t *testing.T) {
	t.Parallel()
	s := newShop(t, ids(10)...)
	var failed, early atomic.Bool
	stop := s.run(func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
		if m.Position.Offset == 5 {
			early.CompareAndSwap(false, s.committed() > 5)
			if !failed.Swap(true) {
				sub, cancel := context.WithCancel(ctx)
				cancel()
				return fmt.Errorf("ask the stock: %w", sub.Err())
			}
		}
		return effect(ctx, tx, m)
	}, inbox.Config{})
	for _, e := range s.outcomes(10) {
		if e.Outcome != inbox.FirstAttempt {
			t.Errorf("outcome of %s is %v", e.MessageKey, e.Outcome)
		}
	}
	stop()
	if !failed.Load() || early.Load() {
		t.Errorf("failed: %v; committed beyond offset 5 before it was done: %v", failed.Load(), early.Load())
	}
	s.once(10)
	if at := s.committed(); at != 10 {
		t.Errorf("committed is %d, want 10", at)
	}
}

// case K7: shutdown is not a failure.
func TestLoopShutdown(t *testing.T) {
	t.Parallel()
	t.Run("rolled back", func(t *testing.T) {
		t.Parallel()
		s := newShop(t, ids(1)...)
		started := make(chan struct{}, 9)
		stop := s.run(func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			if err := effect(ctx, tx, m); err != nil {
				return err
			}
			started <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}, inbox.Config{ShutdownTimeout: 200 * time.Millisecond})
		<-started
		stop()
		s.once(0)
		if at := s.committed(); at > 0 {
			t.Errorf("committed is %d", at)
		}
		if n := len(s.events); n != 0 {
			t.Errorf("%d outcomes", n)
		}
		attempt := make(chan int, 1)
		stop = s.run(func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			attempt <- m.Attempt
			return effect(ctx, tx, m)
		}, inbox.Config{})
		s.outcomes(1)
		stop()
		if n := <-attempt; n != 1 {
			t.Errorf("attempt %d after the restart, want 1", n)
		}
		s.once(1)
		if at := s.committed(); at != 1 {
			t.Errorf("committed is %d, want 1", at)
		}
	})
	t.Run("the ack still leaves", func(t *testing.T) {
		t.Parallel()
		s := newShop(t, ids(1)...)
		started, release := make(chan struct{}, 9), make(chan struct{})
		stop := s.run(func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			started <- struct{}{}
			select {
			case <-release:
				return effect(ctx, tx, m)
			case <-ctx.Done():
				return errors.New("cancelled although the grace was not over")
			}
		}, inbox.Config{ShutdownTimeout: time.Minute})
		<-started
		time.AfterFunc(300*time.Millisecond, func() { close(release) }) // while it stops
		stop()
		s.once(1)
		if at := s.committed(); at != 1 {
			t.Errorf("committed is %d after the stop, want 1", at)
		}
	})
}

// case K9: bodies that no key can be read from become dead letters whose reason
// names the first byte, and the next offset goes on, in the same lane.
func TestLoopOddBodies(t *testing.T) {
	t.Parallel()
	rows := []struct {
		body []byte
		says string
	}{
		{nil, "no body"},
		{[]byte{}, "empty"},
		{[]byte("\x00\x00\x00\x00\x0c{\"id\":\"framed\"}"), "0x00"},
		{[]byte{0x1f, 0x8b, 8, 0}, "0x1f"},
	}
	var records []*kgo.Record
	for i, row := range rows {
		records = append(records, &kgo.Record{Key: []byte("k"), Value: row.body}, &kgo.Record{Key: []byte("k"), Value: fmt.Appendf(nil, `{"id":"%d"}`, i)})
	}
	s := newShop(t, records...)
	var runs atomic.Int32
	stop := s.run(func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
		runs.Add(1)
		return effect(ctx, tx, m)
	}, inbox.Config{})
	for _, e := range s.outcomes(2 * len(rows)) {
		at := e.Message.Position.Offset
		if at%2 == 1 {
			if e.Outcome != inbox.FirstAttempt {
				t.Errorf("offset %d: %v", at, e.Outcome)
			}
			continue
		}
		if e.Outcome != inbox.Dead || e.Reason != inbox.ReasonInvalidKey || e.Err == nil || !strings.Contains(e.Err.Error(), rows[at/2].says) {
			t.Errorf("offset %d: %v, %q: %v, want a dead letter that says %q", at, e.Outcome, e.Reason, e.Err, rows[at/2].says)
		}
	}
	stop()
	if at := s.committed(); at != int64(2*len(rows)) || runs.Load() != int32(len(rows)) {
		t.Errorf("committed is %d after %d runs", at, runs.Load())
	}
	if n := s.count("select count(*) from inbox_parked where state = 'dead'"); n != len(rows) {
		t.Errorf("%d dead letters", n)
	}
}

// case S3 for Kafka keys: a failing message holds its key and no other.
func TestLoopKeyOrder(t *testing.T) {
	t.Parallel()
	record := func(key, id string) *kgo.Record {
		return &kgo.Record{Key: []byte(key), Value: fmt.Appendf(nil, `{"id":"%s"}`, id)}
	}
	s := newShop(t, record("g1", "a"), record("g1", "b"), record("g2", "c"), record("g1", "d"))
	var mu sync.Mutex
	var runs []string
	cDone := make(chan struct{})
	stop := s.run(func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
		mu.Lock()
		defer mu.Unlock()
		runs = append(runs, fmt.Sprint(m.MessageKey, m.Attempt))
		switch {
		case m.MessageKey == "c":
			close(cDone)
		case m.MessageKey == "a" && m.Attempt == 1:
			return inbox.RetryAfter(errors.New("not yet"), time.Second)
		case m.MessageKey == "a":
			select {
			case <-cDone:
			default:
				t.Error("c was held up")
			}
		}
		return effect(ctx, tx, m)
	}, inbox.Config{})
	s.outcomes(4)
	stop()
	again := slices.Index(runs, "a2")
	if len(runs) != 5 || again != 2 || !slices.Equal(runs[again:], []string{"a2", "b1", "d1"}) {
		t.Errorf("the handler ran for %v", runs)
	}
	s.once(4)
}
