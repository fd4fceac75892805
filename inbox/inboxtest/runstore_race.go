package inboxtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

func raceRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "race winner commits", levels: true, run: winnerCommits[Tx]},
		{name: "race winner rolls back", levels: true, run: winnerRollsBack[Tx]},
		{name: "race winner fails", levels: true, run: winnerFails[Tx]},
		{name: "race for an expired key", levels: true, run: raceForExpired[Tx]},
		{name: "race crowd", levels: true, run: crowd[Tx]},
		{name: "in flight", levels: true, run: inFlight[Tx]},
		{name: "in flight is bounded as a whole", run: boundedAsAWhole[Tx]},
		{name: "bounds end before the handler", run: boundsEnd[Tx]},
		{name: "shuffled batches", levels: true, run: shuffledBatches[Tx]},
		{name: "ended context", run: endedContext[Tx]},
		{name: "ended context while waiting", run: endedWhileWaiting[Tx]},
	}
}

// await returns what an asynchronous Begin gave.
func (s *storeSuite[Tx]) await(c <-chan begun[Tx]) inbox.Batch[Tx] {
	s.Helper()
	select {
	case got := <-c:
		if got.err != nil {
			s.Fatalf("Begin: %v", got.err)
		}
		s.Cleanup(got.batch.Abort)
		return got.batch
	case <-s.ctx.Done():
		s.Fatal("Begin does not return")
	}
	return nil
}

// 11. Two claim one key at once. The second waits for the first; when that
// commits it is a Replay and sees the result. At every isolation level a
// serialization failure of the claim is the store's to solve.
//
// case D5
func winnerCommits[Tx any](s *storeSuite[Tx]) {
	winner := s.begin(claim("k1"))
	s.work(winner, 0, "k1", []byte("won"))
	loser := s.beginAsync(options(), claim("k0"), claim("k1"), claim("k2"))
	s.waiting(1)
	s.commit(winner)
	b := s.await(loser)
	s.want(b, 0, inbox.FirstAttempt)
	s.want(b, 1, inbox.Replay)
	s.want(b, 2, inbox.FirstAttempt)
	if r := b.Entries()[1].Stored; r != nil && string(r.Result) != "won" {
		s.Errorf("the loser sees the result %q", r.Result)
	}
	s.work(b, 0, "k0", nil)
	s.work(b, 2, "k2", nil)
	s.commit(b)
	for _, k := range []string{"k0", "k1", "k2"} {
		s.wantEffects(k, 1)
	}
}

// 12. When the first rolls back, the second gets the key.
//
// case D5
func winnerRollsBack[Tx any](s *storeSuite[Tx]) {
	winner := s.begin(claim("k1"))
	s.work(winner, 0, "k1", nil)
	loser := s.beginAsync(options(), claim("k1"))
	s.waiting(1)
	winner.Abort()
	b := s.await(loser)
	s.want(b, 0, inbox.FirstAttempt)
	s.work(b, 0, "k1", nil)
	s.commit(b)
	s.wantEffects("k1", 1)
}

// 13. A message of the first batch fails while its neighbours succeed: its
// claim is gone at Commit, and one who waits for it gets it.
func winnerFails[Tx any](s *storeSuite[Tx]) {
	winner := s.begin(claims("k1", "k2", "k3")...)
	s.work(winner, 0, "k1", nil)
	if _, err := winner.Start(s.ctx, 1); err != nil {
		s.Fatal(err)
	}
	if err := winner.Finish(s.ctx, 1, false, nil); err != nil {
		s.Fatalf("Finish(failed): %v", err)
	}
	// k3 is not reached.
	loser := s.beginAsync(options(), claims("k1", "k2", "k3")...)
	s.waiting(1)
	s.commit(winner)
	b := s.await(loser)
	s.want(b, 0, inbox.Replay)
	s.want(b, 1, inbox.FirstAttempt)
	s.want(b, 2, inbox.FirstAttempt)
	s.work(b, 1, "k2", nil)
	s.work(b, 2, "k3", nil)
	s.commit(b)
	for _, k := range []string{"k1", "k2", "k3"} {
		s.wantEffects(k, 1)
		s.wantRow(claim(k).Key, true)
	}
}

// 14. An expired key is claimed anew exactly once, however many try.
func raceForExpired[Tx any](s *storeSuite[Tx]) {
	brief := claim("k1")
	brief.Retention = time.Millisecond
	s.handle(brief, nil)
	s.pause(20 * time.Millisecond)
	s.race(20, 2)
}

// 15. A new key is claimed exactly once, however many try.
func crowd[Tx any](s *storeSuite[Tx]) { s.race(20, 1) }

// race has n batches claim k1 at once and wants effects of it in the end.
func (s *storeSuite[Tx]) race(n int, effects int64) {
	s.Helper()
	type result struct {
		outcome inbox.Outcome
		err     error
	}
	start, results := make(chan struct{}), make(chan result, n)
	for range n {
		go func() {
			<-start
			o, err := s.handleOnce(s.ctx, claim("k1"))
			results <- result{o, err}
		}()
	}
	close(start)
	count := map[inbox.Outcome]int{}
	for range n {
		r := <-results
		if r.err != nil {
			s.Errorf("one of %d claims: %v", n, r.err)
		}
		count[r.outcome]++
	}
	if count[inbox.FirstAttempt] != 1 || count[inbox.Replay] != n-1 {
		s.Errorf("outcomes %v, want 1 first attempt and %d replays", count, n-1)
	}
	s.wantEffects("k1", effects)
}

// handleOnce claims, works and commits, for goroutines. Contention is tried
// again as the loop does.
func (s *storeSuite[Tx]) handleOnce(ctx context.Context, cs ...inbox.Claim) (inbox.Outcome, error) {
	for {
		o, err := s.handleTry(ctx, cs...)
		if err == nil || errors.Is(err, inbox.ErrInFlight) || s.Store.Classify(err) != inbox.ClassContention {
			return o, err
		}
	}
}

func (s *storeSuite[Tx]) handleTry(ctx context.Context, cs ...inbox.Claim) (inbox.Outcome, error) {
	b, err := s.Store.Begin(ctx, cs, options())
	if err != nil {
		return "", fmt.Errorf("begin: %w", err)
	}
	defer b.Abort()
	for i, e := range b.Entries() {
		if !e.Claimed() {
			continue
		}
		if err := s.tryWork(ctx, b, i, cs[i].MessageKey, nil); err != nil {
			return "", err
		}
	}
	return b.Entries()[0].Outcome, b.Commit(ctx)
}

// 16. A key that stays held is ErrInFlight after LockTimeout. Then nothing is
// held, neither the other keys of the batch nor a connection.
//
// case D5
func inFlight[Tx any](s *storeSuite[Tx]) {
	holder := s.begin(claim("k2"))
	o := options()
	o.LockTimeout = 50 * time.Millisecond
	for range 12 {
		start := time.Now()
		b, err := s.Store.Begin(s.ctx, claims("k1", "k2", "k3"), o)
		if err == nil {
			b.Abort()
			s.Fatal("Begin got a key that another transaction holds")
		}
		if !errors.Is(err, inbox.ErrInFlight) {
			s.Fatalf("Begin: %v, want ErrInFlight", err)
		}
		if got := s.Store.Classify(err); got != inbox.ClassContention {
			s.Errorf("an error that wraps ErrInFlight is of class %d, want ClassContention", got)
		}
		if d := time.Since(start); d < o.LockTimeout/2 || d > 5*time.Second {
			s.Errorf("Begin gave up after %v, LockTimeout is %v", d, o.LockTimeout)
		}
	}
	if !s.h.OneWriter {
		other := s.beginWith(o, claims("k1", "k3")...)
		s.want(other, 0, inbox.FirstAttempt)
		s.want(other, 1, inbox.FirstAttempt)
		other.Abort()
	}
	s.work(holder, 0, "k2", nil)
	s.commit(holder)
	s.wantClaim(claim("k2"), inbox.Replay)
}

// 17. LockTimeout bounds the wait of a batch as a whole, not each key's: four
// holders that let go one after the other, each within it, do not add up.
func boundedAsAWhole[Tx any](s *storeSuite[Tx]) {
	if s.h.OneWriter {
		s.Skip("the database has one writer: there are no four holders")
	}
	const n, step = 5, 400 * time.Millisecond
	var keys []string
	var holders []inbox.Batch[Tx]
	for i := range n {
		keys = append(keys, fmt.Sprint("k", i))
		holders = append(holders, s.begin(claim(keys[i])))
	}
	o := options()
	o.LockTimeout = step * 3 / 2
	start := time.Now()
	waiter := s.beginAsync(o, claims(keys...)...)
	released := async(func() error {
		for _, h := range holders {
			s.pause(step)
			h.Abort()
		}
		return nil
	})
	got := <-waiter
	took := time.Since(start)
	<-released
	if got.err == nil {
		got.batch.Abort()
		s.Fatalf("Begin waited %v for one key after the other; LockTimeout is %v for all", took, o.LockTimeout)
	}
	if !errors.Is(got.err, inbox.ErrInFlight) {
		s.Errorf("Begin: %v, want ErrInFlight", got.err)
	}
}

// 18. LockTimeout does not bound the handlers' own statements.
func boundsEnd[Tx any](s *storeSuite[Tx]) {
	if s.h.OneWriter {
		s.Skip("the database has one writer: a handler never waits for a lock")
	}
	s.outside("create table accounts (id integer primary key, n integer)")
	s.outside("insert into accounts values (1, 0)")
	o := options()
	o.LockTimeout = time.Second // It bounds Begin, too, which is slow on a busy machine.
	b := s.beginWith(o, claims("k1", "k2")...)
	tx, err := b.Start(s.ctx, 0)
	if err != nil {
		s.Fatal(err)
	}
	locked, release := make(chan struct{}), make(chan struct{})
	owner := async(func() error {
		return s.Own(s.ctx, func(tx Tx) error {
			err := s.Exec(s.ctx, tx, "update accounts set n = n + 1 where id = 1")
			close(locked)
			<-release
			return err
		})
	})
	<-locked
	handler := async(func() error { return s.Exec(s.ctx, tx, "update accounts set n = n + 1 where id = 1") })
	s.waiting(1)
	s.pause(o.LockTimeout * 3 / 2)
	close(release)
	if err := <-owner; err != nil {
		s.Fatal(err)
	}
	if err := <-handler; err != nil {
		s.Fatalf("a handler's own wait was cut short: %v", err)
	}
	if err := b.Finish(s.ctx, 0, true, nil); err != nil {
		s.Fatal(err)
	}
	s.commit(b)
	if n := s.count("select n from accounts"); n != 2 {
		s.Errorf("accounts: %d, want 2", n)
	}
}

// 19. Batches over the same keys in shuffled orders do not deadlock on claims:
// whatever happens, each key's work is done once.
//
// case D6
func shuffledBatches[Tx any](s *storeSuite[Tx]) {
	const workers, rounds, perRound, size = 4, 15, 24, 8
	for round := range rounds {
		done := make(chan error, workers)
		for w := range workers {
			go func() { done <- s.shuffled(round, w, perRound, size) }()
		}
		for range workers {
			if err := <-done; err != nil {
				s.Errorf("round %d: %v", round, err)
			}
		}
	}
	if n := s.count("select count(*) from effects"); n != rounds*perRound {
		s.Errorf("%d effects, want %d", n, rounds*perRound)
	}
	if n := s.count("select count(distinct k) from effects"); n != rounds*perRound {
		s.Errorf("%d keys have effects, want %d", n, rounds*perRound)
	}
}

func (s *storeSuite[Tx]) shuffled(round, worker, keys, size int) error {
	r := rand.New(rand.NewPCG(uint64(round), uint64(worker))) //nolint:gosec // A seeded order that can be run again.
	order := r.Perm(keys)
	for len(order) > 0 {
		var cs []inbox.Claim
		for _, k := range order[:size] {
			cs = append(cs, claim(fmt.Sprintf("%d-%d", round, k)))
		}
		order = order[size:]
		if _, err := s.handleOnce(s.ctx, cs...); err != nil {
			return err
		}
	}
	return nil
}

// 20. A context that has ended makes Begin fail with its error and holds
// nothing; ended in a handler, the batch can be aborted and the key is free.
func endedContext[Tx any](s *storeSuite[Tx]) {
	ended, cancel := context.WithCancel(s.ctx)
	cancel()
	if b, err := s.Store.Begin(ended, claims("k1"), options()); err == nil {
		b.Abort()
		s.Error("Begin with an ended context succeeds")
	} else if !isContext(err) {
		s.Errorf("Begin with an ended context: %v", err)
	}
	b := s.begin(claim("k1"))
	ctx, cancel := context.WithCancel(s.ctx)
	tx, err := b.Start(ctx, 0)
	if err != nil {
		s.Fatal(err)
	}
	cancel()
	if err := s.Exec(ctx, tx, insertEffect("k1")); err == nil {
		s.Error("a statement with an ended context succeeds")
	}
	_ = b.Finish(ctx, 0, false, nil) // With an ended context it may or may not work.
	b.Abort()
	s.handle(claim("k1"), nil)
	s.wantEffects("k1", 1)
	// The same after a neighbour that has written: its work is not to be undone.
	b = s.begin(claims("k2", "k3")...)
	s.work(b, 0, "k2", nil)
	tx = s.start(b, 1)
	if err := s.Exec(ctx, tx, insertEffect("k3")); err == nil {
		s.Error("a statement with an ended context succeeds")
	}
	if err := b.Finish(s.ctx, 1, false, nil); err != nil {
		b.Abort() // Unusable is allowed, half undone is not.
	} else {
		s.commit(b)
	}
	if row, work := s.hasRow(claim("k2").Key), s.count("select count(*) from effects where k = 'k2'"); row != (work == 1) {
		s.Errorf("the neighbour has a row: %v, and %d effects", row, work)
	}
	s.wantRow(claim("k3").Key, false)
}

// 21. A context that ends while Begin waits for a key makes it return at once.
func endedWhileWaiting[Tx any](s *storeSuite[Tx]) {
	holder := s.begin(claim("k1"))
	ctx, cancel := context.WithCancel(s.ctx)
	defer cancel()
	waiter := async(func() error {
		b, err := s.Store.Begin(ctx, claims("k0", "k1"), options())
		if err == nil {
			b.Abort()
		}
		return err
	})
	s.waiting(1)
	cancel()
	select {
	case err := <-waiter:
		if !isContext(err) {
			s.Errorf("Begin: %v, want the context's error", err)
		}
	case <-time.After(lockTimeout / 2):
		s.Fatal("Begin goes on waiting when its context has ended")
	}
	s.work(holder, 0, "k1", nil)
	s.commit(holder)
	s.handle(claim("k0"), nil)
	s.wantClaim(claim("k1"), inbox.Replay)
}
