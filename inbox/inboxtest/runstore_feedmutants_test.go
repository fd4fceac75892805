package inboxtest_test

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// feedMutant is what a mutantStore does wrongly with parked messages.
type feedMutant struct {
	lease   func(ctx context.Context, p inbox.Parker, r inbox.LeaseRequest) (inbox.Leased, error)
	release func(ctx context.Context, p inbox.Parker, leases []inbox.Lease) error
	purge   func(ctx context.Context, p inbox.Parker, age time.Duration, blocked bool, limit int) (int, error)
	retry   func(ctx context.Context, u inbox.Undertaker, ids []int64) (int, error)
	discard func(ctx context.Context, u inbox.Undertaker, ids []int64, note string) (int, error)
	group   func(gs []inbox.ParkedGroup) []inbox.ParkedGroup
	list    func(f *inbox.ParkedFilter)
}

func (m *mutantStore) Lease(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	if m.feed.lease == nil {
		return m.Parker.Lease(ctx, r)
	}
	return m.feed.lease(ctx, m.Parker, r)
}

func (m *mutantStore) Release(ctx context.Context, leases []inbox.Lease) error {
	if m.feed.release == nil {
		return m.Parker.Release(ctx, leases)
	}
	return m.feed.release(ctx, m.Parker, leases)
}

func (m *mutantStore) PurgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	if m.feed.purge == nil {
		return m.Parker.PurgeDead(ctx, consumer, age, blocked, limit)
	}
	return m.feed.purge(ctx, m.Parker, age, blocked, limit)
}

func (m *mutantStore) RetryParked(ctx context.Context, ids []int64) (int, error) {
	if m.feed.retry == nil {
		return m.Undertaker.RetryParked(ctx, ids)
	}
	return m.feed.retry(ctx, m.Undertaker, ids)
}

func (m *mutantStore) DiscardParked(ctx context.Context, ids []int64, note string) (int, error) {
	if m.feed.discard == nil {
		return m.Undertaker.DiscardParked(ctx, ids, note)
	}
	return m.feed.discard(ctx, m.Undertaker, ids, note)
}

func (m *mutantStore) GroupParked(ctx context.Context, f inbox.ParkedFilter) ([]inbox.ParkedGroup, error) {
	if m.feed.list != nil {
		m.feed.list(&f)
	}
	gs, err := m.Undertaker.GroupParked(ctx, f)
	if m.feed.group != nil {
		gs = m.feed.group(gs)
	}
	return gs, err
}

func (m *mutantStore) ListParked(ctx context.Context, f inbox.ParkedFilter) ([]inbox.ParkedRecord, error) {
	if m.feed.list != nil {
		m.feed.list(&f)
	}
	return m.Inspector.ListParked(ctx, f)
}

// requests makes a store that leases something else than it is asked for.
func requests(change func(r *inbox.LeaseRequest)) mutantStore {
	return mutantStore{feed: feedMutant{lease: func(ctx context.Context, p inbox.Parker, r inbox.LeaseRequest) (inbox.Leased, error) {
		change(&r)
		return p.Lease(ctx, r)
	}}}
}

// leases makes a store that says something else about what it has leased.
func leases(change func(l *inbox.Leased)) mutantStore {
	return mutantStore{feed: feedMutant{lease: func(ctx context.Context, p inbox.Parker, r inbox.LeaseRequest) (inbox.Leased, error) {
		l, err := p.Lease(ctx, r)
		change(&l)
		return l, err
	}}}
}

// entriesDo makes batches whose entries are changed.
func entriesDo(change func(e *inbox.Entry)) mutantStore {
	return with(mutantBatch{entries: func(es []inbox.Entry) []inbox.Entry {
		for i := range es {
			change(&es[i])
		}
		return es
	}})
}

// orders makes a store that begins with another order.
func orders(change func(o *inbox.Order)) mutantStore {
	return asks(func(_ []inbox.Claim, o *inbox.BeginOptions) { change(&o.Order) })
}

// parks makes batches that park something else.
func parks(change func(p *inbox.Parked)) mutantStore {
	return with(mutantBatch{park: func(ctx context.Context, b batch, i int, p inbox.Parked) error {
		change(&p)
		return b.Park(ctx, i, p)
	}})
}

func lists(change func(f *inbox.ParkedFilter)) mutantStore {
	return mutantStore{feed: feedMutant{list: change}}
}

// greedy leases everything and gives back what is not of the lowest lanes.
func greedy(ctx context.Context, p inbox.Parker, r inbox.LeaseRequest) (inbox.Leased, error) {
	limit := r.Limit
	r.Limit = 1000
	l, err := p.Lease(ctx, r)
	slices.SortFunc(l.Rows, func(a, b inbox.ParkedRecord) int { return cmp.Or(cmp.Compare(a.Lane, b.Lane), cmp.Compare(a.ID, b.ID)) })
	var back []inbox.Lease
	for len(l.Rows) > limit {
		last := len(l.Rows) - 1
		back, l.Rows = append(back, l.Rows[last].Lease), l.Rows[:last]
	}
	return l, errors.Join(err, p.Release(ctx, back))
}

// feedMutants are stores that feed messages back wrongly, keep no order, or do not
// do what a person wants.
func feedMutants() map[string]mutant {
	all := map[string]mutant{
		"leases to everybody": {mutantStore{feed: feedMutant{lease: func(ctx context.Context, p inbox.Parker, r inbox.LeaseRequest) (inbox.Leased, error) {
			l, err := p.Lease(ctx, r)
			for _, row := range l.Rows {
				err = errors.Join(err, p.Release(ctx, []inbox.Lease{row.Lease}))
			}
			return l, err
		}}}, []string{"lease excludes others", "fed message succeeds", "fed message fails"}},
		"leases to nobody":      {leases(func(l *inbox.Leased) { l.Rows = nil }), []string{"parked messages come when they are due", "many lease at once"}},
		"leases without limit":  {requests(func(r *inbox.LeaseRequest) { r.Limit = 1000 }), []string{"lease limit and consumer", "lane in order"}},
		"leases for billing":    {requests(func(r *inbox.LeaseRequest) { r.Consumer = "billing" }), []string{"lease limit and consumer"}},
		"leases for long":       {requests(func(r *inbox.LeaseRequest) { r.For = time.Hour }), []string{"lease runs out", "lease excludes others"}},
		"feeds without order":   {requests(func(r *inbox.LeaseRequest) { r.Order.Keep = false }), []string{"lane in order", "lane blocked while it is fed", "fed message that somebody has locked"}},
		"feeds in order always": {requests(func(r *inbox.LeaseRequest) { r.Order.Keep = true }), []string{"lane without order"}},
		"feeds past the dead":   {requests(func(r *inbox.LeaseRequest) { r.Order.BlockedByDead = false }), []string{"lane in order", "lane blocked while it is fed"}},
		"feeds the lowest lane": {mutantStore{feed: feedMutant{lease: greedy}}, []string{"many lanes"}},
		"feeds backwards":       {leases(func(l *inbox.Leased) { slices.Reverse(l.Rows) }), []string{"lane in order", "many lease at once"}},
		"feeds without bodies": {leases(func(l *inbox.Leased) {
			for i := range l.Rows {
				l.Rows[i].Message.Body = nil
			}
		}), []string{"parked messages come when they are due"}},
		"does not know the next": {leases(func(l *inbox.Leased) { l.Next = -1 }), []string{"parked messages come when they are due", "lease limit and consumer", "lane in order"}},
		"always says next":       {leases(func(l *inbox.Leased) { l.Next = 0 }), []string{"parked messages come when they are due", "lease excludes others"}},
		"releases nothing": {mutantStore{feed: feedMutant{release: func(context.Context, inbox.Parker, []inbox.Lease) error { return nil }}},
			[]string{"lease released", "live message while its lane is freed"}},
		"releases at Commit": {mutantStore{begin: func(ctx context.Context, s store, cs []inbox.Claim, o inbox.BeginOptions) (batch, error) {
			b, err := s.Begin(ctx, cs, o)
			if err != nil {
				return nil, err
			}
			return &mutantBatch{batch: b, commit: func(ctx context.Context, b batch) error {
				err := b.Commit(ctx)
				for _, c := range cs {
					err = errors.Join(err, s.(inbox.Parker).Release(ctx, []inbox.Lease{c.Parked}))
				}
				return err
			}}, nil
		}}, []string{"fed message fails"}},

		"does not know leases": {claimsDo(func(c *inbox.Claim) { c.Parked = inbox.Lease{} }), []string{
			"fed message succeeds", "fed message done meanwhile", "duplicate while its message is fed", "fed message parked without a claim",
		}},
		"takes leases as a wish": {asks(func(cs []inbox.Claim, o *inbox.BeginOptions) {
			for i := range cs {
				o.IgnoreParked = o.IgnoreParked || cs[i].Parked.ID != 0
				cs[i].Parked = inbox.Lease{}
			}
		}), []string{"fed message done meanwhile", "fed message gone", "lease runs out", "fed message and a run on request"}},
		"nothing is gone": {entriesDo(func(e *inbox.Entry) {
			if e.Gone {
				*e = inbox.Entry{Outcome: inbox.FirstAttempt}
			}
		}), []string{"lease runs out", "lease released", "fed message gone", "fed message parked again", "fed message and a run on request"}},
		"conflicts of fed ones are replays": {says(inbox.Conflict, inbox.Replay), []string{"fed message conflicts"}},
		"parked ones run":                   {says(inbox.WasParked, inbox.FirstAttempt), []string{"duplicate while its message is fed", "twin and its lane while a message is being parked"}},
		"nothing is held": {entriesDo(func(e *inbox.Entry) { e.Held = false }), []string{
			"lane held by a parked message", "lane of fed messages", "twin and its lane while a message is being parked", "live message while its lane is freed", "parking storm",
		}},
		"everything is held":     {entriesDo(func(e *inbox.Entry) { e.Held = e.Claimed() }), []string{"fed message succeeds", "lane held by a parked message"}},
		"nothing is full":        {entriesDo(func(e *inbox.Entry) { e.Full = false }), []string{"lane full"}},
		"held is full":           {entriesDo(func(e *inbox.Entry) { e.Full = e.Held }), []string{"lane full"}},
		"no lanes":               {claimsDo(func(c *inbox.Claim) { c.Lane = "" }), []string{"lane held by a parked message", "fed long names"}},
		"cuts lanes":             {claimsDo(func(c *inbox.Claim) { c.Lane = c.Lane[:min(len(c.Lane), 100)] }), []string{"fed long names"}},
		"order always":           {orders(func(o *inbox.Order) { o.Keep = true }), []string{"lane held by a parked message", "lane full", "lane of fed messages"}},
		"dead ones hold nothing": {orders(func(o *inbox.Order) { o.BlockedByDead = false }), []string{"lane and dead letters", "lane of fed messages"}},
		"dead ones hold always":  {orders(func(o *inbox.Order) { o.BlockedByDead = true }), []string{"lane and dead letters"}},
		"no bound of rows":       {orders(func(o *inbox.Order) { o.MaxWaiting = 0 }), []string{"lane full"}},
		"no bound of bytes":      {orders(func(o *inbox.Order) { o.MaxWaitingBytes = 0 }), []string{"lane full"}},

		"parks for now":           {parks(func(p *inbox.Parked) { p.After = 0 }), []string{"parked messages come when they are due", "fed message parked again"}},
		"parks without a failure": {parks(func(p *inbox.Parked) { p.Failure = "" }), []string{"fed message parked again", "group parked", "filter parked"}},
		"parks without the lease": {parks(func(p *inbox.Parked) { p.Lease = inbox.Lease{} }), []string{"fed message parked again", "fed message parked without a claim", "lease runs out", "fed message conflicts"}},
		"parks all as dead":       {parks(func(p *inbox.Parked) { p.State = inbox.ParkedDead }), []string{"fed message parked again", "lane held by a parked message"}},
		"parks with any lease": {with(mutantBatch{park: func(ctx context.Context, b batch, i int, p inbox.Parked) error {
			if err := b.Park(ctx, i, p); !errors.Is(err, inbox.ErrNotFound) {
				return err
			}
			return nil
		}}), []string{"lease runs out", "fed message parked without a claim"}},

		"lists any failure": {lists(func(f *inbox.ParkedFilter) { f.Failure = "" }), []string{"filter parked", "group parked"}},
		"lists any error":   {lists(func(f *inbox.ParkedFilter) { f.Error = "" }), []string{"filter parked"}},
		"lists any time":    {lists(func(f *inbox.ParkedFilter) { f.Since, f.Before = time.Time{}, time.Time{} }), []string{"filter parked"}},
		"lists from later on": {lists(func(f *inbox.ParkedFilter) {
			if !f.Since.IsZero() {
				f.Since = f.Since.Add(time.Microsecond)
			}
		}), []string{"filter parked"}},
	}
	for name, u := range undertakeMutants() {
		all[name] = u
	}
	return all
}

// undertakeMutants are stores that do not do what a person wants.
func undertakeMutants() map[string]mutant {
	retries := func(do func(ctx context.Context, u inbox.Undertaker, ids []int64) (int, error)) mutantStore {
		return mutantStore{feed: feedMutant{retry: do}}
	}
	discards := func(do func(ctx context.Context, u inbox.Undertaker, ids []int64, note string) (int, error)) mutantStore {
		return mutantStore{feed: feedMutant{discard: do}}
	}
	purges := func(change func(age *time.Duration, blocked *bool, limit *int)) mutantStore {
		return mutantStore{feed: feedMutant{purge: func(ctx context.Context, p inbox.Parker, age time.Duration, blocked bool, limit int) (int, error) {
			change(&age, &blocked, &limit)
			return p.PurgeDead(ctx, "billing", age, blocked, limit)
		}}}
	}
	return map[string]mutant{
		"retries nothing": {retries(func(_ context.Context, _ inbox.Undertaker, ids []int64) (int, error) { return min(len(ids), 2), nil }),
			[]string{"retry parked", "lane blocked while it is fed"}},
		"counts all retries": {retries(func(ctx context.Context, u inbox.Undertaker, ids []int64) (int, error) {
			_, err := u.RetryParked(ctx, ids)
			return len(ids), err
		}), []string{"retry parked", "discard parked"}},
		"discards nothing": {discards(func(_ context.Context, _ inbox.Undertaker, ids []int64, _ string) (int, error) {
			return min(len(ids), 3), nil
		}),
			[]string{"discard parked", "purge dead", "lane and dead letters"}},
		"discards without a note": {discards(func(ctx context.Context, u inbox.Undertaker, ids []int64, _ string) (int, error) {
			return u.DiscardParked(ctx, ids, "")
		}), []string{"discard parked"}},
		"groups the smallest first": {mutantStore{feed: feedMutant{group: func(gs []inbox.ParkedGroup) []inbox.ParkedGroup {
			slices.Reverse(gs)
			return gs
		}}}, []string{"group parked"}},
		"purges any age":     {purges(func(age *time.Duration, _ *bool, _ *int) { *age = 0 }), []string{"purge dead"}},
		"purges blocking":    {purges(func(_ *time.Duration, blocked *bool, _ *int) { *blocked = false }), []string{"purge dead"}},
		"purges no blocking": {purges(func(_ *time.Duration, blocked *bool, _ *int) { *blocked = true }), []string{"purge dead"}},
		"purges all at once": {purges(func(_ *time.Duration, _ *bool, limit *int) { *limit = 1000 }), []string{"purge dead"}},
	}
}

// Every rule about parked messages is noticed to be broken by some mutant.
func TestEveryFeedRuleHasMutants(t *testing.T) {
	t.Parallel()
	broken := map[string]bool{}
	for _, m := range feedMutants() {
		for _, rule := range m.rules {
			broken[rule] = true
		}
	}
	for _, rule := range inboxtest.FeedRules[pgx.Tx]() {
		if !broken[rule] {
			t.Errorf("no mutant breaks %q", rule)
		}
	}
}

// A store that says that it feeds messages back and does not is no success.
func TestParkingIsNotSkipped(t *testing.T) {
	t.Parallel()
	url := pgtest.URL(t, pgtest.Postgres)
	for _, rule := range inboxtest.FeedRules[pgx.Tx]() {
		h := pgxharness.Harness(func(tb testing.TB) (pgtest.DB, func(*pgxpool.Config)) { return pgtest.Schema(tb, url), nil })
		right := h.Open
		h.Open = func(tb testing.TB, isolation string) *inboxtest.StoreFixture[pgx.Tx] {
			f := right(tb, isolation)
			f.Store = struct{ store }{f.Store}
			return f
		}
		r := &recorder{TB: t}
		if failures := r.try(func() { inboxtest.TryRule(r, &h, rule, 10*time.Second) }); len(failures) == 0 {
			t.Errorf("%q is skipped", rule)
		}
	}
}
