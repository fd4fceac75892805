package inboxtest

import (
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// The rules about what a person does with parked messages.
func undertakeRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "retry parked", run: retryParked[Tx]},
		{name: "discard parked", run: discardParked[Tx]},
		{name: "group parked", run: groupParked[Tx]},
		{name: "filter parked", run: filterParked[Tx]},
		{name: "purge dead", run: purgeDead[Tx]},
	}
}

// ids are the ids of parked rows by their keys.
func (s *storeSuite[Tx]) ids(keys ...string) []int64 {
	s.Helper()
	ids := make([]int64, len(keys))
	for i, k := range keys {
		ids[i] = s.row(k).ID
	}
	return ids
}

// 74. RetryParked makes dead messages, and such that wait for a time, due now with
// no attempt used. It passes over those that are gone, waiting, discarded or
// leased.
func retryParked[Tx any](s *storeSuite[Tx]) {
	u := s.undertaker()
	s.fill(dead("dead", "l1"), retry("later", "", time.Hour), waits("waits", "l1"), dead("given up", ""), retry("leased", "", 0), dead("untouched", ""))
	if n, err := u.DiscardParked(s.ctx, s.ids("given up"), ""); err != nil || n != 1 {
		s.Fatalf("DiscardParked: %d, %v", n, err)
	}
	leased := s.leaseWith(request()).Rows
	s.wantLeased(leased, "leased", "waits")
	if err := s.parker().Release(s.ctx, []inbox.Lease{s.wantLeased(leased, "leased", "waits")[1].Lease}); err != nil {
		s.Fatal(err)
	}
	all := append(s.ids("dead", "later", "waits", "given up", "leased"), 0, -1, 1<<60)
	if n, err := u.RetryParked(s.ctx, all); err != nil || n != 2 {
		s.Fatalf("RetryParked: %d, %v; want 2", n, err)
	}
	for _, k := range []string{"dead", "later"} {
		if r := s.wantRetry(k, 0); r.Attempts != 0 || string(r.Message.Body) != "body of "+k {
			s.Errorf("%s: %d attempts, body %q", k, r.Attempts, r.Message.Body)
		}
	}
	if r := s.row("untouched"); r.State != inbox.ParkedDead || r.Attempts != 4 {
		s.Errorf("a row that was not named: %+v", r)
	}
	for _, none := range [][]int64{nil, {}, {0}} {
		if n, err := u.RetryParked(s.ctx, none); err != nil || n != 0 {
			s.Errorf("RetryParked(%v): %d, %v", none, n, err)
		}
	}
	// The one before the waiting one is its lane's first again.
	rows := s.lease("dead", "waits", "later")
	s.finishFed(rows[0], rows[1], rows[2])
	s.wantClaim(claim("dead"), inbox.Replay)
	// A lease that ran out before somebody retried the message is over.
	s.fill(retry("slow", "", 0))
	brief := request()
	brief.For = time.Millisecond
	slow := s.wantLeased(s.leaseWith(brief).Rows, "slow")[0]
	s.pause(20 * time.Millisecond)
	if n, err := u.RetryParked(s.ctx, s.ids("slow")); err != nil || n != 1 {
		s.Errorf("RetryParked of a row whose lease has run out: %d, %v; want 1", n, err)
	}
	b := s.feed(slow)
	s.wantGone(b, 0)
}

// 75. DiscardParked gives messages up: body and headers go, the note stays, and a
// redelivery is Dead. It passes over those that are gone, discarded or leased.
func discardParked[Tx any](s *storeSuite[Tx]) {
	u := s.undertaker()
	s.fill(dead("dead", ""), retry("later", "", time.Hour), waits("waits", "l1"), retry("leased", "", 0), dead("untouched", ""))
	rows := s.wantLeased(s.leaseWith(request()).Rows, "leased", "waits")
	if err := s.parker().Release(s.ctx, []inbox.Lease{rows[1].Lease}); err != nil {
		s.Fatal(err)
	}
	all := append(s.ids("dead", "later", "waits", "leased"), 0, -1, 1<<60)
	if n, err := u.DiscardParked(s.ctx, all, "by anna: order was cancelled"); err != nil || n != 3 {
		s.Fatalf("DiscardParked: %d, %v; want 3", n, err)
	}
	for _, k := range []string{"dead", "later", "waits"} {
		r := s.row(k)
		if r.State != inbox.ParkedDiscarded || r.Died.IsZero() || !r.NextAttempt.IsZero() || !r.LeasedUntil.IsZero() {
			s.Errorf("%s: state %s, died %v, next attempt %v, leased until %v", k, r.State, r.Died, r.NextAttempt, r.LeasedUntil)
		}
		if len(r.Message.Body) != 0 || len(r.Message.Headers) != 0 || r.Error != "by anna: order was cancelled" {
			s.Errorf("%s: body %q, headers %v, error %q", k, r.Message.Body, r.Message.Headers, r.Error)
		}
		if r.Message.ID != "id of "+k || r.Fingerprint == nil {
			s.Errorf("%s: what is not the message's content is gone: %+v", k, r)
		}
		b := s.beginWith(keeping(), inLane(k, "l1"))
		s.want(b, 0, inbox.Dead)
		s.commit(b)
	}
	if n, err := u.DiscardParked(s.ctx, all, "again"); err != nil || n != 0 {
		s.Errorf("DiscardParked once more: %d, %v; want 0", n, err)
	}
	if r := s.row("dead"); r.Error != "by anna: order was cancelled" || r.Duplicates != 1 {
		s.Errorf("discarded once more: error %q, %d duplicates", r.Error, r.Duplicates)
	}
	if n, err := u.RetryParked(s.ctx, s.ids("dead", "waits")); err != nil || n != 0 {
		s.Errorf("RetryParked of discarded messages: %d, %v; want 0", n, err)
	}
	s.lease()
	if n, err := u.DiscardParked(s.ctx, nil, "none"); err != nil || n != 0 {
		s.Errorf("DiscardParked of nothing: %d, %v", n, err)
	}
	if n, err := u.DiscardParked(s.ctx, s.ids("untouched"), "odd \x00 \xff note"); err != nil || n != 1 {
		s.Errorf("DiscardParked with an odd note: %d, %v", n, err)
	}
	s.finishFed(rows[0])
	s.wantParked(4)
}

// 76. GroupParked counts what failed alike, the largest group first.
func groupParked[Tx any](s *storeSuite[Tx]) {
	u := s.undertaker()
	var all []inbox.Parked
	add := func(n int, failure, text string, change func(p *inbox.Parked)) {
		for range n {
			p := dead(fmt.Sprint("k", len(all)), "")
			p.Failure, p.Error = failure, fmt.Sprintf("%s %d", text, len(all))
			if change != nil {
				change(&p)
			}
			all = append(all, p)
		}
	}
	add(3, "f1", "timeout", nil)
	add(1, "f1", "timeout", func(p *inbox.Parked) { p.State = inbox.ParkedRetry })
	add(2, "f1", "timeout", func(p *inbox.Parked) { p.Consumer = "shipping" })
	add(5, "f2", "refused", func(p *inbox.Parked) { p.Reason = inbox.ReasonPermanent })
	add(4, "f2", "refused", nil)
	s.fill(all...)
	got, err := u.GroupParked(s.ctx, inbox.ParkedFilter{After: 1 << 60, Limit: 1})
	if err != nil {
		s.Fatal(err)
	}
	want := []inbox.ParkedGroup{
		{Failure: "f2", Consumer: "billing", State: inbox.ParkedDead, Reason: inbox.ReasonPermanent, Count: 5, Error: "refused 10"},
		{Failure: "f2", Consumer: "billing", State: inbox.ParkedDead, Reason: inbox.ReasonAttempts, Count: 4, Error: "refused 14"},
		{Failure: "f1", Consumer: "billing", State: inbox.ParkedDead, Reason: inbox.ReasonAttempts, Count: 3, Error: "timeout 2"},
		{Failure: "f1", Consumer: "shipping", State: inbox.ParkedDead, Reason: inbox.ReasonAttempts, Count: 2, Error: "timeout 5"},
		{Failure: "f1", Consumer: "billing", State: inbox.ParkedRetry, Reason: inbox.ReasonAttempts, Count: 1, Error: "timeout 3"},
	}
	if len(got) != len(want) {
		s.Fatalf("%d groups, want %d: %+v", len(got), len(want), got)
	}
	for i, g := range got {
		if g.First.IsZero() || g.Last.Before(g.First) {
			s.Errorf("group %d: from %v to %v", i, g.First, g.Last)
		}
		g.First, g.Last = time.Time{}, time.Time{}
		if g != want[i] {
			s.Errorf("group %d: %+v, want %+v", i, g, want[i])
		}
	}
	got, err = u.GroupParked(s.ctx, inbox.ParkedFilter{Failure: "f1", Consumer: "billing", State: inbox.ParkedDead})
	if err != nil || len(got) != 1 || got[0].Count != 3 {
		s.Errorf("filtered: %+v, %v; want one group of 3", got, err)
	}
	if got, err = u.GroupParked(s.ctx, inbox.ParkedFilter{Consumer: "nobody"}); err != nil || len(got) != 0 {
		s.Errorf("of nobody: %+v, %v", got, err)
	}
}

// 77. ListParked finds by failure, by a part of the error's text, and by the time of
// parking. The dead say since when.
func filterParked[Tx any](s *storeSuite[Tx]) {
	in := s.inspector()
	s.undertaker()
	texts := []string{"connect: refused", "100% of %s_x", "a\\b 'quoted'", "Connect: REFUSED"}
	for i, text := range texts {
		p := dead(fmt.Sprint("k", i), "")
		p.Error, p.Failure = text, fmt.Sprint("f", i%2)
		s.fill(p)
		s.pause(5 * time.Millisecond)
	}
	s.fill(retry("k4", "", time.Hour))
	at := s.row("k2").ParkedAt
	if d := s.row("k2").Died; !d.Equal(at) && d.Sub(at).Abs() > time.Second {
		s.Errorf("dead since %v, parked at %v", d, at)
	}
	for _, c := range []struct {
		filter inbox.ParkedFilter
		want   string
	}{
		{inbox.ParkedFilter{}, "01234"},
		{inbox.ParkedFilter{Failure: "f0"}, "02"},
		{inbox.ParkedFilter{Error: "refused"}, "0"},
		{inbox.ParkedFilter{Error: "%"}, "1"},
		{inbox.ParkedFilter{Error: "_"}, "1"},
		{inbox.ParkedFilter{Error: "\\"}, "2"},
		{inbox.ParkedFilter{Error: "'quoted'"}, "2"},
		{inbox.ParkedFilter{Error: "nothing like it"}, ""},
		{inbox.ParkedFilter{Since: at}, "234"},
		{inbox.ParkedFilter{Before: at}, "01"},
		{inbox.ParkedFilter{Since: at, Before: at}, ""},
		{inbox.ParkedFilter{Since: at, Before: at.Add(time.Microsecond)}, "2"},
		{inbox.ParkedFilter{Since: time.Now().Add(time.Hour)}, ""},
		{inbox.ParkedFilter{Failure: "f1", Error: "C", Before: time.Now().Add(time.Hour)}, "3"},
		{inbox.ParkedFilter{State: inbox.ParkedRetry}, "4"},
	} {
		rows, err := in.ListParked(s.ctx, c.filter)
		got := ""
		for _, r := range rows {
			got += r.MessageKey[1:]
		}
		if err != nil || got != c.want {
			s.Errorf("ListParked(%+v): %q, %v; want %q", c.filter, got, err, c.want)
		}
	}
}

// 78. PurgeDead deletes dead and discarded messages that have been so for long, the
// oldest first and at most limit; dead ones that block their lane stay.
func purgeDead[Tx any](s *storeSuite[Tx]) {
	p, u := s.parker(), s.undertaker()
	purge := func(age time.Duration, blocked bool, limit, want int) {
		s.Helper()
		s.pause(5 * time.Millisecond)
		if n, err := p.PurgeDead(s.ctx, "billing", age, blocked, limit); err != nil || n != want {
			s.Errorf("PurgeDead(%v, blocked %v, limit %d): %d, %v; want %d", age, blocked, limit, n, err, want)
		}
	}
	other := dead("other", "")
	other.Consumer = "shipping"
	for _, one := range []inbox.Parked{
		dead("n1", ""), dead("n2", ""), dead("a1", "a"), dead("a2", "a"), retry("later", "", time.Hour), waits("a3", "a"), other,
	} {
		s.fill(one)
	}
	if n, err := u.DiscardParked(s.ctx, s.ids("a2"), ""); err != nil || n != 1 {
		s.Fatalf("DiscardParked: %d, %v", n, err)
	}
	purge(time.Hour, false, 10, 0)
	s.wantParked(7)
	purge(time.Millisecond, false, 1, 1)
	if rows, err := s.inspector().ListParked(s.ctx, inbox.ParkedFilter{MessageKey: "n1"}); err != nil || len(rows) != 0 {
		s.Errorf("the oldest was not purged first: %d rows, %v", len(rows), err)
	}
	purge(time.Millisecond, true, 10, 2) // n2, and a2, which was discarded.
	s.row("a1")
	purge(time.Millisecond, true, 10, 0)
	purge(time.Millisecond, false, 10, 1)
	s.wantParked(3)
	s.row("later")
	s.row("a3")
	// What is forgotten runs again.
	s.handle(claim("n1"), nil)
}
