package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// fakeStore keeps an inbox in memory with the rules of Store, so that the loop
// can be tested in a synctest bubble and with faults at every point.
type fakeStore struct {
	// fault is asked before each step: "check", "begin", "start", "finish",
	// "commit" (nothing was committed), "committed" (everything was).
	fault func(op string, keys []string) error
	pool  int

	mu      sync.Mutex
	changed *sync.Cond
	rows    map[inbox.Key]*inbox.Record
	locked  map[inbox.Key]bool
	effects []string
	parked  []*inbox.ParkedRecord
	dups    int
	parkers
	begins   []int // sizes
	consumer map[string]string
}

// Errors of the fake database, by class.
var (
	errDown     = errors.New("fake: database down")
	errDeadlock = errors.New("fake: deadlock")
	errSQL      = errors.New("fake: division by zero")
)

func newFakeStore() *fakeStore {
	s := &fakeStore{rows: map[inbox.Key]*inbox.Record{}, locked: map[inbox.Key]bool{}, consumer: map[string]string{}}
	s.rowLocked, s.prints = map[int64]bool{}, map[string][]byte{}
	s.changed = sync.NewCond(&s.mu)
	return s
}

func (s *fakeStore) try(op string, keys ...string) error {
	if s.fault == nil {
		return nil
	}
	return s.fault(op, keys)
}

func (s *fakeStore) PoolSize() int { return s.pool }

func (s *fakeStore) Check(context.Context) error { return s.try("check") }

func (s *fakeStore) Register(_ context.Context, r inbox.Registration) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old, ok := s.consumer[r.Consumer]; ok && old != r.KeyDefinition && old != r.Replaces {
		return &inbox.KeyDefinitionError{Consumer: r.Consumer, Stored: old, Now: r.KeyDefinition}
	}
	s.consumer[r.Consumer] = r.KeyDefinition
	return nil
}

func (s *fakeStore) Classify(err error) inbox.Class {
	switch {
	case errors.Is(err, errDown):
		return inbox.ClassUnavailable
	case errors.Is(err, errDeadlock):
		return inbox.ClassContention
	}
	return inbox.ClassMessage
}

func (s *fakeStore) Lookup(_ context.Context, key inbox.Key) (*inbox.Record, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r := s.rows[key]; r != nil {
		return r, nil
	}
	return nil, inbox.ErrNotFound
}

func (s *fakeStore) Claim(context.Context, *fakeTx, string, string, ...inbox.ClaimOption) (inbox.Entry, error) {
	return inbox.Entry{}, errors.ErrUnsupported
}

func (s *fakeStore) SaveResult(context.Context, *fakeTx, string, string, []byte, ...inbox.ClaimOption) error {
	return errors.ErrUnsupported
}

func (s *fakeStore) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[*fakeTx], error) {
	b := &fakeBatch{store: s, claims: claims, finished: map[int][]byte{}, again: map[int]bool{}}
	for _, c := range claims {
		b.keys = append(b.keys, c.MessageKey)
	}
	if err := s.try("begin", b.keys...); err != nil {
		return nil, err
	}
	deadline := time.Now().Add(o.LockTimeout)
	stop := time.AfterFunc(o.LockTimeout, func() { s.mu.Lock(); s.changed.Broadcast(); s.mu.Unlock() })
	defer stop.Stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.begins = append(s.begins, len(claims))
	for _, c := range claims {
		for s.locked[c.Key] {
			if !time.Now().Before(deadline) || ctx.Err() != nil {
				b.release()
				return nil, fmt.Errorf("fake: %w", inbox.ErrInFlight)
			}
			s.changed.Wait()
		}
		s.prints[c.MessageKey] = c.Fingerprint
		e := s.entry(c, o)
		if c.Parked.ID != 0 {
			if row := s.leased(c.Parked); row == nil || s.rowLocked[row.ID] {
				e = inbox.Entry{Gone: true}
			} else {
				s.rowLocked[row.ID] = true
				b.rows = append(b.rows, row.ID)
			}
		}
		b.entries = append(b.entries, e)
		if e.Claimed() {
			s.locked[c.Key] = true
		}
	}
	for i := range b.entries {
		s.order(&b.entries[i], claims[i], o.Order, b.rows)
	}
	return b, nil
}

func (s *fakeStore) entry(c inbox.Claim, o inbox.BeginOptions) inbox.Entry {
	if r := s.rows[c.Key]; r != nil {
		e := inbox.Entry{Outcome: inbox.Replay, Stored: r}
		if string(r.Fingerprint) != string(c.Fingerprint) {
			e.Outcome = inbox.Conflict
		}
		return e
	}
	for _, p := range s.parked {
		if p.Key == c.Key && string(p.Fingerprint) == string(c.Fingerprint) && !o.IgnoreParked && p.ID != c.Parked.ID {
			s.dups++
			if p.State == inbox.ParkedRetry || p.State == inbox.ParkedWaiting {
				return inbox.Entry{Outcome: inbox.WasParked}
			}
			return inbox.Entry{Outcome: inbox.Dead}
		}
	}
	return inbox.Entry{Outcome: inbox.FirstAttempt}
}

type fakeBatch struct {
	store    *fakeStore
	claims   []inbox.Claim
	keys     []string
	entries  []inbox.Entry
	finished map[int][]byte
	effects  []string
	parked   []inbox.Parked
	again    map[int]bool // entries that were parked
	rows     []int64      // that are locked
	crashed  *atomic.Bool // of a process
	tx       *fakeTx
	ended    bool
}

// fakeTx is what handlers get.
type fakeTx struct {
	mu      sync.Mutex
	writes  []string
	failed  error
	over    bool
	dead    bool
	connErr error
}

func (tx *fakeTx) Write(effect string) error {
	tx.mu.Lock()
	defer tx.mu.Unlock()
	if tx.dead {
		return errors.New("fake: transaction is closed")
	}
	tx.writes = append(tx.writes, effect)
	return nil
}

// Fail is a statement that fails.
func (tx *fakeTx) Fail() error { tx.failed = errSQL; return errSQL }

// End is a COMMIT or ROLLBACK by the handler.
func (tx *fakeTx) End() { tx.over = true }

// Cut is a connection that goes away.
func (tx *fakeTx) Cut() error { tx.connErr = errDown; return errDown }

func (b *fakeBatch) Entries() []inbox.Entry { return b.entries }

func (b *fakeBatch) Start(_ context.Context, i int) (*fakeTx, error) {
	if err := b.store.try("start", b.keys[i]); err != nil {
		return nil, err
	}
	b.tx = &fakeTx{}
	return b.tx, nil
}

func (b *fakeBatch) Finish(ctx context.Context, i int, ok bool, result []byte) error {
	if b.tx == nil {
		b.finished[i] = result
		return nil
	}
	tx := b.tx
	b.tx = nil
	tx.mu.Lock()
	tx.dead = true
	tx.mu.Unlock()
	if err := b.store.try("finish", b.keys[i]); err != nil {
		return err
	}
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case tx.connErr != nil:
		return tx.connErr
	case tx.over:
		return fmt.Errorf("fake: %w", inbox.ErrTxEnded)
	case ok && tx.failed != nil:
		return fmt.Errorf("fake: %w: %w", inbox.ErrSwallowed, &inbox.StatementError{SQL: "select 1/0", Err: tx.failed})
	case ok:
		b.effects = append(b.effects, tx.writes...)
		b.finished[i] = result
	}
	return nil
}

func (b *fakeBatch) Park(_ context.Context, i int, p inbox.Parked) error {
	if err := b.store.try("park", p.MessageKey); err != nil {
		return err
	}
	if p.Lease.ID != 0 {
		b.store.mu.Lock()
		row := b.store.leased(p.Lease)
		b.store.mu.Unlock()
		if row == nil {
			return fmt.Errorf("fake: %w", inbox.ErrNotFound)
		}
	}
	b.again[i] = true
	b.parked = append(b.parked, p)
	return nil
}

func (b *fakeBatch) Commit(context.Context) error {
	s := b.store
	err := s.try("commit", b.keys...)
	if b.crashed != nil && b.crashed.Load() {
		err = fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, errDown)
	}
	if err != nil {
		b.Abort()
		return err
	}
	s.mu.Lock()
	for i, c := range b.claims {
		result, ok := b.finished[i]
		if e := b.entries[i]; c.Parked.ID != 0 && !b.again[i] && (ok || e.Outcome == inbox.Replay || e.Outcome == inbox.Conflict) {
			s.parked = slices.DeleteFunc(s.parked, func(r *inbox.ParkedRecord) bool { return r.Lease == c.Parked })
		}
		if !ok || !b.entries[i].Claimed() {
			continue
		}
		s.rows[c.Key] = &inbox.Record{Key: c.Key, Status: inbox.StatusDone, Fingerprint: c.Fingerprint, Result: result, Attempts: c.Attempt, ProcessedAt: time.Now()}
	}
	s.effects = append(s.effects, b.effects...)
	for _, p := range b.parked {
		s.park(p)
	}
	b.release()
	s.mu.Unlock()
	return s.try("committed", b.keys...)
}

func (b *fakeBatch) Abort() {
	if b.tx != nil {
		b.tx.mu.Lock()
		b.tx.dead = true
		b.tx.mu.Unlock()
	}
	b.store.mu.Lock()
	defer b.store.mu.Unlock()
	b.release()
}

func (b *fakeBatch) release() {
	if b.ended {
		return
	}
	b.ended = true
	for i, e := range b.entries {
		if e.Claimed() {
			delete(b.store.locked, b.claims[i].Key)
		}
	}
	for _, id := range b.rows {
		delete(b.store.rowLocked, id)
	}
	b.store.changed.Broadcast()
}

// state returns what was committed.
func (s *fakeStore) state() (effects []string, rows, parked int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.effects...), len(s.rows), len(s.parked)
}
