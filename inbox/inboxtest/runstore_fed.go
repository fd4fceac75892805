package inboxtest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// The rules about messages that come from the parked table, in their batches.
func fedRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "fed message succeeds", levels: true, run: fedSucceeds[Tx]},
		{name: "fed message fails", run: fedFails[Tx]},
		{name: "fed message parked again", levels: true, run: fedAgain[Tx]},
		{name: "fed message parked without a claim", run: fedWithoutClaim[Tx]},
		{name: "fed message done meanwhile", levels: true, run: fedDone[Tx]},
		{name: "fed message conflicts", run: fedConflict[Tx]},
		{name: "fed message gone", run: fedGone[Tx]},
		{name: "fed long names", run: fedLong[Tx]},
	}
}

// 58. A fed message is claimed although it is parked. Its success deletes the row
// in the same transaction; Abort keeps it with its lease.
func fedSucceeds[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "l1", 0), retry("k2", "", 0), retry("k3", "", 0))
	rows := s.lease("k1", "k2", "k3")
	for _, commit := range []bool{false, true} {
		b := s.feed(rows...)
		for i, r := range rows {
			s.wantFree(b, i)
			s.work(b, i, r.MessageKey, []byte("result"))
		}
		s.wantParked(3)
		if !commit {
			b.Abort()
			s.wantParked(3)
			continue
		}
		s.commit(b)
	}
	s.wantParked(0)
	for _, r := range rows {
		s.wantEffects(r.MessageKey, 1)
		s.wantClaim(claim(r.MessageKey), inbox.Replay)
	}
	single := retry("single", "", 0)
	single.Tenant = "t1"
	s.fill(single)
	row := s.lease("single")[0]
	if row.Tenant != "t1" {
		s.Errorf("the leased row has the tenant %q", row.Tenant)
	}
	s.finishFed(row)
	s.wantParked(0)
	s.wantEffects("single", 1)
}

// 59. A fed message that fails, or is not reached, keeps its row and its lease; its
// claim is given up. A duplicate attaches to it.
func fedFails[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), retry("k2", "", 0), retry("k3", "", 0))
	rows := s.lease("k1", "k2", "k3")
	b := s.feed(rows...)
	s.work(b, 0, "k1", nil)
	s.start(b, 1, insertEffect("k2"))
	if err := b.Finish(s.ctx, 1, false, nil); err != nil {
		s.Fatal(err)
	}
	s.commit(b)
	s.wantParked(2)
	for _, k := range []string{"k2", "k3"} {
		s.wantEffects(k, 0)
		s.wantRow(claim(k).Key, false)
		s.wantClaim(claim(k), inbox.WasParked)
		if r := s.row(k); r.LeasedUntil.IsZero() || r.Attempts != 4 {
			s.Errorf("%s: leased until %v, %d attempts", k, r.LeasedUntil, r.Attempts)
		}
	}
	s.lease()
	s.finishFed(rows[1], rows[2])
	s.wantParked(0)
}

// 60. Park with a lease keeps key, lane and message of the row, sets the rest, and
// ends the lease.
func fedAgain[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "l1", 0), retry("k2", "l2", 0), retry("k3", "", 0))
	rows := s.lease("k1", "k2", "k3")
	b := s.feed(rows...)
	for i := range rows {
		p := retry("another", "another lane", time.Hour)
		p.Message = &broker.Message{Body: []byte("another body")}
		p.Lease, p.Error, p.Failure, p.Attempts, p.Worker = rows[i].Lease, "failed again", "f1", 5, "host:2"
		if i == 1 {
			p.State, p.Reason = inbox.ParkedDead, inbox.ReasonAttempts
		}
		if i == 2 {
			s.work(b, i, "k3", nil)
			continue
		}
		s.start(b, i, insertEffect(rows[i].MessageKey))
		if err := b.Finish(s.ctx, i, false, nil); err != nil {
			s.Fatal(err)
		}
		if err := b.Park(s.ctx, i, p); err != nil {
			s.Fatalf("Park with a lease: %v", err)
		}
	}
	s.commit(b)
	s.wantParked(2)
	s.wantEffects("k1", 0)
	s.wantEffects("k3", 1)
	r := s.wantRetry("k1", time.Hour)
	if r.ID != rows[0].ID || r.Lane != "l1" || string(r.Message.Body) != "body of k1" || string(r.Message.Key) != "broker key" || !r.ParkedAt.Equal(rows[0].ParkedAt) {
		s.Errorf("key, lane or message of the row have changed: %+v", r)
	}
	if r.Reason != inbox.ReasonFailed || r.Error != "failed again" || r.Failure != "f1" || r.Attempts != 5 || r.Worker != "host:2" {
		s.Errorf("the row was not changed: %+v", r.Parked)
	}
	if r = s.row("k2"); r.State != inbox.ParkedDead || r.Died.IsZero() || !r.NextAttempt.IsZero() || !r.LeasedUntil.IsZero() || string(r.Message.Body) != "body of k2" {
		s.Errorf("a fed message that died: %+v", r)
	}
	s.wantRow(claim("k1").Key, false)
	s.wantClaim(claim("k1"), inbox.WasParked)
	s.wantClaim(claim("k2"), inbox.Dead)
	s.lease()
	// The lease has ended with it.
	b = s.feed(rows[0])
	s.wantGone(b, 0)
	s.commit(b)
}

// 61. A fed message without a trusted key is parked again without a claim.
func fedWithoutClaim[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("invalid:1", "", 0))
	r := s.lease("invalid:1")[0]
	b := s.begin()
	p := dead("invalid:1", "")
	p.Lease, p.Reason = r.Lease, inbox.ReasonInvalidKey
	if err := b.Park(s.ctx, -1, p); err != nil {
		s.Fatalf("Park(-1) with a lease: %v", err)
	}
	if err := b.Park(s.ctx, -1, p); !errors.Is(err, inbox.ErrNotFound) {
		s.Errorf("Park with the lease once more: %v, want ErrNotFound", err)
	}
	s.commit(b)
	s.wantParked(1)
	if r := s.row("invalid:1"); r.State != inbox.ParkedDead || r.Reason != inbox.ReasonInvalidKey || r.Died.IsZero() {
		s.Errorf("the row: %+v", r)
	}
	// Derived anew, its key is another one; the row is found by the lease.
	s.fill(retry("invalid:2", "", 0))
	r = s.lease("invalid:2")[0]
	c := fed(r)
	c.MessageKey = "k2"
	b = s.beginWith(keeping(), c)
	s.wantFree(b, 0)
	s.work(b, 0, "k2", nil)
	s.commit(b)
	s.wantParked(1)
	s.wantRow(claim("k2").Key, true)
}

// 62. A fed message whose key was done meanwhile is a Replay, and its row goes.
//
// case D13
func fedDone[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), retry("k2", "", 0), retry("k3", "l1", 0))
	rows := s.lease("k1", "k2", "k3")
	s.own(func(tx Tx) error {
		for _, k := range []string{"k1", "k3"} {
			if err := s.ownOutcome(tx, k, inbox.FirstAttempt, inbox.WithFingerprint([]byte("fp"))); err != nil {
				return err
			}
		}
		return nil
	})
	b := s.feed(rows[0])
	s.want(b, 0, inbox.Replay)
	b.Abort()
	s.wantParked(3)
	b = s.feed(rows[0])
	s.want(b, 0, inbox.Replay)
	s.commit(b)
	s.wantParked(2)
	b = s.feed(rows[1], rows[2])
	s.wantFree(b, 0)
	s.want(b, 1, inbox.Replay)
	s.commit(b) // k2 was not reached: it stays.
	s.wantParked(1)
	s.wantRow(claim("k2").Key, false)
	s.row("k2")
}

// 63. A fed message whose key was done with another body is a Conflict. Parked
// again, it keeps its row, else the row goes.
func fedConflict[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), retry("k2", "", 0))
	rows := s.lease("k1", "k2")
	s.own(func(tx Tx) error {
		return errors.Join(
			s.ownOutcome(tx, "k1", inbox.FirstAttempt, inbox.WithFingerprint([]byte("other"))),
			s.ownOutcome(tx, "k2", inbox.FirstAttempt, inbox.WithFingerprint([]byte("other"))))
	})
	b := s.feed(rows...)
	s.want(b, 0, inbox.Conflict)
	s.want(b, 1, inbox.Conflict)
	p := dead("k2", "")
	p.Lease, p.Reason = rows[1].Lease, inbox.ReasonConflict
	if err := b.Park(s.ctx, 1, p); err != nil {
		s.Fatalf("Park: %v", err)
	}
	s.commit(b)
	s.wantParked(1)
	if r := s.row("k2"); r.State != inbox.ParkedDead || r.Reason != inbox.ReasonConflict || !r.LeasedUntil.IsZero() {
		s.Errorf("the row: %+v", r)
	}
	if r := s.lookup(claim("k2").Key); string(r.Fingerprint) != "other" {
		s.Errorf("the first row has changed: fingerprint %q", r.Fingerprint)
	}
}

// 64. When a row is no longer there, its claim is Gone, whatever the key; so it is
// with another token, and with an id that never was.
func fedGone[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "", 0), retry("k2", "", 0), retry("k3", "", 0))
	rows := s.lease("k1", "k2", "k3")
	o := options()
	o.IgnoreParked = true
	b := s.beginWith(o, claim("k1"))
	s.want(b, 0, inbox.FirstAttempt)
	s.work(b, 0, "k1", nil)
	s.commit(b)
	s.wantParked(2)
	wrong := fed(rows[1])
	wrong.Parked.Token++
	never := claim("k4")
	never.Parked = inbox.Lease{ID: rows[2].ID + 1000, Token: 1}
	b = s.beginWith(keeping(), fed(rows[0]), wrong, fed(rows[2]), never)
	s.wantGone(b, 0)
	s.wantGone(b, 1)
	s.wantFree(b, 2)
	s.wantGone(b, 3)
	s.work(b, 2, "k3", nil)
	s.commit(b)
	s.wantParked(1)
	s.wantEffects("k1", 1)
	s.wantRow(claim("k2").Key, false)
	s.wantRow(claim("k4").Key, false)
	s.row("k2")
}

// 65. Keys and lanes of any length: what a leased row says finds the same rows and
// the same lane as the message's own text.
func fedLong[Tx any](s *storeSuite[Tx]) {
	key, lane := randomText(700), randomText(9000)
	odd := string([]byte{0, 0xff, '\'', '%'}) + "/3"
	hashed := strings.Repeat("x", 128) + "…sha256:" + randomText(64)
	s.fill(retry(key, lane, 0), retry(hashed, odd, 0))
	live := func(k, lane string) inbox.Claim {
		c := claim(k)
		c.Lane = lane
		return c
	}
	b := s.beginWith(keeping(), live("k1", lane), live("k2", odd), live(key, lane), live(hashed, odd), live("k3", lane[:8999]))
	for i, want := range []inbox.Outcome{inbox.FirstAttempt, inbox.FirstAttempt, inbox.WasParked, inbox.WasParked, inbox.FirstAttempt} {
		s.want(b, i, want)
		if e := b.Entries()[i]; e.Held != (i < 2) {
			s.Errorf("entry %d: held %v", i, e.Held)
		}
	}
	for i, p := range []inbox.Parked{waits("k1", lane), waits("k2", odd)} {
		if err := b.Park(s.ctx, i, p); err != nil {
			s.Fatal(err)
		}
	}
	s.commit(b)
	rows := s.leaseWith(request()).Rows
	if len(rows) != 4 {
		s.Fatalf("%d rows are leased, want 4", len(rows))
	}
	slices.SortFunc(rows, func(a, b inbox.ParkedRecord) int { return int(a.ID - b.ID) })
	if rows[1].Lane != odd {
		s.Errorf("lane %q comes back as %q", odd, rows[1].Lane)
	}
	b = s.feed(rows...)
	for i := range rows {
		s.wantFree(b, i)
		s.work(b, i, fmt.Sprint("n", i), nil)
	}
	s.commit(b)
	s.wantParked(0)
	for i, k := range []string{key, hashed, "k1", "k2"} {
		s.wantClaim(live(k, ""), inbox.Replay)
		s.wantEffects(fmt.Sprint("n", i), 1)
	}
	if !bytes.Equal(rows[0].Message.Body, []byte("body of "+key)) {
		s.Error("the body has changed")
	}
}
