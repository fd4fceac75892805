package inboxtest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

func runRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "failed run", run: failedRun[Tx]},
		{name: "bulk run", run: bulkRun[Tx]},
		{name: "swallowed error", run: swallowedError[Tx]},
		{name: "failed statement reported", run: reportedError[Tx]},
		{name: "denied statement", run: deniedStatement[Tx]},
		{name: "dead tx", run: deadTx[Tx]},
		{name: "abort", run: abort[Tx]},
		{name: "abort under a handler", run: abortUnderHandler[Tx]},
		{name: "isolation of work", run: isolationOfWork[Tx]},
	}
}

// start begins a run and executes sql in it.
func (s *storeSuite[Tx]) start(b inbox.Batch[Tx], i int, sql ...string) Tx {
	s.Helper()
	tx, err := b.Start(s.ctx, i)
	if err != nil {
		s.Fatalf("Start(%d): %v", i, err)
	}
	for _, q := range sql {
		if err := s.Exec(s.ctx, tx, q); err != nil {
			s.Fatalf("%s: %v", q, err)
		}
	}
	return tx
}

// 22. A failed run loses what it wrote and its claim; its neighbours before and
// after keep theirs. A run that wrote nothing keeps its claim all the same.
func failedRun[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2", "k3", "k4", "k5")...)
	s.work(b, 0, "k1", []byte("1"))
	s.start(b, 1, insertEffect("k2"), insertEffect("k2"))
	if err := b.Finish(s.ctx, 1, false, []byte("not kept")); err != nil {
		s.Fatalf("Finish(failed): %v", err)
	}
	s.work(b, 2, "k3", nil)
	s.start(b, 3)
	if err := b.Finish(s.ctx, 3, true, []byte("4")); err != nil {
		s.Fatalf("Finish(ok) of a run without statements: %v", err)
	}
	s.start(b, 4)
	if err := b.Finish(s.ctx, 4, false, nil); err != nil {
		s.Fatalf("Finish(failed) of a run without statements: %v", err)
	}
	s.commit(b)
	for i, n := range []int64{1, 0, 1, 0, 0} {
		k := fmt.Sprint("k", i+1)
		s.wantEffects(k, n)
		s.wantRow(claim(k).Key, n == 1 || i == 3)
	}
	s.handle(claim("k2"), nil)
	s.wantEffects("k2", 1)
	single := s.begin(claim("single"))
	s.start(single, 0, insertEffect("single"))
	if err := single.Finish(s.ctx, 0, false, nil); err != nil {
		s.Fatalf("Finish(failed) of a single message: %v", err)
	}
	s.commit(single)
	s.wantEffects("single", 0)
	s.wantRow(claim("single").Key, false)
}

// 23. One run can stand for many entries: Finish with ok of entries that were
// not started keeps their claims and results.
func bulkRun[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2", "k3", "k4")...)
	s.start(b, 1, insertEffect("k2"), insertEffect("k3"), insertEffect("k4"))
	for i := 1; i < 4; i++ {
		if err := b.Finish(s.ctx, i, true, []byte(fmt.Sprint("r", i))); err != nil {
			s.Fatalf("Finish(%d): %v", i, err)
		}
	}
	s.commit(b)
	s.wantRow(claim("k1").Key, false)
	for i := 1; i < 4; i++ {
		key := claim(fmt.Sprint("k", i+1)).Key
		s.wantEffects(key.MessageKey, 1)
		if r := s.lookup(key); string(r.Result) != fmt.Sprint("r", i) {
			s.Errorf("result of %s: %q", key.MessageKey, r.Result)
		}
	}
}

// brokenSQL fails in every database.
const brokenSQL = "insert into no_such_table values (1)"

// 24. A handler that ignores a failed statement and reports success has failed:
// Finish wraps ErrSwallowed, the run is undone, the batch goes on.
//
// case D7
func swallowedError[Tx any](s *storeSuite[Tx]) {
	if !s.h.AbortsOnError {
		s.Skip("the database goes on after a failed statement")
	}
	for _, keys := range [][]string{{"alone"}, {"k1", "k2", "k3"}} {
		b := s.begin(claims(keys...)...)
		for i, k := range keys {
			if i != len(keys)/2 {
				s.work(b, i, k, nil)
				continue
			}
			tx := s.start(b, i, insertEffect(k))
			if err := s.Exec(s.ctx, tx, brokenSQL); err == nil {
				s.Fatal("a broken statement succeeds")
			}
			_ = s.Exec(s.ctx, tx, insertEffect(k)) // The handler goes on as if nothing had happened.
			err := b.Finish(s.ctx, i, true, []byte("result"))
			if !errors.Is(err, inbox.ErrSwallowed) {
				s.Fatalf("Finish: %v, want ErrSwallowed", err)
			}
			if got := s.Store.Classify(err); got != inbox.ClassMessage {
				s.Errorf("a swallowed error is of class %d, want ClassMessage", got)
			}
			var st *inbox.StatementError
			if s.h.NamesStatement && (!errors.As(err, &st) || st.SQL != brokenSQL) {
				s.Errorf("the error does not name the first failed statement: %v", err)
			}
		}
		s.commit(b)
		for i, k := range keys {
			failed := i == len(keys)/2
			s.wantEffects(k, map[bool]int64{true: 0, false: 1}[failed])
			s.wantRow(claim(k).Key, !failed)
		}
	}
}

// 25. A handler that reports its failed statement fails alone.
func reportedError[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2", "k3")...)
	s.work(b, 0, "k1", nil)
	tx := s.start(b, 1, insertEffect("k2"))
	err := s.Exec(s.ctx, tx, brokenSQL)
	if err == nil {
		s.Fatal("a broken statement succeeds")
	}
	if got := s.Store.Classify(fmt.Errorf("handler: %w", err)); got != inbox.ClassMessage {
		s.Errorf("an unknown table is of class %d, want ClassMessage", got)
	}
	if err := b.Finish(s.ctx, 1, false, nil); err != nil {
		s.Fatalf("Finish(failed): %v", err)
	}
	s.work(b, 2, "k3", nil)
	s.commit(b)
	for i, n := range []int64{1, 0, 1} {
		s.wantEffects(fmt.Sprint("k", i+1), n)
		s.wantRow(claim(fmt.Sprint("k", i+1)).Key, n == 1)
	}
}

// 25a. A store that sees the statements of handlers asks BeforeStatement before
// each of them, and of no other. One that is denied does not run, and the run has
// failed whatever it reports; its neighbours keep their work.
func deniedStatement[Tx any](s *storeSuite[Tx]) {
	no := errors.New("denied")
	var asked []string
	o := options()
	o.BeforeStatement = func(sql string) error {
		asked = append(asked, sql)
		if sql == insertEffect("k2") {
			return no
		}
		return nil
	}
	b := s.beginWith(o, claims("k1", "k2", "k3")...)
	s.work(b, 0, "k1", nil)
	if len(asked) == 0 {
		s.Skip("the store does not see statements")
	}
	tx := s.start(b, 1, insertEffect("k2 before"))
	if err := s.Exec(s.ctx, tx, insertEffect("k2")); !errors.Is(err, no) {
		s.Errorf("a denied statement: %v, want the error of BeforeStatement", err)
	}
	if err := b.Finish(s.ctx, 1, true, nil); !errors.Is(err, inbox.ErrSwallowed) || !errors.Is(err, no) {
		s.Fatalf("Finish: %v, want ErrSwallowed with the error of BeforeStatement", err)
	}
	s.work(b, 2, "k3", nil)
	s.commit(b)
	for k, n := range map[string]int64{"k1": 1, "k2": 0, "k2 before": 0, "k3": 1} {
		s.wantEffects(k, n)
	}
	s.wantRow(claim("k2").Key, false)
	want := []string{insertEffect("k1"), insertEffect("k2 before"), insertEffect("k2"), insertEffect("k3")}
	if !slices.Equal(slices.Compact(asked), want) { // Preparing asks as well.
		s.Errorf("asked before %q, want %q", asked, want)
	}
}

// 26. The Tx of a run is dead once Finish was called, also while other runs of
// the batch go on.
func deadTx[Tx any](s *storeSuite[Tx]) {
	if !s.h.DeadTx {
		s.Skip("the transaction type cannot be closed by its owner")
	}
	b := s.begin(claims("k1", "k2")...)
	var old []Tx
	try := func() {
		s.Helper()
		for _, tx := range old {
			if err := s.Exec(s.ctx, tx, insertEffect("ghost")); err == nil {
				s.Error("the Tx of an ended run takes a statement")
			}
		}
	}
	old = append(old, s.start(b, 0, insertEffect("k1")))
	if err := b.Finish(s.ctx, 0, true, nil); err != nil {
		s.Fatal(err)
	}
	try()
	tx := s.start(b, 1, insertEffect("k2"))
	try()
	if err := b.Finish(s.ctx, 1, true, nil); err != nil {
		s.Fatal(err)
	}
	old = append(old, tx)
	try()
	s.commit(b)
	try()
	s.wantEffects("ghost", 0)
	s.wantEffects("k1", 1)
	s.wantEffects("k2", 1)
}

// 27. Abort undoes everything, and does nothing after Commit or Abort.
func abort[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2")...)
	s.work(b, 0, "k1", nil)
	b.Abort()
	b.Abort()
	if err := b.Commit(s.ctx); err == nil {
		s.Error("Commit after Abort succeeds")
	}
	s.wantEffects("k1", 0)
	s.wantRow(claim("k1").Key, false)
	b = s.begin(claims("k1")...)
	s.work(b, 0, "k1", nil)
	s.commit(b)
	b.Abort()
	if err := b.Commit(s.ctx); err == nil {
		s.Error("a second Commit succeeds")
	}
	s.wantEffects("k1", 1)
	s.wantRow(claim("k1").Key, true)
}

// 28. Abort does not wait for a handler that runs. What the handler does then
// fails, its key is free, and the store has all its connections.
func abortUnderHandler[Tx any](s *storeSuite[Tx]) {
	n := 8
	if p, ok := s.Store.(inbox.PoolSizer); ok && p.PoolSize() > 0 {
		n = 2 * p.PoolSize()
	}
	var old []Tx
	for range n {
		b := s.begin(claims("k1", "k2")...)
		tx := s.start(b, 0, insertEffect("k1"))
		aborted := async(func() error { b.Abort(); return nil })
		select {
		case <-aborted:
		case <-time.After(15 * time.Second):
			s.Fatal("Abort waits for the handler")
		}
		old = append(old, tx)
	}
	for _, tx := range old {
		if err := s.Exec(s.ctx, tx, insertEffect("k1")); err == nil {
			s.Error("a handler can write after Abort")
		}
	}
	s.wantEffects("k1", 0)
	s.handle(claim("k1"), nil)
	s.wantEffects("k1", 1)
}

// 29. Work is seen by nobody before Commit, and by the batch's own later runs.
func isolationOfWork[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2")...)
	s.work(b, 0, "k1", nil)
	s.wantEffects("k1", 0)
	s.wantRow(claim("k1").Key, false)
	tx := s.start(b, 1)
	n, err := s.Count(s.ctx, tx, "select count(*) from effects where k = 'k1'")
	if err != nil || n != 1 {
		s.Errorf("a later run of the batch sees %d rows, %v; want 1", n, err)
	}
	if err := b.Finish(s.ctx, 1, true, nil); err != nil {
		s.Fatal(err)
	}
	s.commit(b)
	s.wantEffects("k1", 1)
}
