package inbox_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"slices"
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

// markTables are the tables of a Marker in memory.
type markTables struct {
	mu     sync.Mutex
	runs   map[string]inbox.RunRecord // by consumer and id
	beats  map[string]time.Time
	marks  map[string]int
	all    int // marks ever set
	ended  int // Runs that were ended
	broken error
}

// marked is a store as one process sees it that keeps marks.
type marked struct {
	process
	*markTables
	away atomic.Bool // the database is, for its marks
}

func (m *marked) fails() error {
	if m.crashed.Load() || m.away.Load() {
		return errDown
	}
	return m.broken
}

func (m *marked) Beat(_ context.Context, consumer string, r inbox.RunRecord) ([]inbox.RunRecord, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fails(); err != nil {
		return nil, err
	}
	var runs []inbox.RunRecord
	for k, other := range m.runs {
		if strings.HasPrefix(k, consumer+"/") {
			other.Age = time.Since(m.beats[k])
			runs = append(runs, other)
		}
	}
	m.runs[consumer+"/"+r.ID], m.beats[consumer+"/"+r.ID] = r, time.Now()
	return runs, nil
}

func (m *marked) EndRuns(_ context.Context, consumer string, ids ...string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fails(); err != nil {
		return err
	}
	for _, id := range ids {
		delete(m.runs, consumer+"/"+id)
		m.ended++
	}
	return nil
}

func markKey(c *inbox.Claim) string { return fmt.Sprintf("%v %x", c.Key, c.Fingerprint) }

func (m *marked) MarkStart(_ context.Context, c inbox.Claim) (int, error) {
	m.fakeStore.mu.Lock()
	done := m.rows[c.Key] != nil
	m.fakeStore.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fails(); err != nil || done {
		return 0, err
	}
	m.all++
	m.marks[markKey(&c)]++
	return m.marks[markKey(&c)], nil
}

func (m *marked) UnmarkStart(_ context.Context, c inbox.Claim, all bool) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.fails(); err != nil {
		return err
	}
	if k := markKey(&c); m.marks[k] <= 1 || all {
		delete(m.marks, k)
	} else {
		m.marks[k]--
	}
	return nil
}

func (m *markTables) left() (marks, all, runs int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, n := range m.marks {
		marks += n
	}
	return marks, m.all, len(m.runs)
}

// uncounted is a source of a broker that does not count deliveries.
type uncounted struct{ broker.Source }

func (s uncounted) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	ds, err := s.Source.Receive(ctx, limit)
	for _, d := range ds {
		d.Attempt = 0
	}
	return ds, err
}

// dying runs consumers whose processes die.
type dying struct {
	*testing.T
	store   *fakeStore
	tables  *markTables
	queue   *memory.Queue
	counted bool // by the broker
	logs    *lockedWriter
	cfg     inbox.Config
	handler func(ctx context.Context, p *marked, tx *fakeTx, m *inbox.Message) error
	name    string
}

func newDying(t *testing.T) *dying {
	t.Helper()
	d := &dying{T: t, store: newFakeStore(), queue: memory.New("orders", nil), logs: &lockedWriter{}, name: "billing"}
	d.tables = &markTables{runs: map[string]inbox.RunRecord{}, beats: map[string]time.Time{}, marks: map[string]int{}}
	d.cfg = inbox.Config{BatchSize: 10, Workers: 4, ShutdownTimeout: -1}
	d.handler = func(_ context.Context, _ *marked, tx *fakeTx, m *inbox.Message) error { return tx.Write(m.MessageKey) }
	return d
}

// die is what a handler does that ends its process: nothing that comes after it
// reaches the database.
func (m *marked) die(ctx context.Context) error {
	m.crashed.Store(true)
	m.stop()
	<-ctx.Done()
	return ctx.Err()
}

// start starts a process.
func (d *dying) start() *marked {
	d.Helper()
	p := &marked{process: process{fakeStore: d.store, done: make(chan error, 1)}, markTables: d.tables}
	cfg := d.cfg
	cfg.Logger = slog.New(slog.NewTextHandler(d.logs, nil))
	c, err := inbox.New(p, d.name, keyfunc.JSON("id"), func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
		return d.handler(ctx, p, tx, m)
	}, &cfg)
	if err != nil {
		d.Fatal(err)
	}
	ctx, stop := context.WithCancel(d.Context())
	p.stop = stop
	var src broker.Source = d.queue.Source()
	if !d.counted {
		src = uncounted{src}
	}
	go func() { p.done <- c.Run(ctx, src) }()
	return p
}

func (d *dying) end(p *marked) {
	d.Helper()
	p.stop()
	if err := <-p.done; err != nil {
		d.Errorf("Run: %v", err)
	}
}

// restart runs one process after the other until all messages are done, and returns
// how many died.
func (d *dying) restart() int {
	d.Helper()
	for deaths := 0; deaths < 50; deaths++ {
		p := d.start()
		drained := make(chan error, 1)
		ctx, cancel := context.WithTimeout(d.Context(), 12*time.Hour)
		go func() {
			err := d.queue.Drained(ctx)
			for n := d.store.states(); err == nil && n[inbox.ParkedRetry]+n[inbox.ParkedWaiting] > 0; n = d.store.states() {
				select {
				case <-time.After(100 * time.Millisecond):
				case <-ctx.Done():
					err = ctx.Err()
				}
			}
			drained <- err
		}()
		select {
		case err := <-p.done:
			cancel()
			<-drained
			if err != nil {
				d.Fatalf("Run: %v", err)
			}
			<-time.After(time.Second) // Until it is started again.
		case err := <-drained:
			cancel()
			if err != nil {
				d.Fatalf("not drained: %v\n%s", err, d.logs)
			}
			synctest.Wait()
			d.end(p)
			return deaths
		}
	}
	d.Fatalf("it dies for ever\n%s", d.logs)
	return 0
}

func (d *dying) publish(n int) (ids []string) {
	for i := range n {
		id := fmt.Sprintf("l%d-%d", i%7, i)
		d.queue.Publish(message(id, ""))
		ids = append(ids, id)
	}
	return ids
}

func (d *dying) wantEffects(ids []string) {
	d.Helper()
	(&rig{t: d.T, store: d.store}).wantEffects(ids...)
}

// case D11: a message that kills its process ends as a dead letter after MaxCrashes
// marks, wherever it waits; all others are done once, and nobody else is blamed.
func TestPoisonKillsProcess(t *testing.T) { //nolint:paralleltest,tparallel // One message of the process runs with care at a time, and the bubbles have clocks of their own.
	for _, c := range []struct { //nolint:paralleltest // See above.
		name    string
		counted bool
		parked  bool // it kills only when it is fed back
		change  func(*inbox.Config)
		deaths  int
	}{
		{name: "not counted by the broker", deaths: 4},
		{name: "counted by the broker", counted: true, deaths: 4},
		{name: "parked", parked: true, deaths: 4},
		{name: "one crash", deaths: 2, change: func(c *inbox.Config) { c.Retry.MaxCrashes = 1 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := newDying(t)
				d.counted = c.counted
				if c.change != nil {
					c.change(&d.cfg)
				}
				var failed atomic.Bool
				d.handler = func(ctx context.Context, p *marked, tx *fakeTx, m *inbox.Message) error {
					if strings.HasPrefix(m.MessageKey, "poison") {
						if c.parked && !failed.Swap(true) {
							return inbox.RetryAfter(errSQL, 2*time.Hour)
						}
						return p.die(ctx)
					}
					select {
					case <-time.After(20 * time.Millisecond):
					case <-ctx.Done():
						return ctx.Err()
					}
					return tx.Write(m.MessageKey)
				}
				ids := d.publish(20)
				d.queue.Publish(message("poison-1", ""))
				ids = append(ids, d.publish(60)[20:]...)
				if deaths := d.restart(); deaths != c.deaths {
					t.Errorf("%d deaths, want %d", deaths, c.deaths)
				}
				d.wantEffects(ids)
				rows := d.store.all()
				if len(rows) != 1 || rows[0].State != inbox.ParkedDead || rows[0].Reason != inbox.ReasonProcessDied || rows[0].MessageKey != "poison-1" ||
					!strings.Contains(rows[0].Error, fmt.Sprintf("%d times", c.deaths-1)) {
					t.Errorf("parked: %+v", rows)
				}
				if marks, _, _ := d.tables.left(); marks != 0 {
					t.Errorf("%d marks are left: %v", marks, d.tables.marks)
				}
			})
		})
	}
}

// Two consumers in one process: the poison of one is not blamed on the other.
func TestPoisonOfAnotherConsumer(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		a, b := newDying(t), newDying(t)
		b.name = "shipping"
		var both sync.Map
		var running, most, deaths atomic.Int32
		a.handler = func(ctx context.Context, p *marked, tx *fakeTx, m *inbox.Message) error {
			if n := running.Add(1); deaths.Load() > 0 && n > 1 {
				most.Store(n)
			}
			defer running.Add(-1)
			select {
			case <-time.After(50 * time.Millisecond):
			case <-ctx.Done():
				return ctx.Err()
			}
			if m.MessageKey == "poison-1" {
				deaths.Add(1)
				both.Range(func(other, _ any) bool {
					other.(*marked).crashed.Store(true)
					other.(*marked).stop()
					return true
				})
				return p.die(ctx)
			}
			return tx.Write(m.MessageKey)
		}
		b.handler = a.handler
		a.queue.Publish(message("poison-1", ""))
		ids := b.publish(3)
		for deaths.Load() < 4 {
			one, other := a.start(), b.start()
			both.Clear()
			both.Store(one, nil)
			both.Store(other, nil)
			<-one.done
			<-other.done
		}
		one, other := a.start(), b.start()
		if err := a.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := b.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		a.end(one)
		b.end(other)
		b.wantEffects(ids)
		if rows := append(a.store.all(), b.store.all()...); len(rows) != 1 || rows[0].MessageKey != "poison-1" {
			t.Errorf("parked: %+v", rows)
		}
		if most.Load() > 1 {
			t.Errorf("%d ran at once", most.Load())
		}
	})
}

// A process that is killed again and again at some moment makes no dead letter.
func TestKillsAreNotBlamed(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		var runs atomic.Int32
		d.handler = func(ctx context.Context, p *marked, tx *fakeTx, m *inbox.Message) error {
			if n := runs.Add(1); n%7 == 0 && n < 150 {
				return p.die(ctx)
			}
			return tx.Write(m.MessageKey)
		}
		ids := d.publish(100)
		if deaths := d.restart(); deaths < 15 {
			t.Errorf("%d deaths", deaths)
		}
		d.wantEffects(ids)
		if rows := d.store.all(); len(rows) != 0 {
			t.Errorf("parked: %+v", rows)
		}
	})
}

// After a stop in order nothing is marked, and batches are batches.
func TestStopIsNoDeath(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		ids := d.publish(50)
		for range 3 {
			if deaths := d.restart(); deaths != 0 {
				t.Fatalf("%d deaths", deaths)
			}
		}
		d.wantEffects(ids)
		if marks, all, runs := d.tables.left(); marks != 0 || all != 0 || runs != 0 {
			t.Errorf("%d marks, %d ever, %d runs are left", marks, all, runs)
		}
		if strings.Contains(d.logs.String(), "without a stop") {
			t.Error(d.logs.String())
		}
	})
}

// Attempts that end in another way than by a death of the process are not counted,
// and deaths stay counted over them.
func TestOnlyDeathsCount(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		var runs atomic.Int32
		d.cfg.Retry.MaxCrashes = 2
		d.handler = func(ctx context.Context, p *marked, tx *fakeTx, m *inbox.Message) error {
			switch runs.Add(1) {
			case 1, 5:
				return p.die(ctx)
			case 2:
				return errSQL
			case 3:
				return tx.Cut()
			case 4:
				p.stop()
				return errSQL
			}
			return tx.Write(m.MessageKey)
		}
		ids := d.publish(1)
		first := d.start()
		<-first.done
		for range 5 {
			p := d.start()
			<-time.After(time.Minute)
			d.end(p)
		}
		d.wantEffects(ids)
		if rows := d.store.all(); len(rows) != 0 {
			t.Errorf("parked: %+v", rows)
		}
		if marks, all, _ := d.tables.left(); marks != 0 || all != 5 {
			t.Errorf("%d marks are left, of %d; want none of 5", marks, all)
		}
	})
}

// Deaths stay counted when other attempts come in between.
func TestDeathsStayCounted(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		var runs atomic.Int32
		d.cfg.Retry.MaxCrashes = 2
		d.handler = func(ctx context.Context, p *marked, _ *fakeTx, _ *inbox.Message) error {
			if runs.Add(1)%2 == 0 {
				return errSQL
			}
			return p.die(ctx)
		}
		d.publish(1)
		if deaths := d.restart(); deaths != 3 {
			t.Errorf("%d deaths, want 3", deaths)
		}
		if rows := d.store.all(); len(rows) != 1 || rows[0].Reason != inbox.ReasonProcessDied {
			t.Errorf("parked: %+v", rows)
		}
	})
}

// A Run notices that another one has died, is careful for a while, and then is not.
func TestDeathElsewhere(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		d.cfg.BatchSize = 2
		p := d.start()
		<-time.After(time.Minute)
		host, err := os.Hostname()
		if err != nil {
			t.Fatal(err)
		}
		for id, at := range map[string]string{fmt.Sprintf("%d-here", os.Getppid()): host, "1-there": "elsewhere"} {
			if _, err := p.Beat(t.Context(), d.name, inbox.RunRecord{ID: id, Host: at}); err != nil {
				t.Fatal(err)
			}
		}
		<-time.After(20 * time.Second)
		d.end(p)
		// Both may be alive: one runs, the other is somewhere else.
		p = d.start()
		d.publish(5)
		if err := d.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, all, _ := d.tables.left(); all != 0 {
			t.Errorf("%d marks although nobody has died", all)
		}
		<-time.After(30 * time.Second)
		d.queue.Publish(message("x-1", ""))
		d.queue.Publish(message("x-2", ""))
		if err := d.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, all, _ := d.tables.left(); all != 2 {
			t.Errorf("%d marks after a death, want 2", all)
		}
		<-time.After(2 * time.Minute)
		for i := range 14 { // 2 x Workers x BatchSize in all
			d.queue.Publish(message(fmt.Sprint("y-", i), ""))
		}
		if err := d.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-time.After(20 * time.Second)
		d.queue.Publish(message("z-1", ""))
		if err := d.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, all, runs := d.tables.left(); all != 16 || runs != 1 {
			t.Errorf("%d marks after a while, want 16; %d runs are recorded, want 1", all, runs)
		}
		d.end(p)
	})
}

// A database that was away makes nobody look dead.
func TestOutageIsNoDeath(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		one, two := d.start(), d.start()
		<-time.After(time.Minute)
		d.tables.mu.Lock()
		d.tables.broken = errDown
		d.tables.mu.Unlock()
		<-time.After(5 * time.Minute)
		d.tables.mu.Lock()
		d.tables.broken = nil
		d.tables.mu.Unlock()
		<-time.After(time.Minute)
		if strings.Contains(d.logs.String(), "without a stop") {
			t.Error(d.logs.String())
		}
		// One that was stopped for a while is missed, and then no more.
		one.away.Store(true)
		<-time.After(time.Minute)
		if n := strings.Count(d.logs.String(), "without a stop"); n != 1 {
			t.Errorf("%d deaths were noticed, want 1", n)
		}
		one.away.Store(false)
		<-time.After(time.Minute)
		d.publish(3)
		if err := d.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		if _, all, _ := d.tables.left(); all != 0 {
			t.Errorf("%d marks although all live", all)
		}
		d.end(one)
		d.end(two)
		if _, _, runs := d.tables.left(); runs != 0 {
			t.Errorf("%d runs are left", runs)
		}
	})
}

// A table that cannot be written stops nobody.
func TestMarksThatFail(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		ids := d.publish(5)
		p := d.start()
		<-time.After(time.Second)
		p.crashed.Store(true)
		p.stop()
		<-p.done
		p = d.start()
		<-time.After(time.Second)
		d.tables.mu.Lock()
		d.tables.broken = errSQL
		d.tables.mu.Unlock()
		d.queue.Publish(message("more-1", ""))
		if err := d.queue.Drained(t.Context()); err != nil {
			t.Fatal(err)
		}
		<-time.After(time.Minute)
		d.end(p)
		d.wantEffects(append(slices.Clone(ids), "more-1"))
		for _, want := range []string{"could not be marked", "signs of life cannot be recorded"} {
			if n := strings.Count(d.logs.String(), want); n != 1 {
				t.Errorf("%d lines %q\n%s", n, want, d.logs)
			}
		}
	})
}

// MaxCrashes below zero asks and marks nothing.
func TestDeathsOff(t *testing.T) { //nolint:paralleltest // See TestPoisonKillsProcess.
	synctest.Test(t, func(t *testing.T) {
		d := newDying(t)
		d.cfg.Retry.MaxCrashes = -1
		p := d.start()
		<-time.After(time.Minute)
		if _, _, runs := d.tables.left(); runs != 0 {
			t.Errorf("%d runs are recorded", runs)
		}
		d.end(p)
	})
}
