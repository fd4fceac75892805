package inboxtest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

func claimRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "first claim", run: firstClaim[Tx]},
		{name: "replay and conflict", run: replayAndConflict[Tx]},
		{name: "entries in order", run: entriesInOrder[Tx]},
		{name: "scopes", run: scopes[Tx]},
		{name: "no claims", run: noClaims[Tx]},
		{name: "long keys", run: longKeys[Tx]},
		{name: "odd texts", run: oddTexts[Tx]},
		{name: "retention", run: retention[Tx]},
		{name: "results", run: results[Tx]},
		{name: "large batch", run: largeBatch[Tx]},
	}
}

// 1. A key that nobody has is FirstAttempt. After Commit the row holds what the
// claim said, done, and the work is there.
func firstClaim[Tx any](s *storeSuite[Tx]) {
	event := time.Date(2024, 5, 6, 7, 8, 9, 123456000, time.UTC)
	c := claim("k1")
	c.MessageID, c.Source, c.Position = "orders/3/4711", "kafka:orders/3", broker.At(0)
	c.EventTime, c.Worker, c.TraceID, c.Attempt = event, "host:1", "4bf92f3577b34da6a3ce929d0e0e4736", 3
	before := time.Now()
	s.handle(c, []byte(`{"ok":true}`))
	s.wantEffects("k1", 1)
	r := s.lookup(c.Key)
	if r.Key != c.Key || r.Status != inbox.StatusDone || !bytes.Equal(r.Fingerprint, c.Fingerprint) {
		s.Errorf("row: key %v, status %q, fingerprint %q", r.Key, r.Status, r.Fingerprint)
	}
	if r.MessageID != c.MessageID || r.Source != c.Source || r.Position != c.Position {
		s.Errorf("row: message %q of %q at %v", r.MessageID, r.Source, r.Position)
	}
	if !r.EventTime.Equal(event) || r.Worker != c.Worker || r.TraceID != c.TraceID || r.Attempts != 3 {
		s.Errorf("row: event time %v, worker %q, trace %q, attempts %d", r.EventTime, r.Worker, r.TraceID, r.Attempts)
	}
	if string(r.Result) != `{"ok":true}` {
		s.Errorf("row: result %q", r.Result)
	}
	// The database's clock may differ from ours, but not by hours.
	if d := r.ProcessedAt.Sub(before).Abs(); d > 10*time.Minute {
		s.Errorf("row: processed at %v, it is %v", r.ProcessedAt, before)
	}
	if d := r.ExpiresAt.Sub(r.ProcessedAt); d < time.Hour-time.Second || d > time.Hour+time.Second {
		s.Errorf("row: kept for %v, want 1h", d)
	}
}

// 2. The same key again is a Replay with the stored row and its result; with
// another fingerprint it is a Conflict. Fingerprints are compared only when
// there are two.
func replayAndConflict[Tx any](s *storeSuite[Tx]) {
	c := claim("k1")
	c.MessageID = "first"
	s.handle(c, []byte("result"))
	again := c
	again.MessageID = "second"
	for _, f := range []struct {
		fingerprint []byte
		want        inbox.Outcome
	}{
		{[]byte("fp"), inbox.Replay}, {[]byte("other"), inbox.Conflict}, {nil, inbox.Replay}, {[]byte{}, inbox.Conflict},
	} {
		again.Fingerprint = f.fingerprint
		b := s.begin(again)
		s.want(b, 0, f.want)
		if r := b.Entries()[0].Stored; r != nil && (r.MessageID != "first" || string(r.Result) != "result" || r.Key != c.Key) {
			s.Errorf("stored row: message %q, result %q, key %v", r.MessageID, r.Result, r.Key)
		}
		s.commit(b)
	}
	bare := claim("k2")
	bare.Fingerprint = nil
	s.handle(bare, nil)
	bare.Fingerprint = []byte("any")
	s.wantClaim(bare, inbox.Replay)
	if r := s.lookup(c.Key); r.MessageID != "first" || string(r.Result) != "result" {
		s.Errorf("a replay or conflict changed the row: %+v", r)
	}
	s.wantEffects("k1", 1)
}

// 3. Entries answer the claims in the claims' order, whatever their keys.
func entriesInOrder[Tx any](s *storeSuite[Tx]) {
	for _, k := range []string{"b", "d"} {
		s.handle(claim(k), []byte("of "+k))
	}
	other := claim("d")
	other.Fingerprint = []byte("other")
	b := s.begin(claim("e"), other, claim("a"), claim("b"), claim("c"))
	for i, want := range []inbox.Outcome{inbox.FirstAttempt, inbox.Conflict, inbox.FirstAttempt, inbox.Replay, inbox.FirstAttempt} {
		s.want(b, i, want)
	}
	if r := b.Entries()[3].Stored; r == nil || string(r.Result) != "of b" {
		s.Errorf("entry 3 has the row %v", r)
	}
	for i, k := range map[int]string{0: "e", 2: "a", 4: "c"} {
		s.work(b, i, k, []byte("of "+k))
	}
	s.commit(b)
	for _, k := range []string{"a", "b", "c", "d", "e"} {
		s.wantEffects(k, 1)
		if r := s.lookup(claim(k).Key); string(r.Result) != "of "+k {
			s.Errorf("result of %s: %q", k, r.Result)
		}
	}
}

// 4. Consumers and tenants are scopes: the same message key in another one is
// another key.
//
// case D4
func scopes[Tx any](s *storeSuite[Tx]) {
	c := claim("k1")
	s.handle(c, nil)
	for _, key := range []inbox.Key{
		{Consumer: "shipping", MessageKey: "k1"},
		{Consumer: "billing", Tenant: "t1", MessageKey: "k1"},
		{Consumer: "billing", Tenant: "t2", MessageKey: "k1"},
		{Consumer: "Billing", MessageKey: "k1"},
		{Consumer: "billing", MessageKey: "K1"},
		{Consumer: "billing", MessageKey: "k1 "},
	} {
		other := c
		other.Key = key
		s.handle(other, nil)
		s.wantClaim(other, inbox.Replay)
	}
	s.wantClaim(c, inbox.Replay)
	var cs []inbox.Claim
	for _, tenant := range []string{"", "t1", "t2", "t3"} {
		other := c
		other.Tenant = tenant
		cs = append(cs, other)
	}
	b := s.begin(cs...)
	for i, want := range []inbox.Outcome{inbox.Replay, inbox.Replay, inbox.Replay, inbox.FirstAttempt} {
		s.want(b, i, want)
	}
	s.commit(b)
	s.wantRow(cs[3].Key, false)
}

// 5. A batch may have no claims.
func noClaims[Tx any](s *storeSuite[Tx]) {
	b := s.begin()
	s.commit(b)
	s.begin().Abort()
}

// 6. Keys of any length are kept apart, found by their text, and given back as
// they were.
func longKeys[Tx any](s *storeSuite[Tx]) {
	prefix := randomText(600)
	keys := []string{
		strings.Repeat("x", 512), strings.Repeat("x", 513), randomText(512), randomText(513),
		prefix + "a", prefix + "b", randomText(4000), randomText(60_000), strings.Repeat("é", 300),
	}
	var cs []inbox.Claim
	for _, k := range keys {
		cs = append(cs, claim(k))
	}
	b := s.begin(cs...)
	for i, k := range keys {
		s.want(b, i, inbox.FirstAttempt)
		s.work(b, i, fmt.Sprint("n", i), []byte(fmt.Sprint(i, len(k))))
	}
	s.commit(b)
	again := s.begin(cs...)
	for i, k := range keys {
		s.want(again, i, inbox.Replay)
		stored, found := again.Entries()[i].Stored, s.lookup(cs[i].Key)
		if stored != nil && stored.MessageKey != k || found.MessageKey != k {
			s.Errorf("key %d comes back changed", i)
		}
		if string(found.Result) != fmt.Sprint(i, len(k)) {
			s.Errorf("key %d has the result of another: %q", i, found.Result)
		}
	}
	again.Abort()
	if in, ok := s.Store.(inbox.Inspector); ok {
		if rows, err := in.Find(s.ctx, keys[3]); err != nil || len(rows) != 1 || rows[0].MessageKey != keys[3] {
			s.Errorf("Find of a long key: %d rows, %v", len(rows), err)
		}
	}
}

func randomText(n int) string {
	b := make([]byte, n/2+1)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)[:n]
}

// 7. What the broker says about a message never makes its claim fail: NUL,
// invalid UTF-8, endless ids, absurd times.
func oddTexts[Tx any](s *storeSuite[Tx]) {
	odd := []string{"a\x00b", "a\xffb", strings.Repeat("y", 100_000), "\ud7ff", ""}
	times := []time.Time{{}, time.Unix(0, 0), time.Unix(math.MaxInt64/2, 0), time.Unix(math.MinInt64/2, 0), time.Date(9999, 1, 1, 0, 0, 0, 0, time.UTC)}
	for i, text := range odd {
		c := claim(fmt.Sprint("k", i))
		c.MessageID, c.Source, c.Worker, c.TraceID = text, text, text, text
		c.EventTime, c.Position, c.Attempt = times[i], broker.At(math.MaxInt64), math.MaxInt32
		c.Fingerprint = []byte(text)
		s.handle(c, []byte(text))
		s.wantClaim(c, inbox.Replay)
		if r := s.lookup(c.Key); r.Position != c.Position || string(r.Result) != text {
			s.Errorf("text %d: position %v, result of %d bytes", i, r.Position, len(r.Result))
		}
	}
}

// 8. A row past its window is claimed anew in the same transaction and then
// replaced; until Commit it is as it was. Without retention it is kept for ever.
func retention[Tx any](s *storeSuite[Tx]) {
	brief := claim("brief")
	brief.Retention, brief.MessageID = time.Millisecond, "old"
	s.handle(brief, []byte("old"))
	s.pause(20 * time.Millisecond)
	if r := s.lookup(brief.Key); r.MessageID != "old" {
		s.Errorf("an expired row must still be found by Lookup: %+v", r)
	}
	later := claim("brief")
	later.MessageID, later.Fingerprint = "new", []byte("other")
	b := s.begin(claim("x"), later, claim("a"))
	s.want(b, 1, inbox.FirstAttempt)
	b.Abort()
	if r := s.lookup(brief.Key); r.MessageID != "old" {
		s.Errorf("an aborted batch replaced an expired row: %+v", r)
	}
	s.handle(later, nil)
	if r := s.lookup(brief.Key); r.MessageID != "new" || r.Result != nil {
		s.Errorf("the expired row was not replaced: %+v", r)
	}
	s.wantClaim(brief, inbox.Conflict)
	for i, d := range []time.Duration{0, -time.Second} {
		forever := claim(fmt.Sprint("forever", i))
		forever.Retention = d
		s.handle(forever, nil)
		if r := s.lookup(forever.Key); !r.ExpiresAt.IsZero() {
			s.Errorf("retention %v expires at %v", d, r.ExpiresAt)
		}
	}
}

// 9. Results are stored with their key and come back byte for byte; nil and
// empty differ.
func results[Tx any](s *storeSuite[Tx]) {
	big := bytes.Repeat([]byte{0, 1, 0xff, '\''}, 100_000)
	want := [][]byte{nil, {}, []byte("null"), {0}, big}
	keys := []string{"r0", "r1", "r2", "r3", "r4"}
	b := s.begin(claims(keys...)...)
	for i, k := range keys {
		s.work(b, i, k, want[i])
	}
	s.commit(b)
	b = s.begin(claims(keys...)...)
	for i := range keys {
		s.want(b, i, inbox.Replay)
		if r := b.Entries()[i].Stored; r != nil && (!bytes.Equal(r.Result, want[i]) || (r.Result == nil) != (want[i] == nil)) {
			s.Errorf("result %d: %d bytes (nil: %v), want %d (nil: %v)", i, len(r.Result), r.Result == nil, len(want[i]), want[i] == nil)
		}
	}
}

// 10. A batch of a thousand claims works.
func largeBatch[Tx any](s *storeSuite[Tx]) {
	var cs []inbox.Claim
	for i := range 1000 {
		cs = append(cs, claim(fmt.Sprintf("%04d", (i*379)%1000)))
	}
	s.handle(cs[500], nil)
	b := s.begin(cs...)
	for i, c := range cs {
		if i == 500 {
			s.want(b, i, inbox.Replay)
			continue
		}
		s.want(b, i, inbox.FirstAttempt)
		if i%10 == 0 {
			s.work(b, i, c.MessageKey, []byte(c.MessageKey))
		}
	}
	s.commit(b)
	if n := s.count("select count(*) from inbox"); n != 100 {
		s.Errorf("%d rows, want 100: those that were finished", n)
	}
	s.wantEffects(cs[10].MessageKey, 1)
	if r := s.lookup(cs[10].Key); string(r.Result) != cs[10].MessageKey {
		s.Errorf("result %q of key %q", r.Result, cs[10].MessageKey)
	}
}

// isContext tells that err is the end of a context.
func isContext(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}
