package inboxtest

import (
	"errors"
	"fmt"

	"github.com/ackafter/ackafter/inbox"
)

func endRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "handler ends the transaction alone", run: endsAlone[Tx]},
		{name: "handler ends the transaction in a batch", run: endsInBatch[Tx]},
		{name: "deferred constraint", run: deferredConstraint[Tx]},
		{name: "commit request lost", run: commitLost[Tx]},
		{name: "commit answer lost", run: commitAnswerLost[Tx]},
		{name: "connection killed", run: connectionKilled[Tx]},
		{name: "errors that are not the database's", run: foreignErrors[Tx]},
	}
}

// ending is what a store said about a handler that ended the transaction.
type ending int

const (
	// refused: the handler could not; the run failed, the batch goes on.
	refused ending = iota
	// ended: the batch is gone.
	ended
)

// end runs a handler that ends the transaction and reports what the store said.
// It is never success.
func (s *storeSuite[Tx]) end(b inbox.Batch[Tx], i int, key string, e Ending[Tx]) ending {
	s.Helper()
	tx := s.start(b, i, insertEffect(key))
	handler := e.Do(s.ctx, tx)
	err := b.Finish(s.ctx, i, handler == nil, []byte("result"))
	switch {
	case err == nil && handler == nil:
		s.Fatalf("%s: not noticed", e.Name)
	case err == nil:
		return refused // Reported by the handler itself, undone.
	case errors.Is(err, inbox.ErrSwallowed):
		return refused
	case !errors.Is(err, inbox.ErrTxEnded):
		s.Errorf("%s: Finish: %v, want ErrTxEnded or ErrSwallowed", e.Name, err)
	}
	if err := b.Commit(s.ctx); err == nil {
		s.Errorf("%s: Commit succeeds after ErrTxEnded", e.Name)
	}
	return ended
}

// 30. A handler that ends the transaction is never taken for a success. If its
// attempt was refused, it is a failed run and the batch goes on; otherwise
// Finish wraps ErrTxEnded.
//
// case D8
func endsAlone[Tx any](s *storeSuite[Tx]) {
	if len(s.Endings) == 0 {
		s.Skip("no endings")
	}
	for n, e := range s.Endings {
		key := fmt.Sprint("k", n)
		b := s.begin(claim(key))
		if s.end(b, 0, key, e) == refused {
			s.commit(b)
			s.wantRow(claim(key).Key, false)
			s.wantEffects(key, 0)
		}
		b.Abort()
	}
	s.handle(claim("next"), nil)
}

// 31. The same in a batch of three: whatever the second does, the claims of its
// neighbours are committed only together with their work.
//
// case D8
func endsInBatch[Tx any](s *storeSuite[Tx]) {
	if len(s.Endings) == 0 {
		s.Skip("no endings")
	}
	for n, e := range s.Endings {
		keys := []string{fmt.Sprint("a", n), fmt.Sprint("b", n), fmt.Sprint("c", n)}
		b := s.begin(claims(keys...)...)
		s.work(b, 0, keys[0], nil)
		if s.end(b, 1, keys[1], e) == refused {
			s.work(b, 2, keys[2], nil)
			s.commit(b)
			s.wantRow(claim(keys[1]).Key, false)
			s.wantEffects(keys[0], 1)
			s.wantEffects(keys[2], 1)
		}
		b.Abort()
		for _, i := range []int{0, 2} {
			row, work := s.hasRow(claim(keys[i]).Key), s.count("select count(*) from effects where k = '"+keys[i]+"'")
			if row != (work == 1) {
				s.Errorf("%s: neighbour %d has a row: %v, and %d effects", e.Name, i, row, work)
			}
		}
	}
	s.handle(claim("next"), nil)
}

// 32. A constraint that is checked at COMMIT and fails: ErrNotCommitted, and
// nothing of the batch is there.
func deferredConstraint[Tx any](s *storeSuite[Tx]) {
	s.outside("create table parent (id integer primary key)")
	s.outside("create table child (id integer references parent (id) deferrable initially deferred)")
	for _, keys := range [][]string{{"alone"}, {"k1", "k2"}} {
		b := s.begin(claims(keys...)...)
		for i, k := range keys {
			s.start(b, i, insertEffect(k), "insert into child values (1)")
			if err := b.Finish(s.ctx, i, true, nil); err != nil {
				s.Fatalf("Finish: %v", err)
			}
		}
		err := b.Commit(s.ctx)
		if !errors.Is(err, inbox.ErrNotCommitted) || errors.Is(err, inbox.ErrCommitUnknown) {
			s.Errorf("Commit: %v, want ErrNotCommitted", err)
		}
		for _, k := range keys {
			s.wantEffects(k, 0)
			s.wantRow(claim(k).Key, false)
		}
	}
	s.handle(claim("next"), nil)
}

// 33. The connection breaks before the database has COMMIT: ErrCommitUnknown,
// and a new claim says FirstAttempt.
//
// case D9
func commitLost[Tx any](s *storeSuite[Tx]) { s.cut(false) }

// 34. The connection breaks before the answer to COMMIT comes:
// ErrCommitUnknown, and a new claim says Replay.
//
// case D9
func commitAnswerLost[Tx any](s *storeSuite[Tx]) { s.cut(true) }

func (s *storeSuite[Tx]) cut(reached bool) {
	s.Helper()
	if s.CutCommit == nil {
		s.Skip("commits cannot be cut")
	}
	for _, keys := range [][]string{{"alone"}, {"k1", "k2", "k3"}} {
		store := s.CutCommit(s.TB, reached)
		b, err := store.Begin(s.ctx, claims(keys...), options())
		if err != nil {
			s.Fatal(err)
		}
		s.Cleanup(b.Abort)
		for i, k := range keys {
			s.work(b, i, k, []byte("result"))
		}
		err = b.Commit(s.ctx)
		if !errors.Is(err, inbox.ErrCommitUnknown) || errors.Is(err, inbox.ErrNotCommitted) {
			s.Fatalf("Commit: %v, want ErrCommitUnknown", err)
		}
		if got := store.Classify(err); got != inbox.ClassUnavailable {
			s.Errorf("a lost commit is of class %d, want ClassUnavailable", got)
		}
		for _, k := range keys {
			want := inbox.FirstAttempt
			if reached {
				want = inbox.Replay
			}
			b := s.begin(claim(k))
			s.want(b, 0, want)
			if !reached {
				s.work(b, 0, k, []byte("result"))
			}
			s.commit(b)
			s.wantEffects(k, 1)
		}
	}
}

// 35. A connection that breaks under a handler is the database's fault, leaves
// nothing behind, and the store goes on with another.
func connectionKilled[Tx any](s *storeSuite[Tx]) {
	if s.Kill == nil {
		s.Skip("connections cannot be killed")
	}
	for _, ok := range []bool{true, false} {
		b := s.begin(claims("k1", "k2")...)
		s.work(b, 0, "k1", nil)
		tx := s.start(b, 1, insertEffect("k2"))
		if err := s.Kill(s.ctx, tx); err != nil {
			s.Fatalf("Kill: %v", err)
		}
		handler := s.Exec(s.ctx, tx, insertEffect("k2"))
		if handler == nil {
			s.Fatal("a statement on a broken connection succeeds")
		}
		if got := s.Store.Classify(fmt.Errorf("handler: %w", handler)); got != inbox.ClassUnavailable {
			s.Errorf("a statement on a broken connection: %v: class %d, want ClassUnavailable", handler, got)
		}
		err := b.Finish(s.ctx, 1, ok, nil)
		if err == nil {
			s.Fatal("Finish on a broken connection succeeds")
		}
		if errors.Is(err, inbox.ErrSwallowed) || errors.Is(err, inbox.ErrTxEnded) {
			s.Errorf("Finish on a broken connection blames the handler: %v", err)
		}
		if got := s.Store.Classify(err); got != inbox.ClassUnavailable {
			s.Errorf("Finish on a broken connection: %v: class %d, want ClassUnavailable", err, got)
		}
		b.Abort()
	}
	s.handle(claim("k1"), nil)
	s.wantEffects("k1", 1)
	s.wantRow(claim("k2").Key, false)
}

// 36. Errors that did not come from the database are the message's.
func foreignErrors[Tx any](s *storeSuite[Tx]) {
	for _, err := range notTheDatabase() {
		if got := s.Store.Classify(err); got != inbox.ClassMessage {
			s.Errorf("Classify(%v) = %d, want ClassMessage", err, got)
		}
	}
}
