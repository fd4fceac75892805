package inbox_test

import (
	"context"
	"errors"
	"fmt"
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

// One failed batch of two or three must not turn batching off for ever.
func TestFaultBatchSizeGrowsBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		failures := 1
		r.store.fault = func(op string, keys []string) error {
			if op == "commit" && failures > 0 {
				failures--
				return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, errDeadlock)
			}
			return nil
		}
		r.publish("a-1", "b-1")
		r.start(write, &inbox.Config{Workers: 1})
		r.drain()
		for range 200 { // 200 rounds of ten messages in ten lanes
			for i := range 10 {
				r.publish(fmt.Sprintf("l%d-%d", i, time.Now().UnixNano()))
			}
			r.drain()
			<-time.After(time.Second)
		}
		_ = r.end()
		largest := 0
		for _, n := range r.store.begins[3:] {
			largest = max(largest, n)
		}
		if largest < 2 {
			t.Errorf("after one failed batch of two, none of %d transactions held more than one message", len(r.store.begins)-3)
		}
	})
}

// MaxInFlightBytes is a bound, one message may exceed it, not a thousand.
func TestFaultMaxInFlightBytes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 100 {
			r.queue.Publish(message(fmt.Sprintf("%d-1", i), `,"pad":"`+strings.Repeat("x", 1<<20)+`"`))
		}
		release := make(chan struct{})
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			<-release
			return tx.Write(m.MessageKey)
		}, &inbox.Config{MaxInFlightBytes: 2 << 20, HandlerTimeout: -1})
		synctest.Wait()
		if n := r.queue.Stats().InFlight; n > 4 {
			t.Errorf("%d messages of 1 MiB are in flight, the bound is 2 MiB", n)
		}
		close(release)
		r.drain()
		_ = r.end()
	})
}

// Deliveries that are lost must not occupy MaxInFlight while they wait out a delay.
func TestFaultLostAndDelayedBlocksReceiver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var first sync.Map
		r.publish("a-1", "b-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if _, seen := first.LoadOrStore(m.MessageKey, true); !seen {
				return inbox.RetryAfter(errors.New("busy"), 24*time.Hour)
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{MaxInFlight: 2, Parking: inbox.Parking{Hold: -1}})
		synctest.Wait()
		r.src.Revoke() // a rebalance: both will be delivered again, to us
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 48*time.Hour)
		defer cancel()
		_ = r.queue.Drained(ctx)
		if took := time.Since(start); took > time.Minute {
			t.Errorf("nothing was received for %v after a revoke: lost deliveries fill MaxInFlight", took)
		}
		_ = r.end()
	})
}

// A bulk handler that ended the transaction is not run again (D8, table row "handler ended the transaction").
func TestFaultBulkEndsTransaction(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		runs := map[string]int{}
		bulk := func(_ context.Context, tx *fakeTx, ms []*inbox.Message) error { //nolint:unparam // A BulkHandler.
			for _, m := range ms {
				runs[m.MessageKey]++ // what it wrote after ROLLBACK is there, in autocommit
			}
			tx.End()
			return nil
		}
		r.publish("a-1", "b-1", "c-1")
		r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			return inbox.NewBulk(r.store, "billing", keyfunc.JSON("id"), bulk, c)
		}, &inbox.Config{Workers: 1})
		r.drain()
		_ = r.end()
		for k, n := range runs {
			if n != 1 {
				t.Errorf("%s: effects unknown, and its handler ran %d times", k, n)
			}
		}
		for _, p := range r.store.parked {
			if p.Reason != inbox.ReasonEffectsUnknown {
				t.Errorf("parked as %q", p.Reason)
			}
		}
	})
}

// "effects unknown" is forgotten when the database goes away in the middle of the singles.
func TestFaultEffectsUnknownForgotten(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var runs int
		var outage atomic.Int64
		r.store.fault = func(op string, keys []string) error {
			if op == "begin" && len(keys) == 1 && outage.Add(-1) >= 0 {
				return errDown
			}
			return nil
		}
		r.publish("a-1", "b-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "b-1" {
				runs++
				outage.Store(1) // the next single finds the database away for a moment
				tx.End()
				return nil
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		r.drain()
		_ = r.end()
		if runs != 1 {
			t.Errorf("the handler that ended its transaction ran %d times", runs)
		}
	})
}

// The same with a soft stop in that moment: the dead letter is lost and the next start runs it again.
func TestFaultEffectsUnknownForgottenAtStop(t *testing.T) {
	t.Parallel()
	for _, ids := range [][]string{{"a-1", "b-1"}, {"b-1"}} {
		t.Run(fmt.Sprint(ids), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var runs int
				r.publish(ids...)
				h := func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
					if m.MessageKey == "b-1" {
						if runs++; runs == 1 {
							r.stop() // well within the grace
						}
						tx.End()
						return nil
					}
					return tx.Write(m.MessageKey)
				}
				r.start(h, &inbox.Config{Workers: 1})
				<-r.done
				r.start(h, &inbox.Config{Workers: 1})
				r.drain()
				_ = r.end()
				if runs != 1 {
					t.Errorf("the handler that ended its transaction ran %d times", runs)
				}
			})
		})
	}
}

// The twin of an "effects unknown" message in the same batch runs at once (D6 + D8).
func TestFaultEffectsUnknownTwin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.queue = memory.New("orders", &memory.Config{Lane: func(*broker.Message) string { return "" }})
		var runs int
		r.publish("a-1", "a-1", "b-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "a-1" {
				runs++
				tx.End()
				return nil
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		r.drain()
		_ = r.end()
		if runs != 1 {
			t.Errorf("effects unknown, no automatic retry: the handler ran %d times for one key", runs)
		}
	})
}

// A message that alone makes Begin fail must not stop the whole consumer.
func TestFaultPoisonAtBegin(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.fault = func(op string, keys []string) error {
			if op == "begin" && slices.Contains(keys, "x-1") {
				return errors.New("fake: value out of range (SQLSTATE 22008)") // ClassMessage
			}
			return nil
		}
		r.publish("x-1", "a-1", "b-1", "c-1")
		r.start(write, &inbox.Config{Workers: 1})
		<-time.After(time.Hour)
		r.publish("d-1")
		<-time.After(time.Hour)
		r.wantEffects("a-1", "b-1", "c-1", "d-1")
		if n := len(r.store.parked); n != 1 {
			t.Errorf("%d parked", n)
		}
		t.Logf("%d pause events, %d begins, %d handled", len(r.seen.pauses), len(r.store.begins), r.queue.Stats().Acked)
		_ = r.end()
	})
}

// Alone in its batch it makes the gate flap while others succeed.
func TestFaultPoisonAtBeginFlaps(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.fault = func(op string, keys []string) error {
			if op == "begin" && slices.Contains(keys, "x-1") {
				return errors.New("fake: value out of range (SQLSTATE 22008)") // ClassMessage
			}
			return nil
		}
		r.publish("x-1")
		r.start(write, &inbox.Config{Workers: 2, BatchSize: 1})
		for i := range 600 {
			r.publish(fmt.Sprintf("%d-%d", i%7, i))
			<-time.After(100 * time.Millisecond)
		}
		_ = r.end()
		if n := len(r.seen.pauses); n > 4 {
			t.Errorf("%d pause events in a minute for one bad message", n)
		}
	})
}

// ConflictFail stops rather than goes on: nothing behind the conflict of its lane runs.
func TestFaultConflictFailGoesOn(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.rows[inbox.Key{Consumer: "billing", MessageKey: "a-1"}] = &inbox.Record{Fingerprint: []byte("other")}
		r.publish("a-1", "a-2", "a-3")
		r.start(write, &inbox.Config{OnConflict: inbox.ConflictFail, Workers: 1})
		if err := <-r.done; !errors.Is(err, inbox.ErrConflict) {
			t.Errorf("Run = %v", err)
		}
		if s := r.queue.Stats(); s.Acked != 0 {
			t.Errorf("%d messages behind the conflict were handled and acked", s.Acked)
		}
		r.wantEffects()
	})
}

// Disk full, pool of the handler exhausted ...: the handler returns the database's error and the connection lives.
func TestFaultUnavailableErrorCounts(t *testing.T) {
	t.Parallel()
	for _, swallow := range []bool{false, true} {
		t.Run(fmt.Sprintf("swallowed=%v", swallow), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var full atomic.Bool
				full.Store(true)
				var ids []string
				for i := range 20 {
					ids = append(ids, fmt.Sprintf("%d-1", i))
				}
				r.publish(ids...)
				r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
					if full.Load() {
						if swallow {
							tx.failed = diskFull{}
							return nil
						}
						return fmt.Errorf("insert: %w", diskFull{})
					}
					return tx.Write(m.MessageKey)
				}, nil)
				<-time.After(time.Minute)
				full.Store(false)
				r.drain()
				_ = r.end()
				if n := len(r.store.parked); n != 0 {
					t.Errorf("%d of 20 messages are dead letters after a minute of a full disk", n)
				}
			})
		})
	}
}

// Every handler loses its connection for a while; claims work (database really is in trouble for all).
func TestFaultEveryConnectionCut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var bad atomic.Bool
		bad.Store(true)
		var ids []string
		for i := range 20 {
			ids = append(ids, fmt.Sprintf("%d-1", i))
		}
		r.publish(ids...)
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if bad.Load() {
				return tx.Cut()
			}
			return tx.Write(m.MessageKey)
		}, nil)
		<-time.After(2 * time.Minute)
		bad.Store(false)
		r.drain()
		_ = r.end()
		if n := len(r.store.parked); n != 0 {
			t.Errorf("%d of 20 messages are dead letters after two minutes in which no handler could work", n)
		}
	})
}

// A dead letter that cannot be parked.
func TestFaultParkFails(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		parks, runs := 0, 0
		r.store.fault = func(op string, keys []string) error {
			if op == "park" && keys[0] == "a-1" {
				parks++
				if parks < 500 {
					return errors.New("fake: index row size exceeds btree maximum (SQLSTATE 54000)")
				}
			}
			return nil
		}
		r.publish("a-1", "a-2")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "a-1" {
				runs++
				return inbox.Permanent(errors.New("no"))
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		<-time.After(24 * time.Hour)
		_ = r.end()
		if len(r.store.parked) != 1 {
			t.Errorf("%d parked after %d tries", len(r.store.parked), parks)
		}
		for _, p := range r.store.parked {
			if p.Attempts != runs {
				t.Errorf("parked with %d attempts, the handler ran %d times", p.Attempts, runs)
			}
		}
		if runs > 1 {
			t.Errorf("a permanent failure ran %d times", runs)
		}
	})
}

// Process must not say "nothing was committed" when COMMIT's fate is unknown.
func TestFaultProcessCommitUnknown(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeStore()
		committed := false
		s.fault = func(op string, _ []string) error {
			switch {
			case op == "committed":
				committed = true
				return fmt.Errorf("fake: %w: %w", inbox.ErrCommitUnknown, errDown)
			case op == "begin" && committed:
				return errDown
			}
			return nil
		}
		c, err := inbox.New(s, "billing", keyfunc.JSON("id"), write, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, err = c.Process(t.Context(), message("a-1", ""))
		if !errors.Is(err, inbox.ErrCommitUnknown) {
			t.Errorf("the work is committed and Process = %v, want ErrCommitUnknown", err)
		}
	})
}

// hookStore lets tests see and replace Begin and Check.
type hookStore struct {
	*fakeStore
	begin func(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) error
	check func(ctx context.Context) error
}

func (s *hookStore) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[*fakeTx], error) {
	if s.begin != nil {
		if err := s.begin(ctx, claims, o); err != nil {
			return nil, err
		}
	}
	return s.fakeStore.Begin(ctx, claims, o)
}

func (s *hookStore) Check(ctx context.Context) error {
	if s.check != nil {
		return s.check(ctx)
	}
	return s.fakeStore.Check(ctx)
}

// Process returns when its ctx ends, also while another Process checks the tables.
// Not in a bubble: the wait is on a mutex.
func TestFaultProcessObeysContext(t *testing.T) {
	t.Parallel()
	release, entered := make(chan struct{}), make(chan struct{}, 2)
	s := &hookStore{fakeStore: newFakeStore(), check: func(ctx context.Context) error {
		entered <- struct{}{}
		select {
		case <-release:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}}
	c, err := inbox.New(s, "billing", keyfunc.JSON("id"), write, nil)
	if err != nil {
		t.Fatal(err)
	}
	one := make(chan error, 1)
	go func() { _, err := c.Process(context.WithoutCancel(t.Context()), message("a-1", "")); one <- err }()
	<-entered
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	two := make(chan error, 1)
	go func() { _, err := c.Process(ctx, message("b-1", "")); two <- err }()
	select {
	case <-two:
		two <- nil
	case <-time.After(3 * time.Second):
		t.Error("Process with a timeout of 50ms has not returned after 3s")
	}
	close(release)
	<-one
	<-two
}

// A stop must not look like a database outage.
func TestFaultShutdownLooksLikeOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		s := &hookStore{fakeStore: r.store, begin: func(ctx context.Context, _ []inbox.Claim, _ inbox.BeginOptions) error {
			<-ctx.Done() // a Begin that is under way when the grace ends
			return ctx.Err()
		}}
		r.publish("a-1", "b-1")
		r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			return inbox.New(s, "billing", keyfunc.JSON("id"), write, c)
		}, &inbox.Config{Workers: 1, ShutdownTimeout: time.Second})
		synctest.Wait()
		if err := r.end(); err != nil {
			t.Error(err)
		}
		if len(r.seen.pauses) != 0 || strings.Contains(r.logs.String(), "cannot be used") {
			t.Errorf("a wanted stop is reported as an outage: %+v\n%s", r.seen.pauses, r.logs)
		}
	})
}

// slowSettler blocks until its context ends, as an adapter that retries does while its broker is down.
type slowSettler struct{}

func (slowSettler) Ack(ctx context.Context, _ *broker.Delivery) error { <-ctx.Done(); return ctx.Err() }
func (slowSettler) Nack(ctx context.Context, _ *broker.Delivery, _ time.Duration) error {
	<-ctx.Done()
	return ctx.Err()
}

type slowSource struct {
	once sync.Once
	n    int
}

func (s *slowSource) Receive(ctx context.Context, limit int) (ds []*broker.Delivery, err error) {
	s.once.Do(func() { //nolint:contextcheck // These deliveries are never lost.
		for i := range min(s.n, limit) {
			ds = append(ds, broker.NewDelivery(context.Background(), message(fmt.Sprintf("%d-1", i), ""), "", slowSettler{}))
		}
	})
	if ds == nil {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return ds, nil
}
func (s *slowSource) Close(context.Context) error { return nil }

// A stop ends, also when the broker is down.
func TestFaultStopWithBrokerDown(t *testing.T) {
	t.Parallel()
	for _, acks := range []bool{false, true} {
		t.Run(fmt.Sprintf("acks=%v", acks), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				h := func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
					if !acks {
						<-ctx.Done()
						return ctx.Err()
					}
					return tx.Write(m.MessageKey)
				}
				c, err := inbox.New(r.store, "billing", keyfunc.JSON("id"), h, &inbox.Config{ShutdownTimeout: 5 * time.Second})
				if err != nil {
					t.Fatal(err)
				}
				ctx, stop := context.WithCancel(t.Context())
				done := make(chan error, 1)
				go func() { done <- c.Run(ctx, &slowSource{n: 1000}) }()
				synctest.Wait()
				start := time.Now()
				stop()
				<-done
				if took := time.Since(start); took > time.Minute {
					t.Errorf("the stop took %v with ShutdownTimeout 5s and AckTimeout 10s", took)
				}
			})
		})
	}
}

// Every call of the database has a deadline.
func TestFaultBeginWithoutDeadline(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		bounded := make(chan bool, 10)
		s := &hookStore{fakeStore: r.store, begin: func(ctx context.Context, _ []inbox.Claim, _ inbox.BeginOptions) error {
			_, ok := ctx.Deadline()
			select {
			case bounded <- ok:
			default:
			}
			<-ctx.Done() // a black hole
			return errDown
		}}
		r.publish("a-1")
		r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			return inbox.New(s, "billing", keyfunc.JSON("id"), write, c)
		}, nil)
		if !<-bounded {
			t.Error("Begin is called without a deadline")
		}
		<-time.After(24 * time.Hour)
		if len(r.seen.pauses) == 0 {
			t.Error("a black hole for a day, and nobody was told")
		}
		_ = r.end()
	})
}

// Keys in flight elsewhere hold their own lanes only.
func TestFaultInFlightSlowsEverybody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 4 {
			r.store.locked[inbox.Key{Consumer: "billing", MessageKey: fmt.Sprintf("busy%d-1", i)}] = true
			r.publish(fmt.Sprintf("busy%d-1", i))
		}
		published := map[string]time.Time{}
		var worst, sum time.Duration
		var mu sync.Mutex
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			mu.Lock()
			d := time.Since(published[m.MessageKey])
			worst, sum = max(worst, d), sum+d
			mu.Unlock()
			return tx.Write(m.MessageKey)
		}, nil)
		<-time.After(6 * time.Second) // Each has waited once for LockTimeout.
		for i := range 600 {
			id := fmt.Sprintf("%d-1", i)
			mu.Lock()
			published[id] = time.Now()
			mu.Unlock()
			r.publish(id)
			<-time.After(100 * time.Millisecond)
		}
		<-time.After(time.Minute)
		mu.Lock()
		if worst > time.Second {
			t.Errorf("four keys are held elsewhere: other messages waited %v on average, %v at worst (%d of 600 done)", sum/600, worst, r.queue.Stats().Acked)
		}
		mu.Unlock()
		_ = r.end()
	})
}

// A lane that is alone gets whole batches.
func TestFaultSingleLaneBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 40 {
			r.publish(fmt.Sprintf("a-%d", i))
		}
		r.start(write, &inbox.Config{Workers: 8})
		r.drain()
		_ = r.end()
		if n := len(r.store.begins); n > 2 {
			t.Errorf("40 waiting messages of one lane took %d transactions: %v", n, r.store.begins)
		}
	})
}

// Absurd durations.
func TestFaultAbsurdTimeouts(t *testing.T) {
	t.Parallel()
	for _, d := range []time.Duration{1<<63 - 1, 1000 * time.Hour} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			var got inbox.BeginOptions
			s := &hookStore{fakeStore: r.store, begin: func(_ context.Context, _ []inbox.Claim, o inbox.BeginOptions) error { got = o; return nil }}
			c, err := inbox.New(s, "billing", keyfunc.JSON("id"), write, &inbox.Config{HandlerTimeout: d, LockTimeout: d})
			if err != nil {
				return // refused is fine
			}
			if _, err := c.Process(t.Context(), message("a-1", "")); err != nil {
				t.Error(err)
			}
			if got.IdleTimeout < 0 || got.IdleTimeout.Milliseconds() > 1<<31-1 || got.LockTimeout.Milliseconds() > 1<<31-1 {
				t.Errorf("HandlerTimeout and LockTimeout %v are accepted; the store is asked for %+v, PostgreSQL takes 0..2147483647 ms", d, got)
			}
		})
	}
}

// A panic is a failed attempt with its stack.
func TestFaultPanicStack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1")
		r.start(func(context.Context, *fakeTx, *inbox.Message) error { panicHere(); return nil }, nil)
		r.drain()
		_ = r.end()
		if !strings.Contains(r.logs.String(), "panicHere") && !strings.Contains(r.store.parked[0].Error, "panicHere") {
			t.Error("neither the log nor the dead letter says where the handler panicked")
		}
	})
}

func panicHere() { panic("index out of range") }

// After a revoke no handler starts for a delivery that is lost.
func TestFaultLostInTheMiddle(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1", "a-2", "a-3", "a-4")
		lost := 0
		var once sync.Once
		var src *memory.Source
		r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
			revoked := false
			once.Do(func() { src.Revoke(); revoked = true; <-ctx.Done() })
			synctest.Wait()
			if ctx.Err() != nil && !revoked {
				lost++
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		src = r.src
		r.drain()
		_ = r.end()
		if lost != 0 {
			t.Errorf("%d handlers were started for deliveries that had been lost before", lost)
		}
	})
}

// Only what a store says is done may be acked.
func TestFaultUnknownOutcomeIsAcked(t *testing.T) {
	t.Parallel()
	for _, o := range []inbox.Outcome{inbox.InFlight, inbox.OutsideWindow, ""} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			s := &outcomeStore{fakeStore: r.store, outcome: o}
			r.publish("a-1")
			r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
				return inbox.New(s, "billing", keyfunc.JSON("id"), write, c)
			}, nil)
			<-time.After(time.Second)
			_ = r.end()
			if n := r.queue.Stats().Acked; n != 0 {
				t.Errorf("an entry with the outcome %q is acked without any work", o)
			}
		})
	}
}

type outcomeStore struct {
	*fakeStore
	outcome inbox.Outcome
}

func (s *outcomeStore) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[*fakeTx], error) {
	b, err := s.fakeStore.Begin(ctx, claims, o)
	if err == nil {
		for i := range b.Entries() {
			b.Entries()[i] = inbox.Entry{Outcome: s.outcome}
		}
	}
	return b, err
}

// An error beside a Skip is not success.
func TestFaultSkipHidesError(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			_ = tx.Write(m.MessageKey)
			return errors.Join(inbox.Skip("old"), errors.New("audit failed"))
		}, nil)
		r.drain()
		_ = r.end()
		if r.seen.count(inbox.FirstAttempt) == 1 {
			t.Error("a joined error is taken for success and its text is lost")
		}
	})
}

// Tables dropped or migrated under a running consumer.
func TestFaultSchemaGoneWhileRunning(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var gone atomic.Bool
		r.store.fault = func(op string, _ []string) error {
			if gone.Load() && (op == "begin" || op == "check") {
				return fmt.Errorf("fake: %w", inbox.ErrNoSchema)
			}
			return nil
		}
		r.publish("a-1")
		r.start(write, nil)
		r.drain()
		gone.Store(true)
		r.publish("a-2")
		select {
		case err := <-r.done:
			if !errors.Is(err, inbox.ErrNoSchema) {
				t.Error(err)
			}
		case <-time.After(24 * time.Hour):
			t.Errorf("the tables are gone for a day: Run goes on, and says %d lines about it", strings.Count(r.logs.String(), "cannot be used"))
			_ = r.end()
		}
	})
}

// A failing message must not take its batch-mates along on every attempt.
func TestFaultRetriesHarmNeighbours(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		runs := map[string]int{}
		var mu sync.Mutex
		r.publish("x-1")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			mu.Lock()
			runs[m.MessageKey]++
			mu.Unlock()
			if m.MessageKey == "x-1" {
				return tx.Cut()
			}
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 1})
		for i := range 3000 {
			r.publish(fmt.Sprintf("%d-1", i), fmt.Sprintf("%d-2", i))
			<-time.After(10 * time.Millisecond)
		}
		r.drain()
		_ = r.end()
		again := 0
		for k, n := range runs {
			if k != "x-1" && n > 1 {
				again += n - 1
			}
		}
		small, all := 0, 0
		for _, n := range r.store.begins[len(r.store.begins)/2:] {
			all++
			if n == 1 {
				small++
			}
		}
		if again > 5 || small > all/10 {
			t.Errorf("%d repeated runs of others, %d of the last %d transactions hold one message: a failing message breaks its neighbours' batches", again, small, all)
		}
	})
}

// diskFull is a database's answer, of the class of errDown.
type diskFull struct{}

func (diskFull) Error() string        { return "could not extend file (SQLSTATE 53100)" }
func (diskFull) SQLState() string     { return "53100" }
func (diskFull) Is(target error) bool { return target == errDown }
