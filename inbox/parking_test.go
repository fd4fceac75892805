package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// unlaned makes the rig's queue one without lanes.
func (r *rig) unlaned() *rig {
	r.queue = memory.New("orders", &memory.Config{Lane: func(*broker.Message) string { return "" }})
	return r
}

// effects returns what was committed.
func (r *rig) effects() []string {
	effects, _, _ := r.store.state()
	return effects
}

// failing is a handler that fails for a key as long as bad says so.
func failing(key string, bad func(attempt int) error) handler {
	return func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
		_ = tx.Write(m.MessageKey)
		if m.MessageKey == key {
			return bad(m.Attempt)
		}
		return nil
	}
}

func always1(err error) func(int) error { return func(int) error { return err } }

// case R5: a message that always fails holds nobody: its attempts come with backoff,
// from the table in the end, and the hundred behind it are done at once.
func TestAlwaysFailing(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t).unlaned()
		var want []string
		r.publish("bad-1")
		for i := range 100 {
			want = append(want, fmt.Sprintf("good-%d", i))
		}
		r.publish(want...)
		var runs []time.Time
		r.start(failing("bad-1", func(attempt int) error {
			runs = append(runs, time.Now())
			if attempt != len(runs) {
				t.Errorf("run %d says that it is attempt %d", len(runs), attempt)
			}
			return errors.New("no")
		}), nil)
		<-time.After(5 * time.Second)
		r.wantEffects(want...)
		if s := r.queue.Stats(); s.Acked != 101 {
			t.Errorf("%d acked after 5s, want all 101", s.Acked)
		}
		if n := r.store.states(); n[inbox.ParkedRetry] != 1 {
			t.Errorf("parked: %v, want the bad one for another attempt", n)
		}
		r.drain()
		_ = r.end()
		r.wantEffects(want...)
		if len(runs) != 15 {
			t.Errorf("%d runs, want 15", len(runs))
		}
		for i := 1; i < len(runs); i++ {
			// The table is asked when the row is due, and now and then.
			longest := min(200*time.Millisecond<<(i-1), 10*time.Minute) + 200*time.Millisecond
			if d := runs[i].Sub(runs[i-1]); d <= 0 || d > longest {
				t.Errorf("run %d came %v after the one before, want something up to %v", i+1, d, longest)
			}
		}
		p := r.store.all()[0]
		if p.State != inbox.ParkedDead || p.Reason != inbox.ReasonAttempts || p.Attempts != 15 || p.Failure == "" || p.Error != "no" {
			t.Errorf("the bad one ended as %+v", p.Parked)
		}
		if counted, free := r.seen.counted(); counted != 14 || free != 0 {
			t.Errorf("%d counted and %d uncounted retries, want 14 and 0", counted, free)
		}
		if a, b := r.seen.count(inbox.WasParked), r.seen.count(inbox.Dead); a != 1 || b != 1 {
			t.Errorf("%d parked and %d dead outcomes, want one of each", a, b)
		}
		total := runs[14].Sub(runs[0])
		if total > 34*time.Minute {
			t.Errorf("15 attempts took %v, the documentation says half an hour", total)
		}
		if _, asked := r.store.asked(); asked > int(total/(5*time.Second))+30 {
			t.Errorf("the table was asked %d times within %v", asked, total)
		}
		logs := r.logs.String()
		for want, n := range map[string]int{
			`level=WARN msg="inbox: attempt failed"`:                                14,
			`outcome=parked attempt=4`:                                              1,
			`reason="attempt failed"`:                                               1,
			`level=ERROR msg="inbox: message" consumer=billing key=bad-1`:           1,
			`level=INFO msg="inbox: message" consumer=billing key=bad-1 message_id`: 1,
		} {
			if got := strings.Count(logs, want); got != n {
				t.Errorf("%d lines with %q, want %d", got, want, n)
			}
		}
	})
}

// An idle consumer asks its database once in Poll.
func TestIdleFeederPolls(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.start(write, nil)
		<-time.After(time.Hour)
		_ = r.end()
		if _, n := r.store.asked(); n < 700 || n > 750 {
			t.Errorf("the table was asked %d times in an hour, want every 5s", n)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1")
		r.start(failing("a-1", always1(errors.New("no"))), &inbox.Config{Parking: inbox.Parking{Poll: -1}})
		<-time.After(time.Hour)
		_ = r.end()
		if n := r.store.states(); r.store.leases != 0 || n[inbox.ParkedRetry] != 1 {
			t.Errorf("a process that feeds nothing back has asked %d times; parked: %v", r.store.leases, n)
		}
	})
}

// Messages of a lane wait behind a parked one, in the table and in their order; other
// lanes go on. Several processes share the work.
func TestLaneWaitsBehindParked(t *testing.T) {
	t.Parallel()
	for _, mates := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.store.mates = mates
			h := failing("a-00", func(attempt int) error {
				if attempt < 8 {
					return errors.New("no")
				}
				return nil
			})
			var want []string
			for i := range 60 {
				want = append(want, fmt.Sprintf("a-%02d", i))
			}
			r.publish(want...)
			r.publish("b-1", "b-2")
			r.start(h, &inbox.Config{BatchSize: 7})
			stop, done := r.stop, r.done
			r.start(h, &inbox.Config{BatchSize: 7})
			<-time.After(3 * time.Second)
			if got := r.effects(); !slices.Equal(got, []string{"b-1", "b-2"}) {
				t.Errorf("effects %v while the head of lane a is parked", got)
			}
			if n := r.store.states(); r.queue.Stats().Acked != 62 || n[inbox.ParkedRetry] != 1 || n[inbox.ParkedWaiting] != 59 {
				t.Errorf("%d acked, parked: %v", r.queue.Stats().Acked, n)
			}
			for _, p := range r.store.all() {
				if p.State == inbox.ParkedWaiting && (p.Reason != inbox.ReasonWaiting || p.Attempts != 0 || p.Error != "" || p.Failure != "") {
					t.Errorf("a waiting row: %+v", p.Parked)
				}
			}
			r.drain()
			stop()
			<-done
			_ = r.end()
			if got := r.effects()[2:]; !slices.Equal(got, want) {
				t.Errorf("effects of lane a: %v", got)
			}
			if a, b := r.seen.count(inbox.WasParked), r.seen.count(inbox.FirstAttempt); a != 60 || b != 62 {
				t.Errorf("%d parked and %d first_attempt outcomes, want 60 and 62", a, b)
			}
		})
	}
}

// With Unordered nobody waits.
func TestUnordered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1", "a-2", "a-3")
		r.start(failing("a-1", func(attempt int) error {
			if attempt == 1 {
				return inbox.RetryAfter(errors.New("no"), time.Minute)
			}
			return nil
		}), &inbox.Config{Parking: inbox.Parking{Unordered: true}})
		<-time.After(time.Second)
		r.wantEffects("a-2", "a-3")
		r.drain()
		_ = r.end()
		r.wantEffects("a-1", "a-2", "a-3")
	})
}

// What a lane does when a message of it died, and a person sees to it.
func TestOnDead(t *testing.T) {
	t.Parallel()
	for _, policy := range []inbox.OnDead{inbox.DeadPass, inbox.DeadBlock} {
		for _, discard := range []bool{false, true} {
			t.Run(fmt.Sprintf("policy=%d discard=%v", policy, discard), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					r := newRig(t)
					mended := false
					r.publish("a-1", "a-2", "a-3")
					r.start(failing("a-1", func(int) error {
						if mended {
							return nil
						}
						return inbox.Permanent(errors.New("no"))
					}), &inbox.Config{Workers: 1, Parking: inbox.Parking{OnDead: policy}})
					<-time.After(time.Minute)
					want := []string{"a-2", "a-3"}
					if policy == inbox.DeadBlock {
						want = nil
					}
					if got := r.effects(); !slices.Equal(got, want) {
						t.Errorf("effects %v, want %v", got, want)
					}
					mended = true
					id := []int64{r.store.all()[0].ID}
					if discard {
						_, _ = r.store.DiscardParked(t.Context(), id, "by a person")
					} else {
						_, _ = r.store.RetryParked(t.Context(), id)
						want = append(want, "a-1")
					}
					if policy == inbox.DeadBlock {
						want = append(want, "a-2", "a-3")
					}
					<-time.After(6 * time.Second) // Poll
					if got := r.effects(); !slices.Equal(got, want) {
						t.Errorf("effects %v, want %v", got, want)
					}
					r.queue.Rewind() // What was discarded does not run.
					r.drain()
					_ = r.end()
					if got := r.effects(); !slices.Equal(got, want) {
						t.Errorf("effects %v after a replay of the queue, want %v", got, want)
					}
				})
			})
		}
	}
}

// A lane in which as many wait as may stands still, and drains although its messages
// fill the process.
func TestFullLaneDrains(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]inbox.Parking{
		"rows":  {MaxWaiting: 5},
		"bytes": {MaxWaitingBytes: int64(5 * len(`{"id":"a-00"}`))},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				var want []string
				for i := range 100 {
					want = append(want, fmt.Sprintf("a-%02d", i))
				}
				r.publish(want...)
				r.start(failing("a-00", func(attempt int) error {
					if attempt == 1 {
						return inbox.RetryAfter(errors.New("no"), 10*time.Minute)
					}
					return nil
				}), &inbox.Config{Workers: 2, BatchSize: 1, MaxInFlight: 10, Parking: p})
				<-time.After(9 * time.Minute)
				if n, s := r.store.states(), r.queue.Stats(); n[inbox.ParkedWaiting] != 5 || s.Acked != 6 || s.InFlight != 10 {
					t.Errorf("parked: %v, %+v; want 5 that wait and 10 in flight", n, s)
				}
				if n, _ := r.store.asked(); n > 300 {
					t.Errorf("%d transactions in 9 minutes for a lane that stands still", n)
				}
				if n := strings.Count(r.logs.String(), "lane stands still"); n < 1 || n > 9 {
					t.Errorf("%d lines say that the lane stands still", n)
				}
				if counted, free := r.seen.counted(); counted != 1 || free != 0 {
					t.Errorf("%d counted, %d uncounted retries, want 1 and 0", counted, free)
				}
				r.drain()
				_ = r.end()
				if got := r.effects(); !slices.Equal(got, want) {
					t.Errorf("effects %v", got)
				}
			})
		})
	}
}

// case D13: duplicates and twins of parked, waiting and dead messages attach to them.
func TestDuplicatesOfParked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1", "a-2", "a-1", "a-2", "b-1", "b-1")
		r.queue.Publish(&broker.Message{Key: []byte("c"), Body: message("a-1", "").Body}) // in another lane
		h := failing("a-1", func(attempt int) error {
			if attempt == 1 {
				return inbox.RetryAfter(errors.New("no"), time.Minute)
			}
			return nil
		})
		r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
			if m.MessageKey == "b-1" {
				return inbox.Permanent(errors.New("no"))
			}
			return h(ctx, tx, m)
		}, &inbox.Config{Workers: 1})
		<-time.After(time.Second)
		r.queue.Rewind()
		<-time.After(time.Second)
		if n, s := r.store.states(), r.queue.Stats(); s.Ready+s.InFlight != 0 || n[inbox.ParkedRetry] != 1 || n[inbox.ParkedWaiting] != 1 || n[inbox.ParkedDead] != 1 {
			t.Errorf("parked: %v, %+v", n, s)
		}
		r.wantEffects()
		r.drain()
		r.queue.Rewind()
		r.drain()
		_ = r.end()
		if got := r.effects(); !slices.Equal(got, []string{"a-1", "a-2"}) {
			t.Errorf("effects %v", got)
		}
		if n := r.store.states(); n[inbox.ParkedDead] != 1 || len(r.store.all()) != 1 {
			t.Errorf("parked: %v", n)
		}
	})
}

// A message whose transaction is gone is parked in a new one, under its claim; when
// somebody else has succeeded by then, it is a replay.
func TestParkWithoutTransaction(t *testing.T) {
	t.Parallel()
	for _, meanwhile := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			runs, parks := 0, 0
			r.publish("a-1", "a-2")
			r.store.fault = func(op string, keys []string) error {
				if op != "park" {
					return nil
				}
				if parks++; parks == 1 {
					if meanwhile {
						r.store.mu.Lock()
						key := inbox.Key{Consumer: "billing", MessageKey: "a-1"}
						r.store.rows[key] = &inbox.Record{Key: key, Status: inbox.StatusDone, Fingerprint: r.store.begun(keys[0])}
						r.store.mu.Unlock()
					}
					return errDown
				}
				return nil
			}
			r.start(failing("a-1", func(int) error {
				if runs++; runs == 1 {
					return inbox.RetryAfter(errors.New("no"), time.Minute)
				}
				return nil
			}), &inbox.Config{Workers: 1, BatchSize: 1})
			r.drain()
			_ = r.end()
			if meanwhile {
				if runs != 1 || parks != 1 || len(r.store.all()) != 0 || r.seen.count(inbox.Replay) != 1 {
					t.Errorf("%d runs, %d parks, %d rows, %d replays; want a replay and nothing parked", runs, parks, len(r.store.all()), r.seen.count(inbox.Replay))
				}
				r.wantEffects("a-2")
				return
			}
			if runs != 2 {
				t.Errorf("%d runs", runs)
			}
			if got := r.effects(); !slices.Equal(got, []string{"a-1", "a-2"}) {
				t.Errorf("effects %v", got)
			}
			if counted, _ := r.seen.counted(); counted != 1 {
				t.Errorf("%d counted failures, want 1", counted)
			}
		})
	}
}

// Without a Parker failed messages wait in their lanes.
func TestStoreWithoutParker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		r.publish("a-1", "a-2")
		h := failing("a-1", func(attempt int) error {
			if attempt < 5 {
				return inbox.RetryAfter(errors.New("no"), time.Hour)
			}
			return nil
		})
		r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			return inbox.New(inbox.Store[*fakeTx](noParker{r.store}), "billing", keyfunc.JSON("id"), h, c)
		}, nil)
		<-time.After(200 * time.Minute)
		if len(r.store.all()) != 0 || len(r.effects()) != 0 {
			t.Errorf("%d parked, effects %v", len(r.store.all()), r.effects())
		}
		<-time.After(time.Hour)
		_ = r.end()
		if got := r.effects(); !slices.Equal(got, []string{"a-1", "a-2"}) {
			t.Errorf("effects %v", got)
		}
	})
}

// Retry.Classify turns errors into verdicts.
func TestClassify(t *testing.T) {
	t.Parallel()
	var (
		busy, bad, odd, plain = errors.New("busy"), errors.New("bad"), errors.New("odd"), errors.New("plain")
		asked                 []error
	)
	classify := func(err error) error {
		asked = append(asked, err)
		switch {
		case errors.Is(err, busy):
			return inbox.RetryAfter(err, 42*time.Second)
		case errors.Is(err, bad), errors.Is(err, inbox.ErrPanic), errors.Is(err, inbox.ErrHandlerTimeout):
			return inbox.Permanent(fmt.Errorf("classified: %w", err))
		case errors.Is(err, odd):
			panic("the classifier")
		case errors.Is(err, plain):
			return inbox.Skip("never")
		}
		return nil
	}
	for _, c := range []struct {
		name    string
		err     func(ctx context.Context, tx *fakeTx) error
		asked   int
		dead    inbox.Reason
		delay   time.Duration
		uncount bool
	}{
		{"retry after", func(context.Context, *fakeTx) error { return busy }, 1, "", 42 * time.Second, false},
		{"permanent", func(context.Context, *fakeTx) error { return bad }, 1, inbox.ReasonPermanent, 0, false},
		{"panic", func(context.Context, *fakeTx) error { panic("x") }, 1, inbox.ReasonPermanent, 0, false},
		{"timeout", func(ctx context.Context, _ *fakeTx) error { <-ctx.Done(); return ctx.Err() }, 1, inbox.ReasonPermanent, 0, false},
		{"left behind", func(context.Context, *fakeTx) error { <-time.After(time.Minute); return nil }, 1, inbox.ReasonPermanent, 0, false},
		{"classifier panics", func(context.Context, *fakeTx) error { return odd }, 1, "", 0, false},
		{"no success out of a failure", func(context.Context, *fakeTx) error { return plain }, 1, "", 0, false},
		{"left as it is", func(context.Context, *fakeTx) error { return errors.New("other") }, 1, "", 0, false},
		{"a verdict already", func(context.Context, *fakeTx) error { return inbox.RetryAfter(bad, time.Second) }, 0, "", time.Second, false},
		{"a verdict already", func(context.Context, *fakeTx) error { return inbox.Permanent(busy) }, 0, inbox.ReasonPermanent, 0, false},
		{"infrastructure", func(context.Context, *fakeTx) error { return errDeadlock }, 0, "", 0, true},
		{"infrastructure", func(_ context.Context, tx *fakeTx) error { return tx.Cut() }, 0, "", 0, true},
		{"effects unknown", func(_ context.Context, tx *fakeTx) error { tx.End(); return bad }, 0, inbox.ReasonEffectsUnknown, 0, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			asked = nil
			r := newRig(t)
			r.publish("a-1")
			first := true
			r.start(func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
				if first {
					first = false
					return c.err(ctx, tx)
				}
				return tx.Write(m.MessageKey)
			}, &inbox.Config{HandlerTimeout: 10 * time.Second, Retry: inbox.Retry{Classify: classify}})
			r.drain()
			_ = r.end()
			<-time.After(time.Minute)
			if len(asked) != c.asked {
				t.Errorf("%s: asked about %v", c.name, asked)
			}
			if c.dead != "" {
				if len(r.store.all()) != 1 || r.store.all()[0].Reason != c.dead {
					t.Errorf("%s: parked %+v, want dead: %s", c.name, r.store.all(), c.dead)
				}
				return
			}
			r.wantEffects("a-1")
			if e := r.seen.retries; len(e) != 1 || e[0].Counted == c.uncount || (c.delay != 0 && e[0].Delay != c.delay) {
				t.Errorf("%s: retries %+v", c.name, e)
			}
		})
	}
	// Process gives the verdict to its caller.
	c := newConsumer(t, newFakeStore(), func(context.Context, *fakeTx, *inbox.Message) error { return bad }, &inbox.Config{Retry: inbox.Retry{Classify: classify}})
	if _, err := c.Process(t.Context(), message("a-1", "")); !inbox.IsPermanent(err) || !errors.Is(err, bad) {
		t.Errorf("Process = %v, want a permanent error", err)
	}
}

// A dead letter blocks its lane from the transaction on in which it dies, whatever it
// died of.
func TestDeadBlocksItsBatch(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]*broker.Message{
		"conflict": message("a-1", ""), "no key": {Key: []byte("a"), Body: []byte("hello")},
	} {
		synctest.Test(t, func(t *testing.T) {
			r := newRig(t)
			r.store.rows[inbox.Key{Consumer: "billing", MessageKey: "a-1"}] = &inbox.Record{Fingerprint: []byte("other")}
			r.queue.Publish(first, message("a-2", ""))
			r.start(write, &inbox.Config{Workers: 1, Parking: inbox.Parking{OnDead: inbox.DeadBlock}})
			<-time.After(time.Minute)
			_ = r.end()
			r.wantEffects()
			if got := fmt.Sprint(r.store.states()); got != "map[dead:1 waiting:1]" || r.queue.Stats().Acked != 2 {
				t.Errorf("%s: parked %s, %d acked", name, got, r.queue.Stats().Acked)
			}
		})
	}
}
