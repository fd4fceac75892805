package inboxtest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// The rules about live messages and fed ones that meet.
func feedRaceRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "duplicate while its message is fed", levels: true, run: duplicateOfFed[Tx]},
		{name: "twin and its lane while a message is being parked", levels: true, run: twinAndLane[Tx]},
		{name: "live message while its lane is freed", levels: true, run: liveWhileFreed[Tx]},
		{name: "fed message and a run on request", levels: true, run: fedAndRequested[Tx]},
		{name: "fed message that somebody has locked", run: fedLocked[Tx]},
		{name: "many lease at once", run: manyLease[Tx]},
		{name: "parking storm", levels: true, run: parkingStorm[Tx], timeout: 3 * ruleTimeout},
	}
}

// commitOr commits a batch. Where a serialization failure is in the way, as
// transactions that read what others write may have it, the work is done again.
func (s *storeSuite[Tx]) commitOr(b inbox.Batch[Tx], again func() inbox.Batch[Tx]) {
	s.Helper()
	for {
		err := b.Commit(s.ctx)
		switch {
		case err == nil:
			return
		case s.Store.Classify(err) != inbox.ClassContention || s.ctx.Err() != nil:
			s.Fatalf("Commit: %v", err)
		}
		b = again()
	}
}

// 79. A duplicate that comes while its message is fed waits for how that ends: done,
// it is a Replay; failed and parked again, given up or rolled back, it WasParked.
//
// case D13
func duplicateOfFed[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("done", "l1", 0), retry("again", "l2", 0), retry("given up", "l3", 0), retry("aborted", "l4", 0))
	rows := s.lease("done", "again", "given up", "aborted")
	for i, want := range []inbox.Outcome{inbox.Replay, inbox.WasParked, inbox.WasParked, inbox.WasParked} {
		r := rows[i]
		b := s.feed(r)
		s.wantFree(b, 0)
		if i == 0 {
			s.work(b, 0, r.MessageKey, []byte("result"))
		}
		if i == 1 {
			p := retry("again", "l2", time.Hour)
			p.Lease = r.Lease
			if err := b.Park(s.ctx, 0, p); err != nil {
				s.Fatal(err)
			}
		}
		cs := []inbox.Claim{inLane("new of "+r.MessageKey, ""), inLane(r.MessageKey, r.Lane)}
		duplicate := s.beginAsync(keeping(), cs...)
		s.waiting(1)
		if i == 3 {
			b.Abort()
		} else {
			s.commit(b)
		}
		check := func(b inbox.Batch[Tx]) inbox.Batch[Tx] {
			s.wantFree(b, 0)
			s.want(b, 1, want)
			if e := b.Entries()[1]; e.Held {
				s.Errorf("%s: an entry with the outcome %q is held", r.MessageKey, e.Outcome)
			}
			return b
		}
		s.commitOr(check(s.await(duplicate)), func() inbox.Batch[Tx] { return check(s.beginWith(keeping(), cs...)) })
		s.wantRow(claim(r.MessageKey).Key, i == 0)
	}
	s.wantParked(3)
	for _, k := range []string{"again", "given up", "aborted"} {
		if r := s.row(k); r.Duplicates != 1 {
			s.Errorf("%s: %d duplicates, want 1", k, r.Duplicates)
		}
	}
}

// 80. A twin of a message that is being parked for later, with the next one of its
// lane behind it: the twin attaches, and the next one does not overtake.
//
// case D13
func twinAndLane[Tx any](s *storeSuite[Tx]) {
	s.parker()
	for _, again := range []bool{false, true} {
		lane := fmt.Sprint("lane", again)
		k1, k2 := lane+"1", lane+"2"
		var b inbox.Batch[Tx]
		p := retry(k1, lane, time.Hour)
		if again {
			s.fill(retry(k1, lane, 0))
			r := s.lease(k1)[0]
			p.Lease = r.Lease
			b = s.feed(r)
		} else {
			b = s.beginWith(keeping(), inLane(k1, lane))
		}
		s.wantFree(b, 0)
		s.start(b, 0, insertEffect(k1))
		if err := b.Finish(s.ctx, 0, false, nil); err != nil {
			s.Fatal(err)
		}
		if err := b.Park(s.ctx, 0, p); err != nil {
			s.Fatal(err)
		}
		cs := []inbox.Claim{inLane(k1, lane), inLane(k2, lane)}
		twin := s.beginAsync(keeping(), cs...)
		s.waiting(1)
		s.commit(b)
		queue := func(b inbox.Batch[Tx]) inbox.Batch[Tx] {
			s.want(b, 0, inbox.WasParked)
			s.wantHeld(b, 1, false)
			if err := b.Park(s.ctx, 1, waits(k2, lane)); err != nil {
				s.Fatal(err)
			}
			return b
		}
		s.commitOr(queue(s.await(twin)), func() inbox.Batch[Tx] { return queue(s.beginWith(keeping(), cs...)) })
		s.wantEffects(k1, 0)
		s.wantRow(claim(k2).Key, false)
	}
	s.wantParked(4)
}

// 81. A live message that comes while the last parked one of its lane is done: it
// waits behind it, and then its turn comes, or it runs after it. It is never lost
// and never before. When that one is not done after all, it stays behind it.
//
// case D13
func liveWhileFreed[Tx any](s *storeSuite[Tx]) {
	for _, done := range []bool{true, false} {
		lane := fmt.Sprint("lane", done)
		k1, k2 := lane+"1", lane+"2"
		s.fill(retry(k1, lane, 0))
		r := s.lease(k1)[0]
		run := func() inbox.Batch[Tx] {
			b := s.feed(r)
			s.work(b, 0, k1, nil)
			return b
		}
		b := run()
		end := func() {
			if done {
				s.commitOr(b, run)
			} else {
				b.Abort()
			}
		}
		live := s.beginAsync(keeping(), inLane(k2, lane))
		if s.h.OneWriter {
			end()
		}
		got := s.await(live)
		if s.h.OneWriter && done {
			s.wantFree(got, 0)
			s.work(got, 0, k2, nil)
			s.commit(got)
			s.lease()
			continue
		}
		queue := func(b inbox.Batch[Tx]) inbox.Batch[Tx] {
			s.wantHeld(b, 0, false)
			if err := b.Park(s.ctx, 0, waits(k2, lane)); err != nil {
				s.Fatal(err)
			}
			return b
		}
		s.commitOr(queue(got), func() inbox.Batch[Tx] { return queue(s.beginWith(keeping(), inLane(k2, lane))) })
		if !s.h.OneWriter {
			s.lease() // The one before it is leased.
			end()
		}
		if !done {
			s.lease()
			if err := s.parker().Release(s.ctx, []inbox.Lease{r.Lease}); err != nil {
				s.Fatal(err)
			}
			s.finishFed(s.lease(k1, k2)...)
		} else {
			s.finishFed(s.lease(k2)...)
		}
		s.wantEffects(k1, 1)
		s.wantEffects(k2, 1)
		s.wantLane(keeping(), lane, false)
	}
	s.wantParked(0)
}

// 82. A message that runs on request while it is leased is done once: who comes
// second finds it done, and the row is gone.
//
// case D13
func fedAndRequested[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), retry("k2", "", 0))
	rows := s.lease("k1", "k2")
	ignore := options()
	ignore.IgnoreParked = true
	b := s.feed(rows[0])
	s.work(b, 0, "k1", nil)
	requested := s.beginAsync(ignore, claim("k1"))
	s.waiting(1)
	s.commit(b)
	got := s.await(requested)
	s.want(got, 0, inbox.Replay)
	got.Abort()
	b = s.beginWith(ignore, claim("k2"))
	s.work(b, 0, "k2", nil)
	second := s.beginAsync(keeping(), fed(rows[1]), claim("k3"))
	s.waiting(1)
	s.commit(b)
	check := func(b inbox.Batch[Tx]) inbox.Batch[Tx] {
		s.wantGone(b, 0)
		s.wantFree(b, 1)
		s.work(b, 1, "k3", nil)
		return b
	}
	s.commitOr(check(s.await(second)), func() inbox.Batch[Tx] { return check(s.beginWith(keeping(), fed(rows[1]), claim("k3"))) })
	s.wantParked(0)
	for _, k := range []string{"k1", "k2", "k3"} {
		s.wantEffects(k, 1)
	}
}

// 83. A row that a transaction has locked is passed over without waiting, and so are
// those of its lane behind it, even if its lease has run out.
func fedLocked[Tx any](s *storeSuite[Tx]) {
	s.parker()
	if s.h.OneWriter {
		s.Skip("the database has one writer: whoever leases waits for it")
	}
	s.fill(retry("a1", "a", 0), waits("a2", "a"), waits("b1", "b"))
	brief := request()
	brief.For = time.Millisecond
	rows := s.wantLeased(s.leaseWith(brief).Rows, "a1", "a2", "b1")
	b := s.feed(rows[0])
	if b.Entries()[0].Gone {
		s.Skip("a lease that has run out and that nobody took is over in this store")
	}
	s.work(b, 0, "a1", nil)
	s.pause(20 * time.Millisecond)
	s.lease("b1")
	s.commit(b)
	s.wantEffects("a1", 1)
	s.finishFed(s.lease("a2")...)
	s.wantParked(1)
}

// 84. Any number of processes may lease at once: each row comes to one, and each
// lane goes on in its order.
func manyLease[Tx any](s *storeSuite[Tx]) {
	const lanes, perLane, free, workers = 6, 8, 20, 4
	var all []inbox.Parked
	for i := range perLane {
		for l := range lanes {
			lane := fmt.Sprint("l", l)
			p := waits(fmt.Sprintf("%s-%d", lane, i), lane)
			if i == 0 {
				p = retry(p.MessageKey, lane, 0)
			}
			all = append(all, p)
		}
	}
	for i := range free {
		all = append(all, retry(fmt.Sprint("f", i), "", 0))
	}
	s.fill(all...)
	f := newFeeding(s)
	for l := range lanes {
		s.outside(fmt.Sprintf("insert into turns values ('l%d', 0)", l))
	}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for ctx.Err() == nil && !f.failed() {
				r := request()
				r.Limit = 5
				n, err := f.round(ctx, r, nil)
				if err != nil {
					f.fail("feeder: %v", err)
				}
				if n == 0 && f.total() == len(all) {
					return
				}
			}
		})
	}
	wg.Wait()
	f.report()
	s.wantParked(0)
	if n := s.count("select count(*) from effects"); n != int64(len(all)) {
		s.Errorf("%d effects, want %d", n, len(all))
	}
	if n := s.count("select count(distinct k) from effects"); n != int64(len(all)) {
		s.Errorf("effects of %d messages, want %d", n, len(all))
	}
	if n := s.count(fmt.Sprintf("select count(*) from turns where n = %d", perLane)); n != lanes {
		s.Errorf("%d lanes came to their end, want %d", n, lanes)
	}
}

// feeding is several goroutines' work on the parked rows of lanes. Each message is
// named LANE-N, and its handler checks that N is the turn of its lane.
type feeding[Tx any] struct {
	s        *storeSuite[Tx]
	mu       sync.Mutex
	done     map[string]int // commits, by key
	failures []string
}

func newFeeding[Tx any](s *storeSuite[Tx]) *feeding[Tx] {
	s.outside("create table turns (lane varchar(100) primary key, n integer not null)")
	return &feeding[Tx]{s: s, done: map[string]int{}}
}

func (f *feeding[Tx]) fail(format string, args ...any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.failures = append(f.failures, fmt.Sprintf(format, args...))
}

func (f *feeding[Tx]) failed() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.failures) > 0
}

func (f *feeding[Tx]) report() {
	f.s.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, text := range f.failures {
		f.s.Errorf("%s", text)
	}
}

func (f *feeding[Tx]) total() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.done)
}

func (f *feeding[Tx]) committed(keys []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, k := range keys {
		f.done[k]++
		if f.done[k] > 1 {
			f.failures = append(f.failures, fmt.Sprintf("%s was committed %d times", k, f.done[k]))
		}
	}
}

// handle is the handler: it takes the lane's turn.
func (f *feeding[Tx]) handle(ctx context.Context, b inbox.Batch[Tx], i int, c inbox.Claim) error {
	s := f.s
	tx, err := b.Start(ctx, i)
	if err != nil {
		return err
	}
	if c.Lane != "" {
		n, err := s.Count(ctx, tx, "select n from turns where lane = '"+c.Lane+"'")
		if err != nil {
			return err
		}
		if want := fmt.Sprintf("%s-%d", c.Lane, n); c.MessageKey != want {
			f.fail("%s runs, it is the turn of %s", c.MessageKey, want)
		}
		if err := s.Exec(ctx, tx, "update turns set n = n + 1 where lane = '"+c.Lane+"'"); err != nil {
			return err
		}
	}
	return s.Exec(ctx, tx, insertEffect(c.MessageKey))
}

// contended tells that work has to be done again because of others.
func (f *feeding[Tx]) contended(err error) bool {
	return err != nil && f.s.Store.Classify(err) == inbox.ClassContention
}

// round leases and does what it got, and returns how many rows that were. fails
// decides whether a message fails; it may be nil.
func (f *feeding[Tx]) round(ctx context.Context, r inbox.LeaseRequest, fails func(key string) bool) (int, error) {
	got, err := f.s.parker().Lease(ctx, r)
	if f.contended(err) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("lease: %w", err)
	}
	var cs []inbox.Claim
	for _, row := range got.Rows {
		cs = append(cs, fed(row))
	}
	for len(cs) > 0 {
		n := min(len(cs), 3)
		if err := f.batch(ctx, cs[:n], fails); err != nil {
			return 0, err
		}
		cs = cs[n:]
	}
	return len(got.Rows), nil
}

// batch runs fed messages; what has to wait is given back.
func (f *feeding[Tx]) batch(ctx context.Context, cs []inbox.Claim, fails func(key string) bool) error {
	for {
		err := f.once(ctx, cs, fails)
		if !f.contended(err) {
			return err
		}
	}
}

func (f *feeding[Tx]) once(ctx context.Context, cs []inbox.Claim, fails func(key string) bool) error {
	b, err := f.s.Store.Begin(ctx, cs, keeping())
	if err != nil {
		return err
	}
	defer b.Abort()
	var committed []string
	var back []inbox.Lease
	stopped := map[string]bool{}
	for i, e := range b.Entries() {
		c := cs[i]
		if !e.Claimed() {
			continue
		}
		if e.Held || stopped[c.Lane] {
			back = append(back, c.Parked)
			continue
		}
		if err := f.handle(ctx, b, i, c); err != nil {
			return err
		}
		failed := fails != nil && fails(c.MessageKey)
		if err := b.Finish(ctx, i, !failed, nil); err != nil {
			return err
		}
		if !failed {
			committed = append(committed, c.MessageKey)
			continue
		}
		stopped[c.Lane] = c.Lane != ""
		p := retry(c.MessageKey, c.Lane, time.Millisecond)
		p.Lease = c.Parked
		if err := b.Park(ctx, i, p); err != nil {
			return err
		}
	}
	if err := b.Commit(ctx); err != nil {
		return err
	}
	f.committed(committed)
	return f.s.parker().Release(ctx, back)
}

// live handles one message of a lane as it comes from a broker: it runs, or fails
// and is parked, or queues.
func (f *feeding[Tx]) live(ctx context.Context, c inbox.Claim, fails func(key string) bool) error {
	for {
		err := f.liveOnce(ctx, c, fails)
		if !f.contended(err) {
			return err
		}
	}
}

func (f *feeding[Tx]) liveOnce(ctx context.Context, c inbox.Claim, fails func(key string) bool) error {
	b, err := f.s.Store.Begin(ctx, []inbox.Claim{c}, keeping())
	if err != nil {
		return err
	}
	defer b.Abort()
	e, failed := b.Entries()[0], false
	switch {
	case !e.Claimed():
	case e.Held:
		err = b.Park(ctx, 0, waits(c.MessageKey, c.Lane))
	default:
		failed = fails(c.MessageKey)
		if err = f.handle(ctx, b, 0, c); err == nil {
			err = b.Finish(ctx, 0, !failed, nil)
		}
		if err == nil && failed {
			err = b.Park(ctx, 0, retry(c.MessageKey, c.Lane, time.Millisecond))
		}
	}
	if err != nil {
		return err
	}
	if err := b.Commit(ctx); err != nil {
		return err
	}
	if e.Claimed() && !e.Held && !failed {
		f.committed([]string{c.MessageKey})
	}
	return nil
}

// 85. Live messages, duplicates of them, failures, and several that feed: each
// message is done once, and every lane in its order.
//
// case D13
func parkingStorm[Tx any](s *storeSuite[Tx]) {
	const lanes, perLane, feeders = 4, 20, 2
	s.parker()
	f := newFeeding(s)
	var dice sync.Mutex
	r := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // A seeded order.
	fails := func(string) bool {
		dice.Lock()
		defer dice.Unlock()
		return r.IntN(4) == 0
	}
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	var live, feed sync.WaitGroup
	for l := range lanes {
		lane := fmt.Sprint("l", l)
		s.outside("insert into turns values ('" + lane + "', 0)")
		live.Go(func() {
			for i := range perLane {
				for range 1 + i%2 { // Every other one is delivered twice.
					if err := f.live(ctx, inLane(fmt.Sprintf("%s-%d", lane, i), lane), fails); err != nil {
						f.fail("live message %d of %s: %v", i, lane, err)
						return
					}
				}
			}
		})
	}
	for range feeders {
		feed.Go(func() {
			for ctx.Err() == nil && !f.failed() && f.total() < lanes*perLane {
				n, err := f.round(ctx, request(), fails)
				if err != nil {
					f.fail("feeder: %v", err)
				}
				if n == 0 {
					s.pause(time.Millisecond)
				}
			}
		})
	}
	live.Wait()
	feed.Wait()
	f.report()
	s.wantParked(0)
	if n := s.count("select count(*) from effects"); n != lanes*perLane {
		s.Errorf("%d effects, want %d", n, lanes*perLane)
	}
	keys := f.doneKeys()
	if len(keys) != lanes*perLane {
		s.Errorf("%d messages are done, want %d: %v", len(keys), lanes*perLane, keys)
	}
}

func (f *feeding[Tx]) doneKeys() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var keys []string
	for k := range f.done {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
