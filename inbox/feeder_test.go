package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
	"github.com/ackafter/ackafter/keyfunc"
)

// place puts a message into the parked table as another process did.
func (s *fakeStore) place(p inbox.Parked) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.park(p)
}

// parkedMessage is a message that was parked for an attempt that is due.
func parkedMessage(key, lane string) inbox.Parked {
	return inbox.Parked{
		Key: inbox.Key{Consumer: "billing", MessageKey: key, Tenant: "acme"}, Fingerprint: []byte("kept"), Lane: lane,
		State: inbox.ParkedRetry, Reason: inbox.ReasonFailed, Attempts: 4,
		EventTime: time.Date(2020, 1, 2, 3, 4, 5, 0, time.UTC),
		Message: &broker.Message{
			ID: "id-1", Source: "kafka:orders/3", Position: broker.At(7), Key: []byte("k"), Body: []byte(`{"id":"other"}`),
			Headers: broker.Headers{{Name: "h", Value: []byte("v")}}, Time: time.Date(2020, 1, 1, 0, 0, 0, 0, time.UTC),
		},
	}
}

// A fed message is what it was, under the key and fingerprint that it was parked
// with, whatever the key function makes of it now.
func TestFedMessageIsWhole(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := parkedMessage("stored-1", "lane")
		r.store.place(p)
		var got *inbox.Message
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error { got = m; return tx.Write(m.MessageKey) }, nil)
		r.drain()
		_ = r.end()
		r.wantEffects("stored-1")
		m := got.Message
		if got.MessageKey != "stored-1" || got.Tenant != "acme" || got.Attempt != 5 || !got.EventTime.Equal(p.EventTime) || got.Consumer != "billing" {
			t.Errorf("the handler got %+v", got)
		}
		if m.ID != p.Message.ID || m.Source != p.Message.Source || m.Position != p.Message.Position || string(m.Key) != "k" ||
			string(m.Body) != string(p.Message.Body) || len(m.Headers) != 1 || !m.Time.Equal(p.Message.Time) {
			t.Errorf("the handler got the message %+v", m)
		}
		if row := r.store.rows[p.Key]; row == nil || string(row.Fingerprint) != "kept" || row.Attempts != 5 {
			t.Errorf("inbox row %+v", row)
		}
		if len(r.seen.outcomes) != 1 || r.seen.outcomes[0].Outcome != inbox.FirstAttempt || r.seen.outcomes[0].Attempt != 5 {
			t.Errorf("outcomes %+v", r.seen.outcomes)
		}
	})
}

// A message that was parked without a key gets one when a person has it tried again,
// and dies again when there still is none.
func TestKeylessTriedAgain(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name   string
		before func(r *rig)
		states map[inbox.ParkedState]int
		effect bool
	}{
		{"mended", nil, nil, true},
		{"still none", nil, map[inbox.ParkedState]int{inbox.ParkedDead: 1}, false},
		{"done meanwhile", func(r *rig) { r.queue.Publish(&broker.Message{Body: []byte(`{"id":"a-1"}`)}) }, nil, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				mended := false
				key := keyfunc.Custom("test:v1", func(m *broker.Message) (string, error) {
					if !mended {
						return "", errors.New("not yet")
					}
					return keyfunc.JSON("id").Key(m)
				})
				r.queue.Publish(&broker.Message{Key: []byte("lane"), Body: []byte(`{"id":"a-1"}`)})
				fails := 1
				r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
					return inbox.New(r.store, "billing", key, func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
						if fails--; fails == 0 {
							return errors.New("once") // It must not take the name of its row for a key after that.
						}
						return write(ctx, tx, m)
					}, c)
				}, nil)
				r.drain()
				if n := r.store.states(); n[inbox.ParkedDead] != 1 || r.store.all()[0].Reason != inbox.ReasonInvalidKey {
					t.Fatalf("parked: %v", n)
				}
				mended = c.effect
				if c.before != nil {
					c.before(r)
					r.drain()
				}
				if n, _ := r.store.RetryParked(t.Context(), []int64{r.store.all()[0].ID}); n != 1 {
					t.Fatal("not tried again")
				}
				r.drain()
				_ = r.end()
				if c.effect {
					r.wantEffects("a-1")
				} else {
					r.wantEffects()
				}
				if n := r.store.states(); fmt.Sprint(n) != fmt.Sprint(c.states) && len(n)+len(c.states) > 0 {
					t.Errorf("parked: %v, want %v", n, c.states)
				}
			})
		})
	}
}

// The key that is derived now is that of another parked message: a person has to look.
func TestKeylessParkedTwice(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		h := failing("a-1", func(attempt int) error {
			if attempt == 1 {
				return inbox.RetryAfter(errors.New("no"), time.Hour)
			}
			return nil
		})
		r.publish("a-1")
		r.start(h, nil)
		<-time.After(time.Second)
		p := inbox.Parked{
			Key: inbox.Key{Consumer: "billing", MessageKey: "invalid:1"}, State: inbox.ParkedRetry, Reason: inbox.ReasonInvalidKey,
			Message: message("a-1", ""),
		}
		r.store.place(p)
		r.drain()
		_ = r.end()
		r.wantEffects("a-1")
		if n := r.store.states(); n[inbox.ParkedDead] != 1 || len(r.store.all()) != 1 || !strings.Contains(r.store.all()[0].Error, "another parked message") {
			t.Errorf("parked: %v, %+v", n, r.store.all())
		}
	})
}

// shortStore gives leased rows with a long key back as databases do: in a short form.
type shortStore struct {
	*fakeStore
	form string
}

const shortForm = "…sha256:52b1da89b3d3f33cd38bcbb1c8f1e6be0cd9fae8e46f1ab1a9af3ab6bd3ea3cf"

func (s *shortStore) Lease(ctx context.Context, q inbox.LeaseRequest) (inbox.Leased, error) {
	l, err := s.fakeStore.Lease(ctx, q)
	for i := range l.Rows {
		l.Rows[i].MessageKey = s.form
	}
	return l, err
}

// A handler never sees another key than before: when a long one cannot be had again,
// the message dies.
func TestShortKeyThatIsNotFound(t *testing.T) {
	t.Parallel()
	lookalike := "a" + shortForm // A key that looks like a short form is stored in one, too.
	for key, form := range map[string]string{strings.Repeat("x", 600): shortForm, lookalike: column.Key(lookalike)} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			p := parkedMessage(key, "")
			if key == lookalike {
				p.Message.Body = fmt.Appendf(nil, `{"id":%q}`, key)
			}
			r.store.place(p)
			r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
				return inbox.New(inbox.Store[*fakeTx](&shortStore{r.store, form}), "billing", keyfunc.JSON("id"), write, c)
			}, nil)
			r.drain()
			_ = r.end()
			r.wantEffects()
			if p := r.store.all(); len(p) != 1 || p[0].State != inbox.ParkedDead || !strings.Contains(p[0].Error, "short form") {
				t.Errorf("parked %+v", p)
			}
		})
	}
}

// A process that dies leaves its leases: they run out, and others take the rows. Its
// own late claim finds them gone.
func TestLeaseRunsOut(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.place(parkedMessage("a-1", ""))
		l, err := r.store.Lease(t.Context(), inbox.LeaseRequest{Consumer: "billing", Limit: 9, For: time.Minute})
		if err != nil || len(l.Rows) != 1 {
			t.Fatalf("Lease: %d rows, %v", len(l.Rows), err)
		}
		start := time.Now()
		r.start(write, nil)
		r.drain()
		if took := time.Since(start); took < 59*time.Second || took > 66*time.Second {
			t.Errorf("the row of a dead process was taken after %v, want after its lease of a minute", took)
		}
		_ = r.end()
		r.wantEffects("a-1")
	})
	// Here the lease runs out while the message waits for a worker.
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("slow-1")
		h := func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "slow-1" {
				<-time.After(time.Minute)
			}
			return tx.Write(m.MessageKey)
		}
		r.start(h, &inbox.Config{Workers: 1, BatchSize: 1, HandlerTimeout: -1, Parking: inbox.Parking{Lease: 10 * time.Second}})
		synctest.Wait()
		r.store.place(parkedMessage("a-1", "lane"))
		<-time.After(17 * time.Second) // Leased, and its worker is busy: it leaves the row to others.
		stop, done := r.stop, r.done
		r.start(h, nil)
		<-time.After(20 * time.Second)
		r.wantEffects("a-1")
		<-time.After(time.Minute)
		stop()
		<-done
		_ = r.end()
		r.wantEffects("a-1", "slow-1")
		if n := len(r.seen.outcomes); n != 2 {
			t.Errorf("%d outcomes, want 2: nothing is told of a row that is gone", n)
		}
	})
}

// case K7: a stop gives leases back at once, and costs no attempt.
func TestStopReleases(t *testing.T) {
	t.Parallel()
	for _, down := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			for i := range 5 {
				r.store.place(parkedMessage(fmt.Sprintf("a-%d", i), "lane"))
			}
			r.store.fault = func(op string, _ []string) error {
				if down && op == "release" {
					return errDown
				}
				return nil
			}
			started := make(chan struct{}, 5)
			r.start(func(ctx context.Context, _ *fakeTx, _ *inbox.Message) error {
				started <- struct{}{}
				<-ctx.Done()
				return ctx.Err()
			}, &inbox.Config{Workers: 1, BatchSize: 2, ShutdownTimeout: time.Second})
			<-started
			if err := r.end(); err != nil {
				t.Errorf("Run = %v", err)
			}
			for _, p := range r.store.all() {
				if p.Attempts != 4 || p.LeasedUntil.After(time.Now()) != down {
					t.Errorf("%s: %d attempts, leased until %v", p.MessageKey, p.Attempts, p.LeasedUntil)
				}
			}
			if got := strings.Contains(r.logs.String(), "give back parked messages failed"); got != down {
				t.Errorf("the log tells of leases that could not be given back: %v", got)
			}
		})
	}
}

// Infrastructure trouble costs a fed message no attempt, and is told once.
func TestFedMeetsOutage(t *testing.T) {
	t.Parallel()
	for _, where := range []string{"everything", "handler"} {
		t.Run(where, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var down atomic.Bool
				var calls atomic.Int64
				r.store.fault = func(op string, _ []string) error {
					if down.Load() {
						calls.Add(1)
						if where == "everything" {
							return errDown
						}
					}
					return nil
				}
				r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
					if down.Load() {
						return fmt.Errorf("insert: %w", diskFull{})
					}
					return tx.Write(m.MessageKey)
				}, nil)
				synctest.Wait()
				down.Store(true)
				var want []string
				for i := range 30 {
					want = append(want, fmt.Sprintf("a-%d", i))
					r.store.place(parkedMessage(want[i], fmt.Sprintf("lane-%d", i%3)))
				}
				<-time.After(time.Minute)
				if n := calls.Load(); where == "everything" && n > 60 {
					t.Errorf("%d calls of the database in a minute of outage", n)
				}
				down.Store(false)
				r.drain()
				_ = r.end()
				r.wantEffects(want...)
				if counted, _ := r.seen.counted(); counted != 0 {
					t.Errorf("%d attempts were counted", counted)
				}
				if a, b := strings.Count(r.logs.String(), "receiving pauses"), strings.Count(r.logs.String(), "can be used again"); a != 1 || b != 1 {
					t.Errorf("%d lines say that it pauses, %d that it goes on", a, b)
				}
			})
		})
	}
}

// An outage that only the feeder meets, as nothing comes from the broker, is told on
// entering and on leaving.
func TestIdleOutage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var down atomic.Bool
		r.store.fault = func(string, []string) error {
			if down.Load() {
				return errDown
			}
			return nil
		}
		r.start(write, nil)
		<-time.After(time.Minute)
		down.Store(true)
		<-time.After(30 * time.Second)
		down.Store(false)
		<-time.After(10 * time.Second)
		_ = r.end()
		if n := len(r.seen.pauses); n != 2 || !r.seen.pauses[0].Paused || r.seen.pauses[1].Paused {
			t.Errorf("pauses %+v", r.seen.pauses)
		}
	})
}

// Questions that fail while everything else works stop nothing, and are told once on
// begin and end.
func TestFeederTrouble(t *testing.T) {
	t.Parallel()
	for name, err := range map[string]error{"denied": errors.New("fake: permission denied"), "unavailable": errDown} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var broken atomic.Bool
				broken.Store(true)
				r.store.fault = func(op string, _ []string) error {
					if op == "lease" && broken.Load() {
						return err
					}
					return nil
				}
				r.start(write, nil)
				for i := range 600 {
					r.publish(fmt.Sprintf("%d-%d", i%7, i))
					<-time.After(100 * time.Millisecond)
				}
				if n := r.queue.Stats().Acked; n < 590 {
					t.Errorf("%d of 600 done", n)
				}
				if n := len(r.seen.pauses); n > 4 { // Before anything has succeeded it may ask twice.
					t.Errorf("%d pause events", n)
				}
				broken.Store(false)
				<-time.After(10 * time.Second)
				_ = r.end()
				if a, b := strings.Count(r.logs.String(), "cannot be fed back"), strings.Count(r.logs.String(), "are fed back again"); a != 1 || b != 1 {
					t.Errorf("%d lines of trouble, %d of its end", a, b)
				}
			})
		})
	}
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.fault = func(op string, _ []string) error {
			if op == "lease" {
				return fmt.Errorf("fake: %w", inbox.ErrNoSchema)
			}
			return nil
		}
		r.start(write, nil)
		if err := <-r.done; !errors.Is(err, inbox.ErrNoSchema) {
			t.Errorf("Run = %v, want ErrNoSchema", err)
		}
	})
}

// Every question has a deadline, and one that hangs stops neither the others nor a
// stop.
func TestFeederHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		s := &hangingStore{fakeStore: r.store}
		r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			return inbox.New(inbox.Store[*fakeTx](s), "billing", keyfunc.JSON("id"), write, c)
		}, nil)
		<-time.After(time.Minute)
		r.publish("a-1")
		synctest.Wait()
		r.wantEffects("a-1")
		if n := s.hung.Load(); n < 3 || n > 7 {
			t.Errorf("a hanging database was asked %d times in a minute", n)
		}
		if len(r.seen.pauses) != 0 {
			t.Errorf("pauses %+v, although claims and checks are answered", r.seen.pauses)
		}
		start := time.Now()
		_ = r.end()
		if took := time.Since(start); took > time.Second {
			t.Errorf("the stop took %v", took)
		}
	})
}

type hangingStore struct {
	*fakeStore
	hung atomic.Int64
}

func (s *hangingStore) Lease(ctx context.Context, _ inbox.LeaseRequest) (inbox.Leased, error) {
	s.hung.Add(1)
	<-ctx.Done()
	return inbox.Leased{}, ctx.Err()
}

// Fed messages do not wait for room, and are at most 20 at a time.
func TestFedNeedsNoRoom(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 100 {
			r.store.place(parkedMessage(fmt.Sprintf("fed-%d", i), ""))
		}
		release := make(chan struct{})
		running := atomic.Int64{}
		r.publish("live-1", "live-2")
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			running.Add(1)
			<-release
			return tx.Write(m.MessageKey)
		}, &inbox.Config{Workers: 40, BatchSize: 1, MaxInFlight: 1, HandlerTimeout: -1})
		<-time.After(time.Minute)
		if n := running.Load(); n < 20 || n > 21 {
			t.Errorf("%d handlers run, want 20 fed messages and at most one from the broker", n)
		}
		close(release)
		r.drain()
		_ = r.end()
		if n := len(r.effects()); n != 102 {
			t.Errorf("%d effects", n)
		}
	})
}

// A backlog of due messages is worked off at once, in questions of some size.
func TestFeederBacklog(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		var want []string
		for i := range 1000 {
			want = append(want, fmt.Sprintf("a-%03d", i))
			p := parkedMessage(want[i], "lane")
			if i > 0 {
				p.State, p.Reason = inbox.ParkedWaiting, inbox.ReasonWaiting
			}
			r.store.place(p)
		}
		start := time.Now()
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			<-time.After(time.Millisecond)
			return tx.Write(m.MessageKey)
		}, nil)
		r.drain()
		_ = r.end()
		if got := r.effects(); !slices.Equal(got, want) {
			t.Errorf("effects of the lane are not in order: %v", got)
		}
		if took := time.Since(start); took > 20*time.Second || r.store.leases > 150 {
			t.Errorf("1000 waiting messages took %v and %d questions", took, r.store.leases)
		}
	})
}

// Dead letters go when their time is over.
func TestPurgeDead(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		cfg  inbox.Parking
		left int
	}{
		{inbox.Parking{DeadRetention: time.Hour}, 0},
		{inbox.Parking{DeadRetention: time.Hour, OnDead: inbox.DeadBlock}, 1},
		{inbox.Parking{}, 2500},
		{inbox.Parking{DeadRetention: -1}, 2500},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			for i := range 2500 {
				p := parkedMessage(fmt.Sprint(i), "")
				if i == 7 {
					p.Lane = "lane"
				}
				p.State = inbox.ParkedDead
				r.store.place(p)
			}
			c.cfg.Poll = time.Minute
			r.start(write, &inbox.Config{Parking: c.cfg})
			<-time.After(59 * time.Minute)
			if n := len(r.store.all()); n != 2500 {
				t.Errorf("%+v: %d dead letters before their time, want 2500", c.cfg, n)
			}
			<-time.After(8 * time.Minute)
			_ = r.end()
			if n := len(r.store.all()); n != c.left {
				t.Errorf("%+v: %d dead letters are left, want %d", c.cfg, n, c.left)
			}
			if told := strings.Contains(r.logs.String(), "dead letters purged"); told != (c.left < 2500) {
				t.Errorf("%+v: the log tells of a purge: %v", c.cfg, told)
			}
		})
	}
}

// Under ConflictFail a fed message stops the consumer like any other, and stays.
func TestFedConflict(t *testing.T) {
	t.Parallel()
	for policy, want := range map[inbox.ConflictPolicy]string{
		inbox.ConflictDeadLetter: "map[dead:1]", inbox.ConflictSkip: "map[]", inbox.ConflictFail: "map[retry:1]",
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			p := parkedMessage("a-1", "lane")
			r.store.rows[p.Key] = &inbox.Record{Key: p.Key, Fingerprint: []byte("another")}
			r.store.place(p)
			r.start(write, &inbox.Config{OnConflict: policy})
			if policy == inbox.ConflictFail {
				if err := <-r.done; !errors.Is(err, inbox.ErrConflict) {
					t.Errorf("Run = %v, want ErrConflict", err)
				}
			} else {
				r.drain()
				_ = r.end()
			}
			r.wantEffects()
			if got := fmt.Sprint(r.store.states()); got != want {
				t.Errorf("policy %d: parked %s, want %s", policy, got, want)
			}
			if n := r.seen.count(inbox.Conflict); n != 1 {
				t.Errorf("policy %d: %d conflicts seen", policy, n)
			}
		})
	}
}

// A message that was fed again comes behind those of its lane that were fed with it
// before and wait for it: they still do not run before it.
func TestFedAgainKeepsOrder(t *testing.T) {
	t.Parallel()
	for _, mates := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.store.mates = mates
			for _, k := range []string{"a-1", "a-2"} {
				r.store.place(parkedMessage(k, "lane"))
			}
			runs := 0
			r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
				switch m.MessageKey {
				case "a-1":
					if runs++; runs == 1 {
						r.publish("slow-1", "slow-2")
						<-time.After(time.Second) // They are received, and the next batch of the only worker.
						return inbox.RetryAfter(errors.New("no"), time.Second)
					}
				case "slow-1":
					<-time.After(5 * time.Second)
				}
				return tx.Write(m.MessageKey)
			}, &inbox.Config{Workers: 1, BatchSize: 2})
			r.drain()
			_ = r.end()
			if got := r.effects(); len(got) != 4 || slices.Index(got, "a-1") > slices.Index(got, "a-2") {
				t.Errorf("mates %v: effects %v", mates, got)
			}
		})
	}
}

// A fed message that fails goes back into the table, however soon its next attempt is.
func TestFedGoesBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.store.place(parkedMessage("a-1", "lane"))
		r.start(failing("a-1", func(attempt int) error {
			if attempt == 5 {
				return inbox.RetryAfter(errors.New("no"), 100*time.Millisecond)
			}
			return nil
		}), nil)
		<-time.After(50 * time.Millisecond)
		if p := r.store.all()[0]; p.State != inbox.ParkedRetry || p.Attempts != 5 || !p.LeasedUntil.IsZero() || p.Error == "" || p.Failure == "" {
			t.Errorf("the row after its failure: %+v", p)
		}
		r.drain()
		_ = r.end()
		r.wantEffects("a-1")
		if a, b := r.seen.count(inbox.WasParked), r.seen.count(inbox.FirstAttempt); a != 0 || b != 1 || len(r.seen.retries) != 1 {
			t.Errorf("%d parked, %d first_attempt, %d retries; want one of each but the first", a, b, len(r.seen.retries))
		}
	})
}

// A row without a key is not locked by a claim: when its lease is over, nothing is
// changed, and nothing is told.
func TestKeylessGone(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		p := parkedMessage("invalid:1", "")
		p.Reason, p.Message = inbox.ReasonInvalidKey, &broker.Message{Body: []byte("hello")}
		h := func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			<-time.After(80 * time.Second)
			return tx.Write(m.MessageKey)
		}
		r.publish("slow-1")
		r.start(h, &inbox.Config{Workers: 1, HandlerTimeout: -1, Parking: inbox.Parking{Lease: 10 * time.Second, Poll: 50 * time.Second}})
		<-time.After(time.Second)
		r.store.place(p)
		<-time.After(64 * time.Second) // It was leased, and that is over.
		if l, err := r.store.Lease(t.Context(), inbox.LeaseRequest{Consumer: "billing", Limit: 1, For: time.Hour}); err != nil || len(l.Rows) != 1 {
			t.Errorf("Lease: %+v, %v", l, err)
		}
		<-time.After(30 * time.Second) // The worker has come to it.
		_ = r.end()
		if row := r.store.all()[0]; row.State != inbox.ParkedRetry || row.Reason != inbox.ReasonInvalidKey || row.Attempts != 4 {
			t.Errorf("the row: %+v", row)
		}
		if len(r.seen.outcomes) != 1 || strings.Contains(r.logs.String(), "counted=false") {
			t.Errorf("a row that is gone is told of:\n%s", r.logs)
		}
	})
}
