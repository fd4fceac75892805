package inboxtest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// StoreHarness tells RunStore how to get at a store and what its database can
// do.
type StoreHarness[Tx any] struct {
	// Open returns a store over tables of its own, migrated and empty, and
	// cleans up by tb.Cleanup. isolation is one of Isolations, or "" for the
	// store's default. It is called once for each rule, by several goroutines.
	// Required.
	Open func(tb testing.TB, isolation string) *StoreFixture[Tx]

	// Isolations are the isolation levels at which the rules about races are
	// run, by the names that Open knows. Nil: only the default.
	Isolations []string

	// OneWriter says that the database lets one writing transaction run at a
	// time (SQLite): a claim then waits for any other, whatever its keys.
	OneWriter bool

	// AbortsOnError says that a failed statement makes the database refuse the
	// rest of the transaction (PostgreSQL), so that a swallowed error can be
	// noticed.
	AbortsOnError bool

	// NamesStatement says that an error that wraps inbox.ErrSwallowed also
	// wraps an *inbox.StatementError with the text of the failed statement.
	NamesStatement bool

	// DeadTx says that the Tx of a run refuses everything once the run has
	// ended.
	DeadTx bool

	// Parking says that the store is an inbox.Parker, an inbox.Undertaker and an
	// inbox.Inspector: parked messages get later attempts. Then a store that is not
	// fails; without it the rules about that are skipped.
	Parking bool

	// Marking says that the store is an inbox.Marker. Then a store that is not fails;
	// without it the rules about that are skipped.
	Marking bool

	// Serial runs the rules one after the other instead of in parallel.
	Serial bool
}

// StoreFixture is one opened store and ways to look at its database. The SQL
// that RunStore hands in is plain, without arguments, and names no schema.
type StoreFixture[Tx any] struct {
	// Store is the store to be tested. Required.
	Store inbox.Store[Tx]

	// Exec runs a statement in tx as a handler would. Required.
	Exec func(ctx context.Context, tx Tx, sql string) error

	// Count runs a query for one integer in tx. Required.
	Count func(ctx context.Context, tx Tx, sql string) (int64, error)

	// Outside runs a statement that is committed at once, in a connection that
	// is none of the store's. Required.
	Outside func(ctx context.Context, sql string) error

	// OutsideCount runs a query for one integer, like Outside. Required.
	OutsideCount func(ctx context.Context, sql string) (int64, error)

	// Own runs fn in a transaction that is none of the store's, commits it when
	// fn returns nil and rolls it back otherwise. Required.
	Own func(ctx context.Context, fn func(tx Tx) error) error

	// Endings are ways for a handler to end the transaction. Nil: none are
	// tried.
	Endings []Ending[Tx]

	// Kill breaks the connection that tx runs on. Nil: it is not tried.
	Kill func(ctx context.Context, tx Tx) error

	// CutCommit returns a store over the same tables whose connection breaks
	// when it sends COMMIT: before the database has it, or (reached) after,
	// with the answer lost. Nil: it is not tried.
	CutCommit func(tb testing.TB, reached bool) inbox.Store[Tx]

	// Waiting returns how many sessions wait for a lock in this store's
	// tables. Nil: RunStore waits a short time where it would ask.
	Waiting func(ctx context.Context) (int64, error)
}

// Ending is a way in which a handler ends the transaction that belongs to the
// inbox.
type Ending[Tx any] struct {
	// Name of the subtest.
	Name string
	// Do is what the handler does; what it returns, the handler returns.
	Do func(ctx context.Context, tx Tx) error
}

// RunStore checks that a store keeps the rules of inbox.Store and inbox.Batch.
// A store's test is a constructor and one call of it. Every rule is a subtest.
func RunStore[Tx any](t *testing.T, h StoreHarness[Tx]) {
	t.Helper()
	if h.Open == nil {
		t.Fatal("inboxtest: StoreHarness.Open must not be nil")
	}
	for _, r := range storeRules[Tx]() {
		levels := []string{""}
		if r.levels && len(h.Isolations) > 0 {
			levels = h.Isolations
		}
		for _, level := range levels {
			name := r.name
			if level != "" {
				name += "/" + level
			}
			t.Run(name, func(t *testing.T) {
				if !h.Serial {
					t.Parallel()
				}
				r.try(t, &h, level)
			})
		}
	}
}

// storeRule is one rule of the contract.
type storeRule[Tx any] struct {
	name    string
	levels  bool // at every isolation level
	run     func(s *storeSuite[Tx])
	timeout time.Duration // 0: ruleTimeout
}

func storeRules[Tx any]() []storeRule[Tx] {
	var all []storeRule[Tx]
	all = append(all, claimRules[Tx]()...)
	all = append(all, raceRules[Tx]()...)
	all = append(all, runRules[Tx]()...)
	all = append(all, endRules[Tx]()...)
	all = append(all, parkRules[Tx]()...)
	all = append(all, feedRules[Tx]()...)
	all = append(all, fedRules[Tx]()...)
	all = append(all, laneRules[Tx]()...)
	all = append(all, feedRaceRules[Tx]()...)
	all = append(all, undertakeRules[Tx]()...)
	all = append(all, markerRules[Tx]()...)
	return append(all, ownerRules[Tx]()...)
}

func (r storeRule[Tx]) try(tb testing.TB, h *StoreHarness[Tx], level string) {
	tb.Helper()
	s := &storeSuite[Tx]{TB: tb, h: h, StoreFixture: h.Open(tb, level)}
	var cancel context.CancelFunc
	s.ctx, cancel = context.WithTimeout(tb.Context(), cmp.Or(r.timeout, ruleTimeout))
	tb.Cleanup(cancel)
	s.outside("create table effects (k text not null, note text not null)")
	r.run(s)
}

const (
	// ruleTimeout bounds one rule; nothing in it waits for long.
	ruleTimeout = 60 * time.Second
	// lockTimeout is what claims may wait in rules that are not about waiting.
	lockTimeout = 10 * time.Second
)

// storeSuite is one rule's view of one store.
type storeSuite[Tx any] struct {
	testing.TB
	*StoreFixture[Tx]
	h   *StoreHarness[Tx]
	ctx context.Context
}

// claim returns a claim of key with the fingerprint "fp".
func claim(key string) inbox.Claim {
	return inbox.Claim{
		Key:         inbox.Key{Consumer: "billing", MessageKey: key},
		Fingerprint: []byte("fp"),
		Attempt:     1,
		Retention:   time.Hour,
	}
}

func claims(keys ...string) []inbox.Claim {
	cs := make([]inbox.Claim, len(keys))
	for i, k := range keys {
		cs[i] = claim(k)
	}
	return cs
}

func options() inbox.BeginOptions {
	return inbox.BeginOptions{LockTimeout: lockTimeout, IdleTimeout: time.Minute}
}

// begin opens a batch that is aborted at the end of the rule.
func (s *storeSuite[Tx]) begin(cs ...inbox.Claim) inbox.Batch[Tx] {
	s.Helper()
	return s.beginWith(options(), cs...)
}

func (s *storeSuite[Tx]) beginWith(o inbox.BeginOptions, cs ...inbox.Claim) inbox.Batch[Tx] {
	s.Helper()
	b, err := s.Store.Begin(s.ctx, cs, o)
	if err != nil {
		s.Fatalf("Begin: %v", err)
	}
	s.Cleanup(b.Abort)
	if got := len(b.Entries()); got != len(cs) {
		s.Fatalf("Begin with %d claims has %d entries", len(cs), got)
	}
	return b
}

// work does a successful run for entry i: one row in effects under its key.
func (s *storeSuite[Tx]) work(b inbox.Batch[Tx], i int, key string, result []byte) {
	s.Helper()
	if err := s.tryWork(s.ctx, b, i, key, result); err != nil {
		s.Fatal(err)
	}
}

func (s *storeSuite[Tx]) tryWork(ctx context.Context, b inbox.Batch[Tx], i int, key string, result []byte) error {
	tx, err := b.Start(ctx, i)
	if err != nil {
		return fmt.Errorf("Start(%d): %w", i, err)
	}
	if err := s.Exec(ctx, tx, insertEffect(key)); err != nil {
		return fmt.Errorf("handler of %s: %w", key, err)
	}
	if err := b.Finish(ctx, i, true, result); err != nil {
		return fmt.Errorf("Finish(%d, ok): %w", i, err)
	}
	return nil
}

func insertEffect(key string) string {
	return "insert into effects (k, note) values ('" + key + "', 'work')"
}

func (s *storeSuite[Tx]) commit(b inbox.Batch[Tx]) {
	s.Helper()
	if err := b.Commit(s.ctx); err != nil {
		s.Fatalf("Commit: %v", err)
	}
}

// handle claims, works and commits.
func (s *storeSuite[Tx]) handle(c inbox.Claim, result []byte) {
	s.Helper()
	b := s.begin(c)
	s.want(b, 0, inbox.FirstAttempt)
	s.work(b, 0, c.MessageKey, result)
	s.commit(b)
}

// want checks the outcome of an entry.
func (s *storeSuite[Tx]) want(b inbox.Batch[Tx], i int, outcome inbox.Outcome) {
	s.Helper()
	e := b.Entries()[i]
	if e.Outcome != outcome {
		s.Errorf("entry %d: outcome %q, want %q", i, e.Outcome, outcome)
	}
	if hasRow := e.Outcome == inbox.Replay || e.Outcome == inbox.Conflict; hasRow != (e.Stored != nil) {
		s.Errorf("entry %d: outcome %q with Stored = %v", i, e.Outcome, e.Stored)
	}
}

// wantClaim begins, checks the outcome and gives everything up.
func (s *storeSuite[Tx]) wantClaim(c inbox.Claim, outcome inbox.Outcome) {
	s.Helper()
	b := s.begin(c)
	s.want(b, 0, outcome)
	b.Abort()
}

// wantEffects checks how many times the work for key was done.
func (s *storeSuite[Tx]) wantEffects(key string, n int64) {
	s.Helper()
	got := s.count("select count(*) from effects where k = '" + key + "'")
	if got != n {
		s.Errorf("effects of %s: %d, want %d", key, got, n)
	}
}

// wantRow checks whether the key has a row.
func (s *storeSuite[Tx]) wantRow(key inbox.Key, want bool) {
	s.Helper()
	if got := s.hasRow(key); got != want {
		s.Errorf("row of key %q: %v, want %v", short(key.MessageKey), got, want)
	}
}

func (s *storeSuite[Tx]) hasRow(key inbox.Key) bool {
	s.Helper()
	_, err := s.Store.Lookup(s.ctx, key)
	if err != nil && !errors.Is(err, inbox.ErrNotFound) {
		s.Fatalf("Lookup of %q: %v", short(key.MessageKey), err)
	}
	return err == nil
}

func (s *storeSuite[Tx]) lookup(key inbox.Key) *inbox.Record {
	s.Helper()
	r, err := s.Store.Lookup(s.ctx, key)
	if err != nil {
		s.Fatalf("Lookup of %q: %v", short(key.MessageKey), err)
	}
	return r
}

func (s *storeSuite[Tx]) outside(sql string) {
	s.Helper()
	if err := s.Outside(s.ctx, sql); err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
}

func (s *storeSuite[Tx]) count(sql string) int64 {
	s.Helper()
	n, err := s.OutsideCount(s.ctx, sql)
	if err != nil {
		s.Fatalf("%s: %v", sql, err)
	}
	return n
}

// async runs fn in a goroutine; the rule must receive from the channel.
func async[T any](fn func() T) <-chan T {
	c := make(chan T, 1)
	go func() { c <- fn() }()
	return c
}

// begun is what an asynchronous Begin returned.
type begun[Tx any] struct {
	batch inbox.Batch[Tx]
	err   error
}

func (s *storeSuite[Tx]) beginAsync(o inbox.BeginOptions, cs ...inbox.Claim) <-chan begun[Tx] {
	return async(func() begun[Tx] {
		b, err := s.Store.Begin(s.ctx, cs, o)
		return begun[Tx]{b, err}
	})
}

// waiting returns once n sessions wait for a lock, as far as that can be seen.
// What it returns for is right whenever it returns; that is why a short time
// will do where the database cannot be asked.
func (s *storeSuite[Tx]) waiting(n int64) {
	s.Helper()
	if s.Waiting == nil {
		s.pause(50 * time.Millisecond)
		return
	}
	for deadline := time.Now().Add(5 * time.Second); time.Now().Before(deadline); s.pause(2 * time.Millisecond) {
		got, err := s.Waiting(s.ctx)
		if err != nil {
			s.Fatalf("Waiting: %v", err)
		}
		if got >= n {
			return
		}
	}
	s.Errorf("no session came to wait for a lock")
}

// pause lets time pass where time is what the rule is about.
func (s *storeSuite[Tx]) pause(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-s.ctx.Done():
	}
}

// short keeps long keys out of failure texts.
func short(key string) string {
	if len(key) > 40 {
		return fmt.Sprintf("%s... (%d bytes)", key[:40], len(key))
	}
	return key
}
