package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// case D13: whatever fails, crashes, arrives twice or is parked, every (key,
// fingerprint) has exactly one effect or exactly one dead letter, nothing waits for
// ever, and the effects of a lane are in its order.
func TestParkingModel(t *testing.T) {
	t.Parallel()
	for _, v := range []int{0, 1, 2, 3} {
		unordered, bulk := v&1 == 1, v&2 == 2
		for seed := range uint64(40) {
			synctest.Test(t, func(t *testing.T) {
				m := &parkingModel{T: t, rnd: rand.New(rand.NewPCG(seed, 7)), unordered: unordered, bulk: bulk}
				m.run()
				if t.Failed() {
					t.Logf("seed %d, unordered %v, bulk %v, mates %v\n%s", seed, unordered, bulk, m.store.mates, &m.logs)
				}
			})
		}
	}
}

// process is a store as one process sees it; once it has crashed nothing works any
// more, and its leases stay.
type process struct {
	*fakeStore
	crashed atomic.Bool
	stop    context.CancelFunc
	src     *memory.Source
	done    chan error
}

func (p *process) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[*fakeTx], error) {
	if p.crashed.Load() {
		return nil, errDown
	}
	b, err := p.fakeStore.Begin(ctx, claims, o)
	if err == nil {
		b.(*fakeBatch).crashed = &p.crashed
	}
	return b, err
}

func (p *process) Lease(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	if p.crashed.Load() {
		return inbox.Leased{}, errDown
	}
	return p.fakeStore.Lease(ctx, r)
}

func (p *process) Release(ctx context.Context, leases []inbox.Lease) error {
	if p.crashed.Load() {
		return errDown
	}
	return p.fakeStore.Release(ctx, leases)
}

type parkingModel struct {
	*testing.T
	logs      lockedWriter
	rmu       sync.Mutex
	rnd       *rand.Rand
	unordered bool
	bulk      bool
	store     *fakeStore
	queue     *memory.Queue
	infra     float64
	fail      float64
	poison    float64
	entries   []string       // in the order in which they were first published
	lanes     map[string]int // of entries, by their number
}

func (m *parkingModel) chance(p float64) bool {
	m.rmu.Lock()
	defer m.rmu.Unlock()
	return m.rnd.Float64() < p
}

func (m *parkingModel) num(n int) int {
	m.rmu.Lock()
	defer m.rmu.Unlock()
	return m.rnd.IntN(n)
}

func (m *parkingModel) fault(op string, _ []string) error {
	if op == "check" || !m.chance(m.infra) {
		return nil
	}
	switch op {
	case "commit", "committed":
		return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, errDown)
	}
	if m.chance(0.5) {
		return errDeadlock
	}
	return errDown
}

// set handles several messages.
func (m *parkingModel) set(ctx context.Context, tx *fakeTx, ms []*inbox.Message) error {
	for _, msg := range ms {
		if err := m.handle(ctx, tx, msg); err != nil {
			return err
		}
	}
	return nil
}

// handle fails at random; poison fails always.
func (m *parkingModel) handle(ctx context.Context, tx *fakeTx, msg *inbox.Message) error {
	id := string(msg.Body)
	_ = tx.Write(id)
	if m.chance(0.3) {
		select {
		case <-time.After(time.Duration(m.num(300)) * time.Millisecond):
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	switch {
	case strings.Contains(id, "poison"), m.chance(m.fail):
		return errors.New("no")
	case m.chance(m.fail / 4):
		panic("x")
	case m.chance(m.fail / 4):
		return inbox.RetryAfter(errors.New("later"), time.Duration(m.num(3000))*time.Millisecond)
	case m.chance(m.fail / 8):
		return inbox.Permanent(errors.New("never"))
	case m.chance(m.infra / 2):
		return tx.Cut()
	case m.chance(m.fail / 8):
		_ = tx.Fail()
	}
	return nil
}

func (m *parkingModel) start() *process {
	p := &process{fakeStore: m.store, done: make(chan error, 1)}
	cfg := &inbox.Config{
		Workers: 1 + m.num(4), BatchSize: 1 + m.num(12), MaxInFlight: 5 + m.num(60),
		ShutdownTimeout: time.Duration(m.num(500)+1) * time.Millisecond, BatchTime: time.Duration(1+m.num(400)) * time.Millisecond,
		Retry: inbox.Retry{Backoff: 50 * time.Millisecond, MaxBackoff: time.Second, MaxAttempts: 4},
		Parking: inbox.Parking{
			Hold: time.Duration(m.num(120)) * time.Millisecond, Unordered: m.unordered, MaxWaiting: 1 + m.num(20),
			Poll: time.Duration(50+m.num(1000)) * time.Millisecond, Lease: time.Duration(1000+m.num(3000)) * time.Millisecond,
		},
		Logger: slog.New(slog.NewTextHandler(&m.logs, nil)),
	}
	c, err := inbox.New(inbox.Store[*fakeTx](p), "billing", keyfunc.JSON("id"), m.handle, cfg)
	if m.bulk {
		c, err = inbox.NewBulk(inbox.Store[*fakeTx](p), "billing", keyfunc.JSON("id"), m.set, cfg)
	}
	if err != nil {
		m.Fatal(err)
	}
	ctx, stop := context.WithCancel(m.Context())
	p.stop, p.src = stop, m.queue.Source()
	go func() { p.done <- c.Run(ctx, p.src) }()
	return p
}

// publish sends some messages: new ones, twins and conflicts of earlier ones.
func (m *parkingModel) publish(n int) {
	lanes := 1 + m.num(4)
	for range n {
		lane := fmt.Sprintf("l%d", m.num(lanes))
		i := len(m.entries)
		body := fmt.Sprintf(`{"id":"%s-%04d"}`, lane, i)
		switch {
		case m.chance(m.poison):
			body = fmt.Sprintf(`{"id":"%s-%04d","poison":1}`, lane, i)
		case i > 0 && m.chance(0.15):
			body = m.entries[m.num(i)]
			lane = body[7:9]
		case i > 0 && m.chance(0.05):
			body = strings.Replace(m.entries[m.num(i)], "}", fmt.Sprintf(`,"other":%d}`, i), 1)
			lane = body[7:9]
		}
		if _, known := m.lanes[body]; !known {
			m.lanes[body] = i
			m.entries = append(m.entries, body)
		}
		m.queue.Publish(&broker.Message{Key: []byte(lane), Body: []byte(body)})
	}
}

func (m *parkingModel) run() {
	m.store, m.queue, m.lanes = newFakeStore(), memory.New("m", nil), map[string]int{}
	m.store.mates = m.chance(0.5)
	m.infra, m.fail, m.poison = 0.02*float64(m.num(3)), 0.05*float64(m.num(4)), 0.03*float64(m.num(3))
	m.store.fault = m.fault
	processes := []*process{m.start(), m.start()}
	for range 12 {
		m.publish(m.num(25))
		<-time.After(time.Duration(m.num(1500)) * time.Millisecond)
		i := m.num(2)
		switch m.num(5) {
		case 0:
			processes[i].src.Revoke()
		case 1:
			processes[i].src.Recall()
			<-time.After(100 * time.Millisecond)
			processes[i].src.Revoke()
		case 2:
			processes[i].stop()
			if err := <-processes[i].done; err != nil {
				m.Error(err)
			}
			processes[i] = m.start()
		case 3:
			processes[i].crashed.Store(true)
			processes[i].src.Revoke()
			processes[i].stop()
			<-processes[i].done
			processes[i] = m.start()
		}
	}
	ctx, cancel := context.WithTimeout(m.Context(), time.Hour)
	defer cancel()
	if err := m.queue.Drained(ctx); err != nil {
		m.Error(err)
	}
	m.store.unparked(ctx, m.T)
	for _, p := range processes {
		p.stop()
		<-p.done
	}
	m.check()
}

func (m *parkingModel) check() {
	effects, _, _ := m.store.state()
	have, dead, last := map[string]int{}, map[string]int{}, map[string]int{}
	for _, e := range effects {
		have[e]++
		if lane := e[7:9]; !m.unordered {
			if m.lanes[e] < last[lane] {
				m.Errorf("lane %s: %s after %s", lane, e, m.entries[last[lane]])
			}
			last[lane] = m.lanes[e]
		}
	}
	for _, p := range m.store.parked {
		dead[string(p.Message.Body)]++
		if p.State != inbox.ParkedDead {
			m.Errorf("%s is left as %s", p.Message.Body, p.State)
		}
	}
	for _, e := range m.entries {
		if have[e]+dead[e] != 1 {
			m.Errorf("%s: %d effects, %d dead letters", e, have[e], dead[e])
		}
	}
	if n := len(m.store.locked) + len(m.store.rowLocked); n != 0 {
		m.Errorf("%d locks are left", n)
	}
}
