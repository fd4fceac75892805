package integration_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
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

// rebalance is a group whose members run in this process.
type rebalance struct {
	t    *testing.T
	tp   *topic
	pool *pgxpool.Pool
}

func newRebalance(t *testing.T, partitions int) *rebalance {
	t.Helper()
	r := &rebalance{t: t, tp: newTopic(t, servers.Kafka(t), partitions), pool: openPool(t, servers.Postgres(t))}
	if _, err := r.pool.Exec(t.Context(), `create table effects (id bigint generated always as identity, key text not null,
		worker text not null, attempt int not null, source text not null, source_offset bigint not null)`); err != nil {
		t.Fatal(err)
	}
	return r
}

// produce writes messages with one Kafka key to a partition.
func (r *rebalance) produce(partition int, key string, ids ...string) {
	r.t.Helper()
	records := make([]kafkago.Record, len(ids))
	for i, id := range ids {
		records[i] = kafkago.Record{Key: kafkago.NewBytes([]byte(key)), Value: kafkago.NewBytes(fmt.Appendf(nil, `{"id":%q}`, id))}
	}
	res, err := r.tp.client.Produce(r.t.Context(), &kafkago.ProduceRequest{
		Topic: r.tp.name, Partition: partition, RequiredAcks: kafkago.RequireAll, Records: kafkago.NewRecordReader(records...),
	})
	if err != nil || res.Error != nil {
		r.t.Fatalf("produce: %v, %+v", err, res)
	}
}

// rebalanceMember is a member of the group and what its hooks saw.
type rebalanceMember struct {
	name string
	src  *kafka.Source
	stop func() error

	mu       sync.Mutex
	assigned []kafka.AssignedEvent
	revoked  []kafka.RevokedEvent
	outcomes []inbox.OutcomeEvent
}

func (m *rebalanceMember) OnAssigned(_ context.Context, e kafka.AssignedEvent) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.assigned = append(m.assigned, e)
}

func (m *rebalanceMember) OnRevoked(_ context.Context, e kafka.RevokedEvent) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.revoked = append(m.revoked, e)
}

func (m *rebalanceMember) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.outcomes = append(m.outcomes, e)
}

// generations returns what was assigned so far.
func (m *rebalanceMember) generations() []kafka.AssignedEvent {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.assigned)
}

func (m *rebalanceMember) revocations() []kafka.RevokedEvent {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.revoked)
}

// outcomesOf returns the keys of messages that ended with an outcome.
func (m *rebalanceMember) outcomesOf(o inbox.Outcome) []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	var keys []string
	for _, e := range m.outcomes {
		if e.Outcome == o {
			keys = append(keys, e.MessageKey)
		}
	}
	return keys
}

// inFlight is how many deliveries are out.
func (m *rebalanceMember) inFlight() int {
	n := 0
	for _, p := range m.src.Stats().Partitions {
		n += p.InFlight
	}
	return n
}

// join starts a member. Its handler is h with the member's name.
func (r *rebalance) join(name string, h func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error, ic inbox.Config, kc kafka.Config) *rebalanceMember {
	r.t.Helper()
	m := &rebalanceMember{name: name}
	store, err := inboxpgx.New(r.pool)
	if err != nil {
		r.t.Fatal(err)
	}
	ic.Worker, ic.Hooks = name, []inbox.Hook{m}
	kc.Hooks, kc.HeartbeatInterval, kc.CommitInterval = []kafka.Hook{m}, 200*time.Millisecond, 50*time.Millisecond
	c, err := inbox.New(store, "rebalance", keyfunc.JSON("id"), h, &ic)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(r.t.Context()))
	if m.src, err = kafka.Open(ctx, r.tp.brokers, r.tp.name, []string{r.tp.name}, &kc); err != nil {
		cancel()
		r.t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx, m.src) }()
	m.stop = sync.OnceValue(func() error {
		cancel()
		return <-done
	})
	r.t.Cleanup(func() { _ = m.stop() })
	return m
}

// book writes the effect of a message.
func book(ctx context.Context, tx pgx.Tx, m *inbox.Message, worker string) error {
	_, err := tx.Exec(ctx, "insert into effects (key, worker, attempt, source, source_offset) values ($1, $2, $3, $4, $5)",
		m.MessageKey, worker, m.Attempt, m.Source, m.Position.Offset)
	return err
}

// drained waits for lag 0.
func (r *rebalance) drained() {
	r.t.Helper()
	eventually(r.t, time.Minute, "lag 0", func() bool { return r.tp.lag(r.tp.name) == 0 })
}

// once checks that n messages have one effect each, and that the inbox agrees.
func (r *rebalance) once(n int) {
	r.t.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects":            n,
		"select count(distinct key) from effects": n,
		"select count(*) from inbox":              n,
		"select count(*) from inbox_parked":       0,
		"select count(*) from effects e join inbox i on i.message_key = e.key and i.worker = e.worker and i.source = e.source and i.position = e.source_offset": n,
	} {
		if got := count(r.t, r.pool, query); got != want {
			r.t.Errorf("%s = %d, want %d", query, got, want)
		}
	}
}

// effectOf returns who made the effect of a message, and at which attempt.
func (r *rebalance) effectOf(key string) string {
	r.t.Helper()
	var worker string
	var attempt int
	if err := r.pool.QueryRow(r.t.Context(), "select worker, attempt from effects where key = $1", key).Scan(&worker, &attempt); err != nil {
		r.t.Fatalf("effect of %s: %v", key, err)
	}
	return fmt.Sprintf("%s at attempt %d", worker, attempt)
}

// A handler that is slower than the session's timeout causes no rebalance: the
// heartbeats go on beside it.
func TestSlowHandlerKeepsTheSession(t *testing.T) {
	t.Parallel()
	r := newRebalance(t, 2)
	r.produce(0, "k", "slow")
	runs := make(chan struct{}, 10)
	m := r.join("one", func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		runs <- struct{}{}
		select {
		case <-time.After(8 * time.Second):
		case <-ctx.Done():
			return ctx.Err()
		}
		return book(ctx, tx, m, "one")
	}, inbox.Config{HandlerTimeout: 30 * time.Second}, kafka.Config{SessionTimeout: 3 * time.Second})
	r.drained()
	if g, rev := m.generations(), m.revocations(); len(g) != 1 || len(rev) != 0 {
		t.Errorf("assigned %d times, revoked %d times, want once and never", len(g), len(rev))
	}
	if s := m.src.Stats(); len(runs) != 1 || s.Rebalances != 1 || s.Lost != 0 || s.StaleAcks != 0 {
		t.Errorf("%d runs, %+v, want one run in one generation", len(runs), s)
	}
	if err := m.stop(); err != nil {
		t.Errorf("Run = %v", err)
	}
	r.once(1)
}

// A handler past its own timeout frees its lane: others go on, it is tried
// again, and then the later messages of its key run.
func TestHandlerTimeoutFreesTheLane(t *testing.T) {
	t.Parallel()
	for _, obeys := range []bool{true, false} {
		t.Run(fmt.Sprintf("obeys=%v", obeys), func(t *testing.T) {
			t.Parallel()
			r := newRebalance(t, 1)
			r.produce(0, "k", "stuck", "later-1", "later-2")
			for i := range 10 {
				r.produce(0, fmt.Sprintf("other-%d", i), fmt.Sprintf("other-%d", i))
			}
			release, ended := make(chan struct{}), make(chan error, 1)
			m := r.join("one", func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				if m.MessageKey != "stuck" || m.Attempt > 1 {
					return book(ctx, tx, m, "one")
				}
				if obeys {
					<-ctx.Done()
				} else {
					<-release
				}
				err := book(context.WithoutCancel(ctx), tx, m, "zombie")
				ended <- err
				return ctx.Err()
			}, inbox.Config{HandlerTimeout: time.Second}, kafka.Config{SessionTimeout: 3 * time.Second})
			r.drained()
			close(release)
			if err := <-ended; err == nil && !obeys {
				t.Error("a handler that was left behind could still write")
			}
			if g := m.generations(); len(g) != 1 {
				t.Errorf("assigned %d times, want once", len(g))
			}
			if err := m.stop(); err != nil {
				t.Errorf("Run = %v", err)
			}
			r.once(13)
			if got, want := r.effectOf("stuck"), "one at attempt 2"; got != want {
				t.Errorf("the effect of the message that was stuck is by %s, want %s", got, want)
			}
			if n := count(t, r.pool, `select count(*) from effects a join effects b on a.id < b.id and a.source_offset > b.source_offset
				where a.key !~ 'other' and b.key !~ 'other'`); n != 0 {
				t.Errorf("%d pairs of one Kafka key are out of order", n)
			}
		})
	}
}

// handover is two partitions in each of which a message is in work, with others
// of its key behind it, while a second member joins.
type handover struct {
	*rebalance
	first, second *rebalanceMember
}

// The messages of a partition: slow-0 and, behind it, next-0-0 and so on.
const behindSlow = 10

// newHandover starts the first member; slow is its handler of the slow messages.
// When it returns, the second has started, too, and the first has given back
// what it had not started.
func newHandover(t *testing.T, slow inbox.Handler[pgx.Tx], kc kafka.Config) *handover {
	t.Helper()
	h := &handover{rebalance: newRebalance(t, 2)}
	for p := range 2 {
		h.produce(p, "k", fmt.Sprintf("slow-%d", p))
	}
	started := make(chan struct{}, 10)
	var seen sync.Map
	h.first = h.join("first", func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if _, again := seen.LoadOrStore(m.MessageKey, true); again || !strings.HasPrefix(m.MessageKey, "slow") {
			return book(ctx, tx, m, "first")
		}
		started <- struct{}{}
		return slow(ctx, tx, m)
	}, inbox.Config{Workers: 2}, kc)
	for range 2 {
		<-started
	}
	for p := range 2 {
		for i := range behindSlow {
			h.produce(p, "k", fmt.Sprintf("next-%d-%d", p, i))
		}
	}
	eventually(t, time.Minute, "everything is out", func() bool { return h.first.inFlight() == 2*(1+behindSlow) })
	h.second = h.join("second", func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		return book(ctx, tx, m, "second")
	}, inbox.Config{Workers: 2}, kc)
	eventually(t, time.Minute, "what was not started is given back", func() bool { return h.first.inFlight() <= 2 })
	return h
}

// end waits for lag 0, stops both, and checks the effects. It returns the
// partition that the second member got, and the one that the first one kept.
func (h *handover) end() (moved, kept int32) {
	h.t.Helper()
	h.drained()
	g := h.second.generations()
	if len(g) != 1 || len(g[0].Partitions) != 1 {
		h.t.Fatalf("the second member was assigned %+v, want one partition once", g)
	}
	moved = g[0].Partitions[0].Partition
	kept = 1 - moved
	for _, m := range []*rebalanceMember{h.second, h.first} {
		if err := m.stop(); err != nil {
			h.t.Errorf("%s: Run = %v", m.name, err)
		}
	}
	h.once(2 * (1 + behindSlow))
	for p, worker := range map[int32]string{moved: "second", kept: "first"} {
		var offsets []int64
		rows, err := h.pool.Query(h.t.Context(), "select source_offset from effects where key like $1 and worker = $2 order by id", fmt.Sprintf("next-%d-%%", p), worker)
		if err == nil {
			offsets, err = pgx.CollectRows(rows, pgx.RowTo[int64])
		}
		if err != nil {
			h.t.Fatal(err)
		}
		if len(offsets) != behindSlow || !slices.IsSorted(offsets) {
			h.t.Errorf("the %s member handled the offsets %v of partition %d, want %d in order", worker, offsets, p, behindSlow)
		}
	}
	return moved, kept
}

// lost returns how many deliveries the first revocation of the first member lost,
// and how long it waited.
func (h *handover) lost() (int, time.Duration) {
	h.t.Helper()
	rev := h.first.revocations()
	if len(rev) == 0 {
		h.t.Fatal("nothing was revoked from the first member")
	}
	if rev[0].Err != nil {
		h.t.Errorf("the last commit failed: %v", rev[0].Err)
	}
	h.t.Logf("the rebalance lost %d deliveries and waited %v", rev[0].Lost, rev[0].Drain.Round(time.Millisecond))
	return rev[0].Lost, rev[0].Drain
}

// A second member joins while handlers run: they finish inside the drain timeout,
// their acks are committed, and the new owner gets only what is not done.
func TestRebalanceWaitsForHandlers(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	const drain = 20 * time.Second
	h := newHandover(t, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		select {
		case <-release:
		case <-ctx.Done():
			return ctx.Err()
		}
		return book(ctx, tx, m, "first")
	}, kafka.Config{SessionTimeout: 30 * time.Second, DrainTimeout: drain})
	close(release)
	h.end()
	if lost, took := h.lost(); lost != 0 || took <= 0 || took >= drain {
		t.Errorf("lost %d after %v, want 0 after less than %v", lost, took, drain)
	}
	for p := range 2 {
		if got, want := h.effectOf(fmt.Sprintf("slow-%d", p)), "first at attempt 1"; got != want {
			t.Errorf("the effect of slow-%d is by %s, want %s", p, got, want)
		}
	}
	for _, m := range []*rebalanceMember{h.first, h.second} {
		if replays := m.outcomesOf(inbox.Replay); len(replays) != 0 {
			t.Errorf("the %s member got %v although they were done", m.name, replays)
		}
	}
	if s := h.first.src.Stats(); s.Lost != 0 || s.StaleAcks != 0 {
		t.Errorf("the first member's numbers are %+v, want nothing lost and no stale ack", s)
	}
}

// A second member joins while handlers run that are slower than the drain
// timeout. Whatever they do then, each message has one effect.
func TestRebalanceEndsHandlers(t *testing.T) {
	t.Parallel()
	kc := kafka.Config{SessionTimeout: 10 * time.Second, DrainTimeout: 300 * time.Millisecond}

	// What they wrote is rolled back, and the new owner does it.
	t.Run("that obey", func(t *testing.T) {
		t.Parallel()
		causes := make(chan error, 10)
		h := newHandover(t, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			if err := book(ctx, tx, m, "first"); err != nil {
				return err
			}
			<-ctx.Done()
			causes <- context.Cause(ctx)
			return ctx.Err()
		}, kc)
		moved, kept := h.end()
		for range 2 {
			if err := <-causes; errors.Is(err, inbox.ErrHandlerTimeout) {
				t.Errorf("a handler ended by %v, want the loss of its delivery", err)
			}
		}
		h.wantDoneBy(map[int32]string{moved: "second at attempt 1", kept: "first at attempt 1"})
		h.wantLost(2, 0)
		for _, m := range []*rebalanceMember{h.first, h.second} {
			if replays := m.outcomesOf(inbox.Replay); len(replays) != 0 {
				t.Errorf("the %s member found %v done", m.name, replays)
			}
		}
	})
	// They commit although their delivery is lost: their ack is stale, and the
	// new owner finds it done.
	t.Run("that finish all the same", func(t *testing.T) {
		t.Parallel()
		h := newHandover(t, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			<-ctx.Done()
			return book(context.WithoutCancel(ctx), tx, m, "first")
		}, kc)
		moved, kept := h.end()
		h.wantDoneBy(map[int32]string{moved: "first at attempt 1", kept: "first at attempt 1"})
		h.wantLost(2, 2)
		if got, want := fmt.Sprint(h.second.outcomesOf(inbox.Replay)), fmt.Sprintf("[slow-%d]", moved); got != want {
			t.Errorf("the second member found %s done, want %s", got, want)
		}
	})
	// They never return: their transactions are cut off and the new owner does it.
	t.Run("that ignore it", func(t *testing.T) {
		t.Parallel()
		release, ended := make(chan struct{}), make(chan error, 10)
		h := newHandover(t, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			if err := book(ctx, tx, m, "first"); err != nil {
				return err
			}
			<-release
			ended <- book(context.WithoutCancel(ctx), tx, m, "zombie")
			return nil
		}, kc)
		h.drained()
		close(release)
		for range 2 {
			if err := <-ended; err == nil {
				t.Error("a handler that was left behind could still write")
			}
		}
		moved, kept := h.end()
		h.wantDoneBy(map[int32]string{moved: "second at attempt 1", kept: "first at attempt 1"})
		h.wantLost(2, 0)
	})
}

// wantDoneBy checks who made the effects of the slow messages.
func (h *handover) wantDoneBy(want map[int32]string) {
	h.t.Helper()
	for p, want := range want {
		if got := h.effectOf(fmt.Sprintf("slow-%d", p)); got != want {
			h.t.Errorf("the effect of slow-%d is by %s, want %s", p, got, want)
		}
	}
}

// wantLost checks what the first member's numbers say.
func (h *handover) wantLost(lost, stale int64) {
	h.t.Helper()
	n, _ := h.lost()
	if s := h.first.src.Stats(); int64(n) != lost || s.Lost != lost || s.StaleAcks != stale {
		h.t.Errorf("%d lost at the revocation, %d in all, %d stale acks, want %d, %d, %d", n, s.Lost, s.StaleAcks, lost, lost, stale)
	}
}
