package inboxtest

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// The rules about parked messages that get another attempt. They need a store
// that is an inbox.Parker, see StoreHarness.Parking.
func feedRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "parked messages come when they are due", run: dueRows[Tx]},
		{name: "lease excludes others", run: leaseExcludes[Tx]},
		{name: "lease runs out", run: leaseRunsOut[Tx]},
		{name: "lease released", run: leaseReleased[Tx]},
		{name: "lease limit and consumer", run: leaseLimit[Tx]},
	}
}

// parker returns the store as what feeds parked messages back.
func (s *storeSuite[Tx]) parker() inbox.Parker {
	s.Helper()
	p, ok := s.Store.(inbox.Parker)
	switch {
	case !s.h.Parking:
		s.Skip("the store does not feed parked messages back (StoreHarness.Parking)")
	case !ok:
		s.Fatal("StoreHarness.Parking is set, but the store is no inbox.Parker")
	}
	return p
}

func (s *storeSuite[Tx]) undertaker() inbox.Undertaker {
	s.Helper()
	u, ok := s.Store.(inbox.Undertaker)
	switch {
	case !s.h.Parking:
		s.Skip("nobody can see to parked messages (StoreHarness.Parking)")
	case !ok:
		s.Fatal("StoreHarness.Parking is set, but the store is no inbox.Undertaker")
	}
	return u
}

func (s *storeSuite[Tx]) inspector() inbox.Inspector {
	s.Helper()
	in, ok := s.Store.(inbox.Inspector)
	switch {
	case !ok && s.h.Parking:
		s.Fatal("StoreHarness.Parking is set, but the store is no inbox.Inspector")
	case !ok:
		s.Skip("the store is no Inspector")
	}
	return in
}

// retry is the message of key, to be tried again after a while.
func retry(key, lane string, after time.Duration) inbox.Parked {
	p := parked(claim(key))
	p.Lane, p.State, p.Reason, p.After, p.Attempts = lane, inbox.ParkedRetry, inbox.ReasonFailed, after, 4
	p.Message = &broker.Message{
		ID: "id of " + key, Source: "memory:q", Key: []byte("broker key"),
		Headers: broker.Headers{{Name: "h", Value: []byte("v")}}, Body: []byte("body of " + key),
	}
	return p
}

// waits is the message of key, queueing in lane.
func waits(key, lane string) inbox.Parked {
	p := retry(key, lane, 0)
	p.State, p.Reason, p.Attempts = inbox.ParkedWaiting, inbox.ReasonWaiting, 0
	return p
}

// dead is the message of key as a dead letter of lane.
func dead(key, lane string) inbox.Parked {
	p := retry(key, lane, 0)
	p.State, p.Reason = inbox.ParkedDead, inbox.ReasonAttempts
	return p
}

// fill parks messages in the order given.
func (s *storeSuite[Tx]) fill(ps ...inbox.Parked) {
	s.Helper()
	b := s.begin()
	for _, p := range ps {
		if err := b.Park(s.ctx, -1, p); err != nil {
			s.Fatalf("Park of %s: %v", short(p.MessageKey), err)
		}
	}
	s.commit(b)
}

// order is the default Order of consumers.
func order() inbox.Order { return inbox.Order{Keep: true} }

func request() inbox.LeaseRequest {
	return inbox.LeaseRequest{Consumer: "billing", Limit: 100, For: time.Minute, Worker: "host:1", Order: order()}
}

// leaseWith leases and checks what must hold for every answer.
func (s *storeSuite[Tx]) leaseWith(r inbox.LeaseRequest) inbox.Leased {
	s.Helper()
	got, err := s.parker().Lease(s.ctx, r)
	if err != nil {
		s.Fatalf("Lease: %v", err)
	}
	for _, row := range got.Rows {
		if row.ID == 0 || row.Lease.ID != row.ID || row.Lease.Token == 0 {
			s.Errorf("the row of %s has id %d and the lease %+v", short(row.MessageKey), row.ID, row.Lease)
		}
		if row.Message == nil || row.LeasedUntil.IsZero() {
			s.Errorf("the row of %s has the message %v and is leased until %v", short(row.MessageKey), row.Message, row.LeasedUntil)
		}
	}
	if len(got.Rows) > r.Limit {
		s.Errorf("%d rows for a limit of %d", len(got.Rows), r.Limit)
	}
	return got
}

// lease leases and wants rows of these keys: in this order within a lane, whatever
// the order of lanes.
func (s *storeSuite[Tx]) lease(keys ...string) []inbox.ParkedRecord {
	s.Helper()
	return s.wantLeased(s.leaseWith(request()).Rows, keys...)
}

// wantLeased checks the keys of rows and returns the rows in the order of keys.
func (s *storeSuite[Tx]) wantLeased(rows []inbox.ParkedRecord, keys ...string) []inbox.ParkedRecord {
	s.Helper()
	last := map[string]int64{}
	var got []string
	for _, r := range rows {
		got = append(got, r.MessageKey)
		if r.Lane != "" && r.ID < last[r.Lane] {
			s.Errorf("the rows of lane %q are not in their order: %v", short(r.Lane), got)
		}
		last[r.Lane] = r.ID
	}
	byKey := make([]inbox.ParkedRecord, len(keys))
	for i, k := range keys {
		if n := slices.Index(got, k); n >= 0 {
			byKey[i] = rows[n]
		}
	}
	slices.Sort(got)
	if want := slices.Sorted(slices.Values(keys)); !slices.Equal(got, want) {
		s.Fatalf("leased %q, want %q", got, want)
	}
	return byKey
}

// fed is the claim of a leased row.
func fed(r inbox.ParkedRecord) inbox.Claim {
	c := claim(r.MessageKey)
	c.Key, c.Fingerprint, c.Lane, c.Parked = r.Key, r.Fingerprint, r.Lane, r.Lease
	return c
}

// keeping are the options of consumers that keep the order of lanes.
func keeping() inbox.BeginOptions {
	o := options()
	o.Order = order()
	return o
}

// feed begins with the claims of leased rows.
func (s *storeSuite[Tx]) feed(rows ...inbox.ParkedRecord) inbox.Batch[Tx] {
	s.Helper()
	cs := make([]inbox.Claim, len(rows))
	for i, r := range rows {
		cs[i] = fed(r)
	}
	return s.beginWith(keeping(), cs...)
}

// finishFed does the work of leased rows, which must all be free to run.
func (s *storeSuite[Tx]) finishFed(rows ...inbox.ParkedRecord) {
	s.Helper()
	b := s.feed(rows...)
	for i, r := range rows {
		s.wantFree(b, i)
		s.work(b, i, r.MessageKey, nil)
	}
	s.commit(b)
}

// wantFree wants an entry that may run.
func (s *storeSuite[Tx]) wantFree(b inbox.Batch[Tx], i int) {
	s.Helper()
	s.want(b, i, inbox.FirstAttempt)
	if e := b.Entries()[i]; e.Held || e.Full || e.Gone {
		s.Errorf("entry %d: held %v, full %v, gone %v; want none of them", i, e.Held, e.Full, e.Gone)
	}
}

func (s *storeSuite[Tx]) wantGone(b inbox.Batch[Tx], i int) {
	s.Helper()
	s.want(b, i, "")
	if e := b.Entries()[i]; !e.Gone || e.Held || e.Full {
		s.Errorf("entry %d: %+v, want it to be gone", i, e)
	}
}

// row returns the parked row of a key of consumer billing, whole.
func (s *storeSuite[Tx]) row(key string) *inbox.ParkedRecord {
	s.Helper()
	in := s.inspector()
	rows, err := in.ListParked(s.ctx, inbox.ParkedFilter{Consumer: "billing", MessageKey: key})
	if err != nil || len(rows) != 1 {
		s.Fatalf("ListParked of %s: %d rows, %v; want 1", short(key), len(rows), err)
	}
	r, err := in.GetParked(s.ctx, rows[0].ID)
	if err != nil {
		s.Fatalf("GetParked of %s: %v", short(key), err)
	}
	if l := rows[0]; l.State != r.State || l.Failure != r.Failure || !l.NextAttempt.Equal(r.NextAttempt) || !l.LeasedUntil.Equal(r.LeasedUntil) || !l.Died.Equal(r.Died) {
		s.Errorf("ListParked and GetParked differ: %+v, %+v", l, r)
	}
	return r
}

// wantRetry wants the row of a key to wait, not leased, for a time within a second
// of after from when it was last changed.
func (s *storeSuite[Tx]) wantRetry(key string, after time.Duration) *inbox.ParkedRecord {
	s.Helper()
	r := s.row(key)
	if d := r.NextAttempt.Sub(r.UpdatedAt) - after; r.State != inbox.ParkedRetry || d.Abs() > time.Second {
		s.Errorf("%s: state %s, next attempt %v after its change; want %v", key, r.State, r.NextAttempt.Sub(r.UpdatedAt), after)
	}
	if !r.LeasedUntil.IsZero() || !r.Died.IsZero() {
		s.Errorf("%s: leased until %v, dead since %v", key, r.LeasedUntil, r.Died)
	}
	return r
}

// 53. A parked message is not leased before its time, and then it is, whole. Next
// is the time until the earliest one; it is negative when none waits for a time.
func dueRows[Tx any](s *storeSuite[Tx]) {
	if got := s.leaseWith(request()); len(got.Rows) != 0 || got.Next >= 0 {
		s.Errorf("an empty table: %d rows, next in %v; want none and a negative time", len(got.Rows), got.Next)
	}
	const after = 400 * time.Millisecond
	start := time.Now()
	s.fill(retry("hour", "", time.Hour), retry("lane", "l1", 2*time.Hour), dead("dead", ""))
	s.wantRetry("hour", time.Hour)
	if got := s.leaseWith(request()); len(got.Rows) != 0 || got.Next < 59*time.Minute || got.Next > time.Hour {
		s.Errorf("%d rows, next in %v; want none, and 1h", len(got.Rows), got.Next)
	}
	for _, lane := range []string{"", "l2"} {
		s.fill(retry("soon"+lane, lane, after))
		got := s.leaseWith(request()) // On a slow machine it may be due by now.
		if time.Since(start) < after && (len(got.Rows) != 0 || got.Next <= 0 || got.Next > after) {
			s.Errorf("lane %q: %d rows, next in %v; want none, and at most %v", lane, len(got.Rows), got.Next, after)
		}
		for len(got.Rows) == 0 && s.ctx.Err() == nil {
			if got = s.leaseWith(request()); len(got.Rows) == 0 {
				s.pause(max(got.Next, time.Millisecond))
			}
		}
		if d := time.Since(start); d < after-10*time.Millisecond {
			s.Errorf("lane %q: leased after %v, it is due after %v", lane, d, after)
		}
		r := s.wantLeased(got.Rows, "soon"+lane)[0]
		m := r.Message
		if string(m.Body) != "body of soon"+lane || m.ID != "id of soon"+lane || string(m.Key) != "broker key" || len(m.Headers) != 1 || m.Headers[0].Name != "h" {
			s.Errorf("the leased message: %+v", m)
		}
		if r.Lane != lane || r.State != inbox.ParkedRetry || r.Attempts != 4 || r.Reason != inbox.ReasonFailed || string(r.Fingerprint) != "fp" {
			s.Errorf("the leased row: %+v", r.Parked)
		}
		start = time.Now()
	}
	s.fill(retry("now", "", 0), retry("past", "", -time.Hour), retry("now2", "l3", -1))
	s.lease("now", "past", "now2")
}

// 54. A leased row is not leased again, and counts for no time.
func leaseExcludes[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), retry("k2", "l1", 0))
	s.lease("k1", "k2")
	if got := s.leaseWith(request()); len(got.Rows) != 0 || got.Next >= 0 {
		s.Errorf("leased rows: %d are leased again, next in %v", len(got.Rows), got.Next)
	}
	r := s.row("k1")
	if r.LeasedUntil.Sub(r.UpdatedAt) < 30*time.Second || r.LeasedUntil.Sub(r.UpdatedAt) > 90*time.Second || r.Worker != "host:1" {
		s.Errorf("leased at %v until %v by %q, want a minute by host:1", r.UpdatedAt, r.LeasedUntil, r.Worker)
	}
}

// 55. A lease that has run out counts for nothing: another gets the row. The first
// one's claim is then Gone and takes nothing, and it can park nothing; its batch
// stays usable.
func leaseRunsOut[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "l1", 0))
	brief := request()
	brief.For = time.Millisecond
	first := s.wantLeased(s.leaseWith(brief).Rows, "k1")[0]
	s.pause(20 * time.Millisecond)
	second := s.lease("k1")[0]
	if second.Lease.Token <= first.Lease.Token {
		s.Errorf("tokens %d, then %d: they must increase", first.Lease.Token, second.Lease.Token)
	}
	b := s.beginWith(keeping(), claim("k0"), fed(first), claim("k2"))
	s.want(b, 0, inbox.FirstAttempt)
	s.wantGone(b, 1)
	s.work(b, 0, "k0", nil)
	again := retry("k1", "l1", time.Hour)
	again.Lease = first.Lease
	if err := b.Park(s.ctx, 1, again); !errors.Is(err, inbox.ErrNotFound) {
		s.Errorf("Park with a lease that is over: %v, want ErrNotFound", err)
	}
	s.work(b, 2, "k2", nil)
	s.commit(b)
	s.wantEffects("k0", 1)
	s.wantEffects("k2", 1)
	s.wantRow(claim("k1").Key, false)
	s.finishFed(second)
	s.wantParked(0)
	s.wantEffects("k1", 1)
}

// 56. Release frees rows at once, and ends the lease for who had it.
func leaseReleased[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), waits("k2", "l1"), waits("k3", "l1"))
	rows := s.lease("k1", "k2", "k3")
	p := s.parker()
	if err := p.Release(s.ctx, []inbox.Lease{rows[0].Lease, rows[1].Lease, rows[2].Lease}); err != nil {
		s.Fatalf("Release: %v", err)
	}
	b := s.feed(rows...)
	for i := range rows {
		s.wantGone(b, i)
	}
	s.commit(b)
	s.wantParked(3)
	if r := s.row("k2"); !r.LeasedUntil.IsZero() || r.State != inbox.ParkedWaiting || r.Attempts != 0 || !r.NextAttempt.IsZero() {
		s.Errorf("a released row: %+v", r)
	}
	again := s.lease("k1", "k2", "k3")
	// The leases before mean nothing any more.
	if err := p.Release(s.ctx, []inbox.Lease{rows[0].Lease, {ID: rows[0].ID + 1000, Token: 1}, {}}); err != nil {
		s.Errorf("Release of leases that are over: %v", err)
	}
	if err := p.Release(s.ctx, nil); err != nil {
		s.Errorf("Release of nothing: %v", err)
	}
	for i, r := range again {
		if r.Lease.Token <= rows[i].Lease.Token {
			s.Errorf("tokens %d, then %d: they must increase", rows[i].Lease.Token, r.Lease.Token)
		}
	}
	s.lease()
	s.finishFed(again...)
	s.wantParked(0)
}

// 57. Lease keeps to its limit, says so with Next, and takes one consumer's rows.
func leaseLimit[Tx any](s *storeSuite[Tx]) {
	var all []inbox.Parked
	for i := range 3 {
		all = append(all, retry(fmt.Sprint("a", i), "", 0), waits(fmt.Sprint("b", i), "l1"), retry(fmt.Sprint("c", i), fmt.Sprint("m", i), 0))
	}
	other := retry("other", "", 0)
	other.Consumer = "shipping"
	s.fill(append(all, other)...)
	r := request()
	r.Limit = 2
	seen := map[string]bool{}
	for len(seen) < 9 {
		got := s.leaseWith(r)
		if len(got.Rows) == 0 {
			s.Fatalf("no rows are leased, %d were: %v", len(seen), seen)
		}
		for _, row := range got.Rows {
			if seen[row.MessageKey] || row.Consumer != "billing" {
				s.Errorf("%s of %s is leased (before: %v)", row.MessageKey, row.Consumer, seen[row.MessageKey])
			}
			seen[row.MessageKey] = true
		}
		s.finishFed(got.Rows...)
		if left := 9 - len(seen); left > 0 && got.Next != 0 {
			s.Errorf("%d rows are left out and the next is due in %v, want 0", left, got.Next)
		} else if left == 0 && got.Next >= 0 {
			s.Errorf("all rows are leased and the next is due in %v", got.Next)
		}
	}
	r.Consumer = "shipping"
	s.wantLeased(s.leaseWith(r).Rows, "other")
}
