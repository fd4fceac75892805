package inboxtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

func parkRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "park under the claim", run: parkUnderClaim[Tx]},
		{name: "park keeps everything", run: parkKeepsEverything[Tx]},
		{name: "duplicates of parked messages", run: duplicatesOfParked[Tx]},
		{name: "parked messages run on request", run: ignoreParked[Tx]},
		{name: "park a conflict", run: parkConflict[Tx]},
		{name: "twin of a message being parked", levels: true, run: twinOfParked[Tx]},
		{name: "list parked", run: listParked[Tx]},
	}
}

// notTheDatabase are errors as a handler's other calls give them.
func notTheDatabase() []error {
	return []error{
		nil, errors.New("no"), io.EOF, io.ErrUnexpectedEOF, context.Canceled, fmt.Errorf("own: %w", context.DeadlineExceeded),
		&net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}, net.ErrClosed, syscall.ECONNRESET,
	}
}

// parked is c as a dead letter.
func parked(c inbox.Claim) inbox.Parked {
	return inbox.Parked{
		Key: c.Key, Fingerprint: c.Fingerprint, Message: &broker.Message{Body: []byte("{}")},
		State: inbox.ParkedDead, Reason: inbox.ReasonAttempts, Attempts: 5,
	}
}

// park fails the message of entry i and parks it.
func (s *storeSuite[Tx]) park(b inbox.Batch[Tx], i int, p inbox.Parked) {
	s.Helper()
	s.start(b, i, insertEffect(p.MessageKey))
	if err := b.Finish(s.ctx, i, false, nil); err != nil {
		s.Fatalf("Finish(failed): %v", err)
	}
	if err := b.Park(s.ctx, i, p); err != nil {
		s.Fatalf("Park(%d): %v", i, err)
	}
}

func (s *storeSuite[Tx]) wantParked(n int64) {
	s.Helper()
	if got := s.count("select count(*) from inbox_parked"); got != n {
		s.Errorf("%d parked rows, want %d", got, n)
	}
}

// 37. Park keeps the message and gives up its claim in the same transaction;
// neighbours before and after are not touched. Abort undoes it.
func parkUnderClaim[Tx any](s *storeSuite[Tx]) {
	for _, commit := range []bool{false, true} {
		b := s.begin(claims("k1", "k2", "k3")...)
		s.work(b, 0, "k1", nil)
		s.park(b, 1, parked(claim("k2")))
		s.work(b, 2, "k3", nil)
		if !commit {
			b.Abort()
			s.wantParked(0)
			continue
		}
		s.commit(b)
	}
	s.wantParked(1)
	for i, n := range []int64{1, 0, 1} {
		key := claim(fmt.Sprint("k", i+1)).Key
		s.wantEffects(key.MessageKey, n)
		s.wantRow(key, n == 1)
	}
	single := s.begin(claim("single"))
	s.park(single, 0, parked(claim("single")))
	s.commit(single)
	s.wantParked(2)
	s.wantRow(claim("single").Key, false)
	s.wantEffects("single", 0)
	// Parked without a run: the message was doomed before.
	doomed := s.begin(claim("doomed"))
	if err := doomed.Park(s.ctx, 0, parked(claim("doomed"))); err != nil {
		s.Fatal(err)
	}
	s.commit(doomed)
	s.wantParked(3)
	s.wantRow(claim("doomed").Key, false)
}

// 38. A parked row has all that the message needs to run again. A message
// without a key is parked without a claim (i < 0). A row that is there stays.
func parkKeepsEverything[Tx any](s *storeSuite[Tx]) {
	in, ok := s.Store.(inbox.Inspector)
	if !ok {
		s.Skip("the store is no Inspector")
	}
	full := inbox.Parked{
		Key:         inbox.Key{Tenant: "t", Consumer: "billing", MessageKey: "full"},
		Fingerprint: []byte{0, 1, 0xff},
		Message: &broker.Message{
			ID: "id", Source: "kafka:orders/3", Position: broker.At(0), Key: []byte{0xff, 0},
			Headers: broker.Headers{{Name: "a", Value: []byte{0}}, {Name: "a", Value: []byte("2")}},
			Body:    []byte("\x00\xffbody"), Time: time.Date(2024, 1, 2, 3, 4, 5, 6000, time.UTC),
		},
		Lane: "orders/3\x00\xff", State: inbox.ParkedRetry, Reason: inbox.ReasonPermanent,
		Error: "first\x00\xff", Attempts: 7, EventTime: time.Date(2023, 1, 2, 3, 4, 5, 0, time.UTC), Worker: "host:1",
	}
	bare := inbox.Parked{
		Key:     inbox.Key{Consumer: "billing", MessageKey: "bare"},
		Message: &broker.Message{Key: []byte{}}, State: inbox.ParkedDead, Reason: inbox.ReasonInvalidKey,
	}
	b := s.begin(claim("k1"))
	for _, p := range []inbox.Parked{full, bare, full} {
		if err := b.Park(s.ctx, -1, p); err != nil {
			s.Fatalf("Park(-1): %v", err)
		}
		full.Error = "second"
	}
	s.work(b, 0, "k1", nil)
	s.commit(b)
	rows, err := in.ListParked(s.ctx, inbox.ParkedFilter{})
	if err != nil || len(rows) != 2 {
		s.Fatalf("ListParked: %d rows, %v; want 2", len(rows), err)
	}
	got, err := in.GetParked(s.ctx, rows[0].ID)
	if err != nil {
		s.Fatal(err)
	}
	m, want := got.Message, full.Message
	if got.Key != full.Key || !bytes.Equal(got.Fingerprint, full.Fingerprint) || got.Lane != full.Lane || got.State != full.State ||
		got.Reason != full.Reason || got.Attempts != 7 || got.Worker != "host:1" || !got.EventTime.Equal(full.EventTime) {
		s.Errorf("parked row: %+v", got.Parked)
	}
	if m.ID != want.ID || m.Source != want.Source || m.Position != want.Position || !bytes.Equal(m.Key, want.Key) || !m.Time.Equal(want.Time) ||
		!bytes.Equal(m.Body, want.Body) || len(m.Headers) != 2 || m.Headers[1].Name != "a" || !bytes.Equal(m.Headers[0].Value, []byte{0}) {
		s.Errorf("parked message: %+v", m)
	}
	if len(got.Error) == 0 || got.Error[:5] != "first" {
		s.Errorf("the row that was there has changed: error %q", got.Error)
	}
	if got.ParkedAt.IsZero() || got.UpdatedAt.IsZero() || got.Duplicates != 0 {
		s.Errorf("parked at %v, updated at %v, %d duplicates", got.ParkedAt, got.UpdatedAt, got.Duplicates)
	}
	if got, err = in.GetParked(s.ctx, rows[1].ID); err != nil {
		s.Fatal(err)
	}
	if m := got.Message; m.Body != nil || m.Key == nil || m.Position.Known || !m.Time.IsZero() || len(m.Headers) != 0 {
		s.Errorf("a message without anything comes back as %+v", m)
	}
	if _, err := in.GetParked(s.ctx, rows[1].ID+1000); !errors.Is(err, inbox.ErrNotFound) {
		s.Errorf("GetParked of no row: %v, want ErrNotFound", err)
	}
}

// 39. A message that is parked is not claimed: Dead or WasParked, by the state
// of the row, and its duplicate is counted. Another body with the key runs.
func duplicatesOfParked[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("dead", "retry", "fine")...)
	s.park(b, 0, parked(claim("dead")))
	retry := parked(claim("retry"))
	retry.State = inbox.ParkedRetry
	s.park(b, 1, retry)
	s.work(b, 2, "fine", nil)
	s.commit(b)
	other := claim("dead")
	other.Fingerprint = []byte("other")
	for round := range 2 {
		b := s.begin(claims("fine", "dead", "new", "retry")...)
		for i, want := range []inbox.Outcome{inbox.Replay, inbox.Dead, inbox.FirstAttempt, inbox.WasParked} {
			s.want(b, i, want)
		}
		s.commit(b)
		s.wantRow(claim("dead").Key, false)
		s.wantRow(claim("retry").Key, false)
		if n := s.count("select sum(duplicates) from inbox_parked"); n != int64(2*(round+1)) {
			s.Errorf("%d duplicates attached, want %d", n, 2*(round+1))
		}
	}
	single := s.begin(claim("dead"))
	s.want(single, 0, inbox.Dead)
	single.Abort()
	if n := s.count("select sum(duplicates) from inbox_parked"); n != 4 {
		s.Errorf("an aborted batch attached a duplicate: %d, want 4", n)
	}
	s.handle(other, nil)
	s.wantParked(2)
}

// 40. With IgnoreParked a parked message runs. Its success removes the row in
// the same transaction; its failure leaves it.
func ignoreParked[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2")...)
	s.park(b, 0, parked(claim("k1")))
	s.park(b, 1, parked(claim("k2")))
	s.commit(b)
	o := options()
	o.IgnoreParked = true
	b = s.beginWith(o, claims("k1", "k2")...)
	s.want(b, 0, inbox.FirstAttempt)
	s.want(b, 1, inbox.FirstAttempt)
	s.work(b, 0, "k1", nil)
	s.start(b, 1, insertEffect("k2"))
	if err := b.Finish(s.ctx, 1, false, nil); err != nil {
		s.Fatal(err)
	}
	s.commit(b)
	s.wantParked(1)
	s.wantEffects("k1", 1)
	s.wantClaim(claim("k1"), inbox.Replay)
	s.wantClaim(claim("k2"), inbox.Dead)
}

// 41. A message whose key was handled with another body can be parked; the
// handled row stays, and its duplicates attach to the parked one.
func parkConflict[Tx any](s *storeSuite[Tx]) {
	s.handle(claim("k1"), []byte("first"))
	other := claim("k1")
	other.Fingerprint = []byte("other")
	b := s.begin(other)
	s.want(b, 0, inbox.Conflict)
	p := parked(other)
	p.Reason = inbox.ReasonConflict
	if err := b.Park(s.ctx, 0, p); err != nil {
		s.Fatal(err)
	}
	s.commit(b)
	s.wantParked(1)
	b = s.begin(other)
	s.want(b, 0, inbox.Dead)
	s.commit(b)
	if n := s.count("select duplicates from inbox_parked"); n != 1 {
		s.Errorf("%d duplicates, want 1", n)
	}
	s.wantClaim(claim("k1"), inbox.Replay)
	if r := s.lookup(claim("k1").Key); string(r.Result) != "first" {
		s.Errorf("the first row has changed: %q", r.Result)
	}
}

// 42. A twin that waits while a message is parked does not run: it finds the
// parked row, at every isolation level.
//
// case D13
func twinOfParked[Tx any](s *storeSuite[Tx]) {
	b := s.begin(claims("k1", "k2")...)
	s.park(b, 0, parked(claim("k1")))
	s.work(b, 1, "k2", nil)
	twin := s.beginAsync(options(), claim("k1"))
	s.waiting(1)
	s.commit(b)
	got := s.await(twin)
	s.want(got, 0, inbox.Dead)
	s.commit(got)
	s.wantRow(claim("k1").Key, false)
	s.wantParked(1)
}

// 43. ListParked filters and goes on where it ended, without bodies.
func listParked[Tx any](s *storeSuite[Tx]) {
	in, ok := s.Store.(inbox.Inspector)
	if !ok {
		s.Skip("the store is no Inspector")
	}
	b := s.begin()
	for i := range 6 {
		p := parked(claim(fmt.Sprint("k", i)))
		p.Tenant = []string{"", "t1"}[i%2]
		if i >= 4 {
			p.Consumer, p.State, p.Reason = "shipping", inbox.ParkedRetry, inbox.ReasonConflict
		}
		if err := b.Park(s.ctx, -1, p); err != nil {
			s.Fatal(err)
		}
	}
	s.commit(b)
	var all []inbox.ParkedRecord
	for after := int64(0); ; {
		page, err := in.ListParked(s.ctx, inbox.ParkedFilter{After: after, Limit: 4})
		if err != nil {
			s.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		all = append(all, page...)
		after = page[len(page)-1].ID
	}
	for i, r := range all {
		if r.MessageKey != fmt.Sprint("k", i) || r.Message == nil || r.Message.Body != nil {
			s.Errorf("row %d: key %s, message %+v", i, r.MessageKey, r.Message)
		}
	}
	if len(all) != 6 {
		s.Errorf("%d rows, want 6", len(all))
	}
	for _, c := range []struct {
		filter inbox.ParkedFilter
		want   int
	}{
		{inbox.ParkedFilter{Limit: -1}, 6},
		{inbox.ParkedFilter{Consumer: "billing"}, 4},
		{inbox.ParkedFilter{Tenant: "t1"}, 3},
		{inbox.ParkedFilter{MessageKey: "k3"}, 1},
		{inbox.ParkedFilter{State: inbox.ParkedRetry}, 2},
		{inbox.ParkedFilter{Reason: inbox.ReasonAttempts, Tenant: "t1"}, 2},
		{inbox.ParkedFilter{Consumer: "nobody"}, 0},
	} {
		if rows, err := in.ListParked(s.ctx, c.filter); err != nil || len(rows) != c.want {
			s.Errorf("ListParked(%+v): %d rows, %v; want %d", c.filter, len(rows), err, c.want)
		}
	}
}
