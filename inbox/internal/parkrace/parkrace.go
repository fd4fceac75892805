// Package parkrace races messages, their twins and conflicts, parking, feeding,
// crashes and stops on a store, and checks what is left. It is for tests.
package parkrace

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// Store is what the race needs of a store.
type Store[Tx any] interface {
	inbox.Store[Tx]
	inbox.Parker
	inbox.Inspector
	inbox.Undertaker
}

// Race is one run.
type Race[Tx any] struct {
	Store Store[Tx]
	// Write is a handler's write, and Effects returns what was committed of them, in
	// the order in which it was written.
	Write   func(ctx context.Context, tx Tx, entry string) error
	Effects func(ctx context.Context) ([]string, error)
	// Down is an error of a database that is gone, as the store knows it.
	Down error
	Seed uint64
	// Rounds is how much happens: some twenty messages each.
	Rounds int

	rmu     sync.Mutex
	rnd     *rand.Rand
	queue   *memory.Queue
	entries []string       // the bodies, in the order in which they were first published
	numbers map[string]int // of the entries
	logs    logs
}

type logs struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// Run races two processes, which crash, stop and lose deliveries, over some hundred
// messages. Then every entry (a body under a key) has exactly one effect or one dead
// letter, nothing waits, and the effects of a lane are in its order. At the end a
// person has the dead ones tried again, and discards some.
func (r *Race[Tx]) Run(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 6*time.Minute)
	defer cancel()
	defer func() {
		if t.Failed() {
			t.Logf("seed %d\n%s", r.Seed, r.logs.String())
		}
	}()
	r.rnd = rand.New(rand.NewPCG(r.Seed, 3)) //nolint:gosec // G404: a test.
	r.queue, r.numbers = memory.New("race", nil), map[string]int{}
	processes := []*process[Tx]{r.start(ctx, t), r.start(ctx, t)}
	for range r.Rounds {
		r.publish(10 + r.num(20))
		wait(ctx, time.Duration(r.num(150))*time.Millisecond)
		i := r.num(2)
		switch p := processes[i]; r.num(5) {
		case 0:
			p.src.Revoke()
		case 1:
			p.src.Recall()
			wait(ctx, 10*time.Millisecond)
			p.src.Revoke()
		case 2:
			p.end(t)
			processes[i] = r.start(ctx, t)
		case 3:
			p.crashed.Store(true)
			p.src.Revoke()
			p.end(t)
			processes[i] = r.start(ctx, t)
		}
	}
	r.settled(ctx, t)
	r.check(ctx, t, true)
	r.person(ctx, t)
	r.settled(ctx, t)
	for _, p := range processes {
		p.end(t)
	}
	r.check(ctx, t, false)
}

func (r *Race[Tx]) chance(p float64) bool {
	r.rmu.Lock()
	defer r.rmu.Unlock()
	return r.rnd.Float64() < p
}

func (r *Race[Tx]) num(n int) int {
	r.rmu.Lock()
	defer r.rmu.Unlock()
	return r.rnd.IntN(n)
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// publish sends new messages in four lanes, twins and conflicts of earlier ones, some
// of which always fail.
func (r *Race[Tx]) publish(n int) {
	for range n {
		i := len(r.entries)
		body := fmt.Sprintf(`{"id":"l%d-%04d"}`, r.num(4), i)
		switch {
		case r.chance(0.03):
			body = strings.Replace(body, "}", `,"poison":1}`, 1)
		case i > 0 && r.chance(0.15):
			body = r.entries[r.num(i)]
		case i > 0 && r.chance(0.05):
			body = strings.Replace(r.entries[r.num(i)], "}", fmt.Sprintf(`,"other":%d}`, i), 1)
		}
		if _, known := r.numbers[body]; !known {
			r.numbers[body] = i
			r.entries = append(r.entries, body)
		}
		r.queue.Publish(&broker.Message{Key: []byte(lane(body)), Body: []byte(body)})
	}
}

// lane is the lane of an entry.
func lane(body string) string { return body[len(`{"id":"`) : len(`{"id":"`)+2] }

func (r *Race[Tx]) handle(ctx context.Context, tx Tx, m *inbox.Message) error {
	body := string(m.Body)
	if err := r.Write(ctx, tx, body); err != nil {
		return err
	}
	if r.chance(0.1) {
		wait(ctx, time.Duration(r.num(20))*time.Millisecond)
	}
	switch {
	case strings.Contains(body, "poison"), r.chance(0.1):
		return errors.New("no")
	case r.chance(0.02):
		panic("no")
	case r.chance(0.02):
		return inbox.RetryAfter(errors.New("later"), time.Duration(r.num(300))*time.Millisecond)
	case r.chance(0.01):
		return inbox.Permanent(errors.New("never"))
	}
	return ctx.Err()
}

// settled waits until everything is acked and nothing is parked for later.
func (r *Race[Tx]) settled(ctx context.Context, t *testing.T) {
	t.Helper()
	if err := r.queue.Drained(ctx); err != nil {
		t.Error(err)
	}
	for ctx.Err() == nil {
		done := true
		for _, row := range r.parked(ctx, t) {
			done = done && (row.State == inbox.ParkedDead || row.State == inbox.ParkedDiscarded)
		}
		if done {
			return
		}
		wait(ctx, 100*time.Millisecond)
	}
	t.Error("messages are left parked")
}

// parked returns the rows of the parked table.
func (r *Race[Tx]) parked(ctx context.Context, t *testing.T) (rows []inbox.ParkedRecord) {
	t.Helper()
	for after := int64(0); ; after = rows[len(rows)-1].ID {
		page, err := r.Store.ListParked(ctx, inbox.ParkedFilter{After: after, Limit: 500})
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			return rows
		}
		rows = append(rows, page...)
	}
}

func (r *Race[Tx]) check(ctx context.Context, t *testing.T, ordered bool) {
	t.Helper()
	effects, err := r.Effects(ctx)
	if err != nil {
		t.Fatal(err)
	}
	byPrint := map[string]string{}
	for _, e := range r.entries {
		sum := sha256.Sum256([]byte(e))
		byPrint[string(sum[:])] = e
	}
	done, dead, last := map[string]int{}, map[string]int{}, map[string]int{}
	for _, e := range effects {
		done[e]++
		if l := lane(e); ordered {
			if r.numbers[e] < last[l] {
				t.Errorf("lane %s: %s after %s", l, e, r.entries[last[l]])
			}
			last[l] = r.numbers[e]
		}
	}
	reasons := map[inbox.Reason]int{}
	for _, row := range r.parked(ctx, t) {
		dead[byPrint[string(row.Fingerprint)]]++
		reasons[row.Reason]++
		if row.State != inbox.ParkedDead && row.State != inbox.ParkedDiscarded {
			t.Errorf("%s is left as %s", row.MessageKey, row.State)
		}
	}
	for _, e := range r.entries {
		if done[e]+dead[e] != 1 {
			t.Errorf("%s: %d effects, %d dead letters", e, done[e], dead[e])
		}
	}
	t.Logf("%d entries, %d effects, parked: %v", len(r.entries), len(effects), reasons)
}

// person has all dead letters tried again, but the first, which goes.
func (r *Race[Tx]) person(ctx context.Context, t *testing.T) {
	t.Helper()
	rows := r.parked(ctx, t)
	if len(rows) == 0 {
		t.Error("no dead letters: nothing was tested")
		return
	}
	var ids []int64
	for _, row := range rows {
		ids = append(ids, row.ID)
	}
	if n, err := r.Store.DiscardParked(ctx, ids[:1], "by a person"); err != nil || n != 1 {
		t.Errorf("DiscardParked: %d, %v", n, err)
	}
	if n, err := r.Store.RetryParked(ctx, ids); err != nil || n != len(ids)-1 {
		t.Errorf("RetryParked: %d of %d, %v", n, len(ids), err)
	}
	r.queue.Rewind() // Everything comes once more.
}

// process is one process: a consumer, and the store as it sees it. Once it has
// crashed nothing works any more, and its leases stay.
type process[Tx any] struct {
	Store[Tx]
	down    error
	crashed atomic.Bool
	src     *memory.Source
	stop    context.CancelFunc
	done    chan error
}

func (r *Race[Tx]) start(ctx context.Context, t *testing.T) *process[Tx] {
	t.Helper()
	p := &process[Tx]{Store: r.Store, down: r.Down, done: make(chan error, 1)}
	workers := 3
	if s, ok := r.Store.(inbox.PoolSizer); ok && s.PoolSize() > 0 {
		workers = min(workers, s.PoolSize())
	}
	consumer, err := inbox.New(inbox.Store[Tx](p), "billing", keyfunc.JSON("id"), r.handle, &inbox.Config{
		Workers: workers, BatchSize: 1 + r.num(10), MaxInFlight: 20 + r.num(100), ShutdownTimeout: 100 * time.Millisecond,
		Retry: inbox.Retry{Backoff: 5 * time.Millisecond, MaxBackoff: 100 * time.Millisecond, MaxAttempts: 4},
		Parking: inbox.Parking{
			Hold: time.Duration(r.num(12)) * time.Millisecond, MaxWaiting: 3 + r.num(30),
			Poll: time.Duration(50+r.num(200)) * time.Millisecond, Lease: time.Second,
		},
		Logger: slog.New(slog.NewTextHandler(&r.logs, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, p.stop = context.WithCancel(ctx) //nolint:gosec // G118: end calls it.
	p.src = r.queue.Source()
	go func() { p.done <- consumer.Run(ctx, p.src) }()
	return p
}

func (p *process[Tx]) end(t *testing.T) {
	t.Helper()
	p.stop()
	if err := <-p.done; err != nil {
		t.Errorf("Run: %v", err)
	}
}

func (p *process[Tx]) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[Tx], error) {
	if p.crashed.Load() {
		return nil, p.down
	}
	b, err := p.Store.Begin(ctx, claims, o)
	if err != nil {
		return nil, err
	}
	return &batch[Tx]{b, p}, nil
}

func (p *process[Tx]) Lease(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	if p.crashed.Load() {
		return inbox.Leased{}, p.down
	}
	return p.Store.Lease(ctx, r)
}

func (p *process[Tx]) Release(ctx context.Context, leases []inbox.Lease) error {
	if p.crashed.Load() {
		return p.down
	}
	return p.Store.Release(ctx, leases)
}

// batch cannot commit once its process has crashed.
type batch[Tx any] struct {
	inbox.Batch[Tx]
	p *process[Tx]
}

func (b *batch[Tx]) Commit(ctx context.Context) error {
	if b.p.crashed.Load() {
		b.Abort()
		return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, b.p.down)
	}
	return b.Batch.Commit(ctx)
}

func (b *batch[Tx]) Sealed() bool {
	s, ok := b.Batch.(inbox.Sealer)
	return ok && s.Sealed()
}
