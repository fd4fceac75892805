package inboxtest_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// recorder takes the failures of a rule instead of the test.
type recorder struct {
	testing.TB
	mu       sync.Mutex
	failures []string
	cleanups []func()
}

func (r *recorder) add(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, s)
}

func (r *recorder) Helper()                   {}
func (r *recorder) Error(args ...any)         { r.add(fmt.Sprint(args...)) }
func (r *recorder) Errorf(f string, a ...any) { r.add(fmt.Sprintf(f, a...)) }
func (r *recorder) Fatal(args ...any)         { r.Error(args...); runtime.Goexit() }
func (r *recorder) Fatalf(f string, a ...any) { r.Errorf(f, a...); runtime.Goexit() }
func (r *recorder) Skip(...any)               { runtime.Goexit() }
func (r *recorder) Cleanup(fn func())         { r.cleanups = append(r.cleanups, fn) }

// try runs a rule and returns its failures.
func (r *recorder) try(fn func()) []string {
	for _, f := range []func(){fn, func() {
		for len(r.cleanups) > 0 {
			last := r.cleanups[len(r.cleanups)-1]
			r.cleanups = r.cleanups[:len(r.cleanups)-1]
			last()
		}
	}} {
		done := make(chan struct{})
		go func() { defer close(done); f() }()
		<-done
	}
	return r.failures
}

type (
	store = inbox.Store[pgx.Tx]
	batch = inbox.Batch[pgx.Tx]
)

// mutantStore is a right store with one thing made wrong.
type mutantStore struct {
	store
	inbox.Inspector
	inbox.Parker
	inbox.Undertaker
	feed  feedMutant
	begin func(ctx context.Context, s store, cs []inbox.Claim, o inbox.BeginOptions) (batch, error)
	own   func(ctx context.Context, s store, tx pgx.Tx, consumer, key string, opts []inbox.ClaimOption) (inbox.Entry, error)
	save  func() error
	look  func(r *inbox.Record, err error) (*inbox.Record, error)
	check func(err error) error
	reg   func(err error) error
	class func(c inbox.Class) inbox.Class
}

// use makes s the right store that m is made of.
func (m *mutantStore) use(s store) {
	m.store, m.Inspector, m.Parker, m.Undertaker = s, s.(inbox.Inspector), s.(inbox.Parker), s.(inbox.Undertaker)
}

func (m *mutantStore) Begin(ctx context.Context, cs []inbox.Claim, o inbox.BeginOptions) (batch, error) {
	if m.begin == nil {
		return m.store.Begin(ctx, cs, o)
	}
	return m.begin(ctx, m.store, cs, o)
}

func (m *mutantStore) Claim(ctx context.Context, tx pgx.Tx, consumer, key string, opts ...inbox.ClaimOption) (inbox.Entry, error) {
	if m.own == nil {
		return m.store.Claim(ctx, tx, consumer, key, opts...)
	}
	return m.own(ctx, m.store, tx, consumer, key, opts)
}

func (m *mutantStore) SaveResult(ctx context.Context, tx pgx.Tx, consumer, key string, result []byte, opts ...inbox.ClaimOption) error {
	if m.save == nil {
		return m.store.SaveResult(ctx, tx, consumer, key, result, opts...)
	}
	return m.save()
}

func (m *mutantStore) Lookup(ctx context.Context, key inbox.Key) (*inbox.Record, error) {
	r, err := m.store.Lookup(ctx, key)
	if m.look == nil {
		return r, err
	}
	return m.look(r, err)
}

func (m *mutantStore) Check(ctx context.Context) error {
	err := m.store.Check(ctx)
	if m.check == nil {
		return err
	}
	return m.check(err)
}

func (m *mutantStore) Register(ctx context.Context, r inbox.Registration) error {
	err := m.store.Register(ctx, r)
	if m.reg == nil {
		return err
	}
	return m.reg(err)
}

func (m *mutantStore) Classify(err error) inbox.Class {
	c := m.store.Classify(err)
	if m.class == nil {
		return c
	}
	return m.class(c)
}

// mutantBatch is a right batch with one thing made wrong.
type mutantBatch struct {
	batch
	entries func(es []inbox.Entry) []inbox.Entry
	start   func(ctx context.Context, b batch, i int) (pgx.Tx, error)
	finish  func(ctx context.Context, b batch, i int, ok bool, result []byte) error
	park    func(ctx context.Context, b batch, i int, p inbox.Parked) error
	commit  func(ctx context.Context, b batch) error
	abort   func(b batch)
}

func (m *mutantBatch) Entries() []inbox.Entry {
	if m.entries == nil {
		return m.batch.Entries()
	}
	return m.entries(append([]inbox.Entry(nil), m.batch.Entries()...))
}

func (m *mutantBatch) Start(ctx context.Context, i int) (pgx.Tx, error) {
	if m.start == nil {
		return m.batch.Start(ctx, i)
	}
	return m.start(ctx, m.batch, i)
}

func (m *mutantBatch) Finish(ctx context.Context, i int, ok bool, result []byte) error {
	if m.finish == nil {
		return m.batch.Finish(ctx, i, ok, result)
	}
	return m.finish(ctx, m.batch, i, ok, result)
}

func (m *mutantBatch) Park(ctx context.Context, i int, p inbox.Parked) error {
	if m.park == nil {
		return m.batch.Park(ctx, i, p)
	}
	return m.park(ctx, m.batch, i, p)
}

func (m *mutantBatch) Commit(ctx context.Context) error {
	if m.commit == nil {
		return m.batch.Commit(ctx)
	}
	return m.commit(ctx, m.batch)
}

func (m *mutantBatch) Abort() {
	if m.abort == nil {
		m.batch.Abort()
		return
	}
	m.abort(m.batch)
}

// asks makes a store that asks its database for something else.
func asks(change func(cs []inbox.Claim, o *inbox.BeginOptions)) mutantStore {
	return mutantStore{begin: func(ctx context.Context, s store, cs []inbox.Claim, o inbox.BeginOptions) (batch, error) {
		cs = append([]inbox.Claim(nil), cs...)
		change(cs, &o)
		return s.Begin(ctx, cs, o)
	}}
}

// claimsDo is asks for each claim.
func claimsDo(change func(c *inbox.Claim)) mutantStore {
	return asks(func(cs []inbox.Claim, _ *inbox.BeginOptions) {
		for i := range cs {
			change(&cs[i])
		}
	})
}

// with makes a store whose batches are wrong.
func with(m mutantBatch) mutantStore {
	return mutantStore{begin: func(ctx context.Context, s store, cs []inbox.Claim, o inbox.BeginOptions) (batch, error) {
		b, err := s.Begin(ctx, cs, o)
		if err != nil {
			return nil, err
		}
		wrong := m
		wrong.batch = b
		return &wrong, nil
	}}
}

// says makes batches that answer with another outcome.
func says(from, to inbox.Outcome) mutantStore {
	return with(mutantBatch{entries: func(es []inbox.Entry) []inbox.Entry {
		for i := range es {
			if es[i].Outcome == from {
				es[i].Outcome = to
			}
		}
		return es
	}})
}

// hides makes Finish or Commit keep quiet about an error, or say another.
func hides(target, instead error) mutantStore {
	change := func(err error) error {
		if errors.Is(err, target) {
			return instead
		}
		return err
	}
	return with(mutantBatch{
		finish: func(ctx context.Context, b batch, i int, ok bool, result []byte) error {
			return change(b.Finish(ctx, i, ok, result))
		},
		commit: func(ctx context.Context, b batch) error { return change(b.Commit(ctx)) },
	})
}

// inRun makes batches that do something in the transaction before each run.
func inRun(sql string) mutantStore {
	return with(mutantBatch{start: func(ctx context.Context, b batch, i int) (pgx.Tx, error) {
		tx, err := b.Start(ctx, i)
		if err == nil {
			_, err = tx.Exec(ctx, sql)
		}
		return tx, err
	}})
}

// mutant is a store with one thing wrong and the rules that must notice.
type mutant struct {
	store mutantStore
	rules []string
}

// mutants are stores that claim and run wrongly.
func mutants() map[string]mutant {
	type m = mutant
	return map[string]m{
		"commits nothing": {with(mutantBatch{commit: func(_ context.Context, b batch) error { b.Abort(); return nil }}),
			[]string{"first claim", "results", "park under the claim"}},
		"commits without neighbours' claims kept back": {with(mutantBatch{commit: func(ctx context.Context, b batch) error {
			for i, e := range b.Entries() {
				if e.Claimed() {
					_ = b.Finish(ctx, i, true, nil)
				}
			}
			return b.Commit(ctx)
		}}), []string{"scopes", "failed run", "bulk run", "race winner fails", "handler ends the transaction in a batch"}},
		"runs replays":               {says(inbox.Replay, inbox.FirstAttempt), []string{"replay and conflict", "entries in order", "race winner commits"}},
		"runs parked messages":       {says(inbox.Dead, inbox.FirstAttempt), []string{"duplicates of parked messages", "twin of a message being parked"}},
		"takes conflicts as replays": {says(inbox.Conflict, inbox.Replay), []string{"replay and conflict", "entries in order"}},
		"forgets why":                {says(inbox.WasParked, inbox.Dead), []string{"duplicates of parked messages"}},
		"mixes entries up": {with(mutantBatch{entries: func(es []inbox.Entry) []inbox.Entry {
			for i, j := 0, len(es)-1; i < j; i, j = i+1, j-1 {
				es[i], es[j] = es[j], es[i]
			}
			return es
		}}), []string{"entries in order", "large batch"}},
		"one tenant for all":   {claimsDo(func(c *inbox.Claim) { c.Tenant = "" }), []string{"scopes"}},
		"one consumer for all": {claimsDo(func(c *inbox.Claim) { c.Consumer = "billing" }), []string{"scopes", "lookup and find"}},
		"case does not matter": {claimsDo(func(c *inbox.Claim) { c.MessageKey = strings.ToLower(c.MessageKey) }), []string{"scopes"}},
		"cuts long keys": {claimsDo(func(c *inbox.Claim) {
			c.MessageKey = c.MessageKey[:min(len(c.MessageKey), 512)]
		}), []string{"long keys"}},
		"no fingerprint":    {claimsDo(func(c *inbox.Claim) { c.Fingerprint = nil }), []string{"replay and conflict", "first claim"}},
		"keeps for ever":    {claimsDo(func(c *inbox.Claim) { c.Retention = 0 }), []string{"retention", "race for an expired key", "first claim"}},
		"keeps for an hour": {claimsDo(func(c *inbox.Claim) { c.Retention = time.Hour }), []string{"retention"}},
		"waits too long":    {asks(func(_ []inbox.Claim, o *inbox.BeginOptions) { o.LockTimeout *= 20 }), []string{"in flight is bounded as a whole"}},
		"never waits":       {asks(func(_ []inbox.Claim, o *inbox.BeginOptions) { o.LockTimeout = time.Millisecond }), []string{"race winner commits", "race winner rolls back"}},
		"always runs parked messages": {asks(func(_ []inbox.Claim, o *inbox.BeginOptions) { o.IgnoreParked = true }),
			[]string{"duplicates of parked messages", "park a conflict"}},
		"never runs parked messages": {asks(func(_ []inbox.Claim, o *inbox.BeginOptions) { o.IgnoreParked = false }), []string{"parked messages run on request"}},
		"bounds the handler":         {inRun("set local lock_timeout = '100ms'"), []string{"bounds end before the handler"}},
		"no guard":                   {inRun("delete from inbox_guard"), []string{"handler ends the transaction in a batch"}},
		"keeps what failed": {with(mutantBatch{finish: func(ctx context.Context, b batch, i int, _ bool, result []byte) error {
			return b.Finish(ctx, i, true, result)
		}}), []string{"failed run", "park under the claim", "race winner fails"}},
		"loses results": {with(mutantBatch{finish: func(ctx context.Context, b batch, i int, ok bool, _ []byte) error {
			return b.Finish(ctx, i, ok, nil)
		}}), []string{"first claim", "results", "bulk run"}},
		"nil is empty": {with(mutantBatch{finish: func(ctx context.Context, b batch, i int, ok bool, result []byte) error {
			return b.Finish(ctx, i, ok, append([]byte{}, result...))
		}}), []string{"results"}},
		"swallows":                 {hides(inbox.ErrSwallowed, nil), []string{"swallowed error", "handler ends the transaction alone"}},
		"does not notice the end":  {hides(inbox.ErrTxEnded, nil), []string{"handler ends the transaction alone", "handler ends the transaction in a batch"}},
		"blames nobody":            {hides(inbox.ErrTxEnded, errors.New("x")), []string{"handler ends the transaction alone"}},
		"unknown is done":          {hides(inbox.ErrCommitUnknown, nil), []string{"commit request lost", "commit answer lost"}},
		"unknown is not committed": {hides(inbox.ErrCommitUnknown, inbox.ErrNotCommitted), []string{"commit answer lost"}},
		"not committed is unknown": {hides(inbox.ErrNotCommitted, inbox.ErrCommitUnknown), []string{"deferred constraint"}},
		"not committed is done":    {hides(inbox.ErrNotCommitted, nil), []string{"deferred constraint"}},
		"asks for its own statements": {asks(func(_ []inbox.Claim, o *inbox.BeginOptions) {
			if before := o.BeforeStatement; before != nil {
				o.BeforeStatement = func(sql string) error { _ = before("release savepoint x"); return before(sql) }
			}
		}), []string{"denied statement"}},
		"lets denied statements through": {asks(func(_ []inbox.Claim, o *inbox.BeginOptions) {
			if before := o.BeforeStatement; before != nil {
				o.BeforeStatement = func(sql string) error { _ = before(sql); return nil }
			}
		}), []string{"denied statement"}},
		"does not park": {with(mutantBatch{park: func(context.Context, batch, int, inbox.Parked) error { return nil }}),
			[]string{"park under the claim", "park keeps everything"}},
		"parks and keeps the claim": {with(mutantBatch{park: func(ctx context.Context, b batch, i int, p inbox.Parked) error {
			err := b.Park(ctx, i, p)
			if i >= 0 {
				_ = b.Finish(ctx, i, true, nil)
			}
			return err
		}}), []string{"park under the claim", "twin of a message being parked"}},
		"parks half": {with(mutantBatch{park: func(ctx context.Context, b batch, i int, p inbox.Parked) error {
			p.Lane, p.Attempts = "", 0
			return b.Park(ctx, i, p)
		}}), []string{"park keeps everything"}},
		"Abort commits": {with(mutantBatch{abort: func(b batch) {
			for i, e := range b.Entries() {
				if e.Claimed() {
					_ = b.Finish(context.Background(), i, true, nil)
				}
			}
			_ = b.Commit(context.Background())
		}}), []string{"abort"}},
		"claims apart from the owner": {mutantStore{own: func(ctx context.Context, s store, _ pgx.Tx, consumer, key string, opts []inbox.ClaimOption) (inbox.Entry, error) {
			c, err := inbox.NewClaim(consumer, key, opts...)
			if err != nil {
				return inbox.Entry{}, err
			}
			b, err := s.Begin(ctx, []inbox.Claim{c}, inbox.BeginOptions{LockTimeout: time.Second})
			if err != nil {
				return inbox.Entry{}, err
			}
			e := b.Entries()[0]
			if e.Claimed() {
				err = b.Finish(ctx, 0, true, nil)
			}
			return e, errors.Join(err, b.Commit(ctx))
		}}, []string{"claim in an own transaction"}},
		"claims anything": {mutantStore{own: func(context.Context, store, pgx.Tx, string, string, []inbox.ClaimOption) (inbox.Entry, error) {
			return inbox.Entry{Outcome: inbox.FirstAttempt}, nil
		}}, []string{"claim in an own transaction", "claim in an own transaction: invalid input", "claim in an own transaction: race"}},
		"saves nothing":        {mutantStore{save: func() error { return nil }}, []string{"save result"}},
		"finds nothing":        {mutantStore{look: func(*inbox.Record, error) (*inbox.Record, error) { return nil, inbox.ErrNotFound }}, []string{"first claim", "lookup and find"}},
		"absence is no error":  {mutantStore{look: func(r *inbox.Record, _ error) (*inbox.Record, error) { return r, nil }}, []string{"lookup and find"}},
		"checks nothing":       {mutantStore{check: func(error) error { return nil }}, []string{"check", "check without tables"}},
		"never content":        {mutantStore{check: func(error) error { return inbox.ErrNoSchema }}, []string{"check"}},
		"registers anything":   {mutantStore{reg: func(error) error { return nil }}, []string{"register"}},
		"blames the message":   {mutantStore{class: func(inbox.Class) inbox.Class { return inbox.ClassMessage }}, []string{"in flight", "connection killed"}},
		"blames the database":  {mutantStore{class: func(inbox.Class) inbox.Class { return inbox.ClassUnavailable }}, []string{"errors that are not the database's", "failed statement reported"}},
		"blames other traffic": {mutantStore{class: func(inbox.Class) inbox.Class { return inbox.ClassContention }}, []string{"connection killed", "errors that are not the database's"}},
	}
}

// The suite notices stores that break its rules. (That a right store passes is
// what the stores' own tests show.)
func TestRunStoreNoticesMutants(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, pgtest.Postgres)
	all := mutants()
	maps.Copy(all, feedMutants())
	for name, m := range all {
		for _, rule := range m.rules {
			t.Run(name+"/"+rule, func(t *testing.T) {
				t.Parallel()
				h := pgxharness.Harness(func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config)) { return pgtest.Schema(tb, url), nil })
				right := h.Open
				h.Open = func(tb testing.TB, isolation string) *inboxtest.StoreFixture[pgx.Tx] {
					f := right(tb, isolation)
					wrong := m.store
					wrong.use(f.Store)
					f.Store = &wrong
					cut := f.CutCommit
					f.CutCommit = func(tb testing.TB, reached bool) inbox.Store[pgx.Tx] {
						wrong := m.store
						wrong.use(cut(tb, reached))
						return &wrong
					}
					return f
				}
				r := &recorder{TB: t}
				known := false
				failures := r.try(func() {
					known = true
					known = inboxtest.TryRule(r, &h, rule, 10*time.Second)
				})
				switch {
				case !known:
					t.Fatal("there is no such rule")
				case len(failures) == 0:
					t.Error("the rule holds all the same")
				}
				t.Logf("%q", failures)
			})
		}
	}
}
