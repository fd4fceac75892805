package inboxtest

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

func ownerRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "claim in an own transaction", run: ownClaim[Tx]},
		{name: "claim in an own transaction: invalid input", run: ownClaimInvalid[Tx]},
		{name: "claim in an own transaction: race", levels: true, run: ownClaimRace[Tx]},
		{name: "claim in an own transaction: expired", run: ownClaimExpired[Tx]},
		{name: "save result", run: saveResult[Tx]},
		{name: "lookup and find", run: lookupAndFind[Tx]},
		{name: "check", run: check[Tx]},
		{name: "check without tables", run: checkWithoutTables[Tx]},
		{name: "register", run: register[Tx]},
	}
}

// errUndo makes Own roll back.
var errUndo = errors.New("undo")

// own runs fn in an own transaction that commits.
func (s *storeSuite[Tx]) own(fn func(tx Tx) error) {
	s.Helper()
	if err := s.Own(s.ctx, fn); err != nil {
		s.Fatal(err)
	}
}

// ownOutcome claims key and wants the outcome.
func (s *storeSuite[Tx]) ownOutcome(tx Tx, key string, want inbox.Outcome, opts ...inbox.ClaimOption) error {
	e, err := s.Store.Claim(s.ctx, tx, "billing", key, opts...)
	if err != nil {
		return fmt.Errorf("claim of %q: %w", key, err)
	}
	if e.Outcome != want || e.Claimed() != (want == inbox.FirstAttempt) || (e.Stored != nil) != (want != inbox.FirstAttempt) {
		return fmt.Errorf("claim of %q: outcome %q, stored %v; want %q", key, e.Outcome, e.Stored, want)
	}
	return nil
}

// 44. Claim takes a key if and only if its owner's transaction commits.
func ownClaim[Tx any](s *storeSuite[Tx]) {
	err := s.Own(s.ctx, func(tx Tx) error {
		if err := s.ownOutcome(tx, "k1", inbox.FirstAttempt); err != nil {
			return err
		}
		if err := s.ownOutcome(tx, "k1", inbox.Replay); err != nil {
			return fmt.Errorf("a second time: %w", err)
		}
		return errUndo
	})
	if !errors.Is(err, errUndo) {
		s.Fatal(err)
	}
	s.wantRow(claim("k1").Key, false)
	s.own(func(tx Tx) error {
		if err := s.ownOutcome(tx, "k1", inbox.FirstAttempt, inbox.WithFingerprint([]byte("fp"))); err != nil {
			return err
		}
		return s.Exec(s.ctx, tx, insertEffect("k1"))
	})
	s.wantEffects("k1", 1)
	s.wantClaim(claim("k1"), inbox.Replay)
	if r := s.lookup(claim("k1").Key); r.ExpiresAt.Sub(r.ProcessedAt).Round(time.Hour) != inbox.DefaultRetention || r.Attempts != 1 || r.Worker == "" {
		s.Errorf("row: %+v", r)
	}
	long := randomText(3000)
	s.own(func(tx Tx) error {
		return errors.Join(
			s.ownOutcome(tx, "k1", inbox.Replay),
			s.ownOutcome(tx, "k1", inbox.Replay, inbox.WithFingerprint([]byte("fp"))),
			s.ownOutcome(tx, "k1", inbox.Conflict, inbox.WithFingerprint([]byte("other"))),
			s.ownOutcome(tx, "k1", inbox.FirstAttempt, inbox.WithTenant("t1")),
			s.ownOutcome(tx, long, inbox.FirstAttempt, inbox.WithRetention(-1)),
			s.ownOutcome(tx, long, inbox.Replay),
		)
	})
	if r := s.lookup(claim(long).Key); r.MessageKey != long || !r.ExpiresAt.IsZero() {
		s.Errorf("long key: %q, expires %v", short(r.MessageKey), r.ExpiresAt)
	}
}

// 45. Invalid names and keys are errors that say what is wrong, and the
// transaction goes on.
func ownClaimInvalid[Tx any](s *storeSuite[Tx]) {
	s.own(func(tx Tx) error {
		for _, c := range []struct{ consumer, key, tenant, names string }{
			{"", "k", "", "consumer"},
			{"a\x00b", "k", "", "consumer"},
			{strings.Repeat("x", 1000), "k", "", "consumer"},
			{"billing", "", "", "key"},
			{"billing", "a\x00b", "", "key"},
			{"billing", "a\xffb", "", "key"},
			{"billing", strings.Repeat("x", 1<<20), "", "key"},
			{"billing", "k", "a\xff", "tenant"},
		} {
			_, err := s.Store.Claim(s.ctx, tx, c.consumer, c.key, inbox.WithTenant(c.tenant))
			if err == nil || !strings.Contains(err.Error(), c.names) {
				return fmt.Errorf("claim with an invalid %s: %w", c.names, errors.Join(err, errors.New("want an error that names it")))
			}
			err = s.Store.SaveResult(s.ctx, tx, c.consumer, c.key, nil, inbox.WithTenant(c.tenant))
			if err == nil || errors.Is(err, inbox.ErrNotFound) || !strings.Contains(err.Error(), c.names) {
				return fmt.Errorf("result with an invalid %s: %w", c.names, errors.Join(err, errors.New("want an error that names it")))
			}
		}
		return s.ownOutcome(tx, "k1", inbox.FirstAttempt)
	})
	s.wantRow(claim("k1").Key, true)
}

// 46. Claim and Begin keep each other out.
func ownClaimRace[Tx any](s *storeSuite[Tx]) {
	claimed, release := make(chan struct{}), make(chan struct{})
	owner := async(func() error {
		return s.Own(s.ctx, func(tx Tx) error {
			err := s.ownOutcome(tx, "k1", inbox.FirstAttempt)
			close(claimed)
			<-release
			return err
		})
	})
	<-claimed
	b := s.beginAsync(options(), claim("k1"))
	s.waiting(1)
	close(release)
	if err := <-owner; err != nil {
		s.Fatal(err)
	}
	s.want(s.await(b), 0, inbox.Replay)
}

// 47. Claim takes an expired key anew.
func ownClaimExpired[Tx any](s *storeSuite[Tx]) {
	brief := claim("k1")
	brief.Retention, brief.MessageID = time.Millisecond, "old"
	s.handle(brief, []byte("old"))
	s.pause(20 * time.Millisecond)
	s.own(func(tx Tx) error { return s.ownOutcome(tx, "k1", inbox.FirstAttempt) })
	if r := s.lookup(brief.Key); r.MessageID != "" || r.Result != nil {
		s.Errorf("the expired row was not replaced: %+v", r)
	}
}

// 48. SaveResult stores a result with a claimed key, in its owner's
// transaction.
func saveResult[Tx any](s *storeSuite[Tx]) {
	long := randomText(3000)
	for _, key := range []string{"k1", long} {
		err := s.Own(s.ctx, func(tx Tx) error {
			if err := s.ownOutcome(tx, key, inbox.FirstAttempt); err != nil {
				return err
			}
			return errors.Join(s.Store.SaveResult(s.ctx, tx, "billing", key, []byte("undone")), errUndo)
		})
		if !errors.Is(err, errUndo) || s.hasRow(claim(key).Key) {
			s.Fatalf("rolled back: %v, row %v", err, s.hasRow(claim(key).Key))
		}
		s.own(func(tx Tx) error {
			if err := s.Store.SaveResult(s.ctx, tx, "billing", key, []byte("early")); !errors.Is(err, inbox.ErrNotFound) {
				return fmt.Errorf("SaveResult before the claim: %w", errors.Join(err, errors.New("want ErrNotFound")))
			}
			if err := s.ownOutcome(tx, key, inbox.FirstAttempt, inbox.WithTenant("t1")); err != nil {
				return err
			}
			if err := s.Store.SaveResult(s.ctx, tx, "billing", key, []byte("x")); !errors.Is(err, inbox.ErrNotFound) {
				return fmt.Errorf("SaveResult for another tenant: %w", errors.Join(err, errors.New("want ErrNotFound")))
			}
			return s.Store.SaveResult(s.ctx, tx, "billing", key, []byte{0, 0xff}, inbox.WithTenant("t1"))
		})
		k := claim(key).Key
		k.Tenant = "t1"
		if r := s.lookup(k); string(r.Result) != "\x00\xff" {
			s.Errorf("result %q", r.Result)
		}
	}
}

// 49. Lookup finds one row or says ErrNotFound; Find finds a message key's rows
// over all consumers and tenants.
func lookupAndFind[Tx any](s *storeSuite[Tx]) {
	if _, err := s.Store.Lookup(s.ctx, claim("none").Key); !errors.Is(err, inbox.ErrNotFound) {
		s.Errorf("Lookup of no row: %v, want ErrNotFound", err)
	}
	for _, scope := range []inbox.Key{{Consumer: "shipping"}, {Consumer: "billing", Tenant: "t2"}, {Consumer: "billing", Tenant: "t1"}, {Consumer: "billing"}} {
		c := claim("k1")
		c.Consumer, c.Tenant, c.MessageID = scope.Consumer, scope.Tenant, scope.Consumer+scope.Tenant
		s.handle(c, nil)
		if r := s.lookup(c.Key); r.Key != c.Key || r.MessageID != c.MessageID {
			s.Errorf("Lookup of %v: %+v", c.Key, r)
		}
	}
	s.handle(claim("k2"), nil)
	in, ok := s.Store.(inbox.Inspector)
	if !ok {
		return
	}
	rows, err := in.Find(s.ctx, "k1")
	if err != nil {
		s.Fatal(err)
	}
	got := ""
	for _, r := range rows {
		got += r.Consumer + "/" + r.Tenant + "/" + r.MessageKey + " "
	}
	if want := "billing//k1 billing/t1/k1 billing/t2/k1 shipping//k1 "; got != want {
		s.Errorf("Find: %s, want %s", got, want)
	}
	if rows, err := in.Find(s.ctx, "none"); err != nil || rows != nil {
		s.Errorf("Find of no row: %v, %v", rows, err)
	}
}

// 50. Check is content with the tables of this release and names both versions
// otherwise.
func check[Tx any](s *storeSuite[Tx]) {
	if err := s.Store.Check(s.ctx); err != nil {
		s.Fatalf("Check: %v", err)
	}
	s.outside("update inbox_schema set version = 99")
	err := s.Store.Check(s.ctx)
	var v *inbox.SchemaVersionError
	if !errors.Is(err, inbox.ErrSchemaVersion) || !errors.As(err, &v) || v.Have != 99 || v.Need == 0 {
		s.Errorf("Check of version 99: %v", err)
	}
}

// 51. Check without tables is ErrNoSchema.
func checkWithoutTables[Tx any](s *storeSuite[Tx]) {
	s.outside("drop table inbox_schema")
	if err := s.Store.Check(s.ctx); !errors.Is(err, inbox.ErrNoSchema) {
		s.Errorf("Check without inbox_schema: %v, want ErrNoSchema", err)
	}
	s.outside("drop table inbox")
	if b, err := s.Store.Begin(s.ctx, claims("k1"), options()); err == nil {
		b.Abort()
		s.Error("Begin without tables succeeds")
	} else if got := s.Store.Classify(err); got == inbox.ClassContention {
		s.Errorf("Begin without tables: %v: class %d", err, got)
	}
}

// 52. Register accepts a first and an equal definition; another one is an error
// that names both, unless the stored one is confirmed to be replaced.
func register[Tx any](s *storeSuite[Tx]) {
	reg := func(def, replaces string) error {
		return s.Store.Register(s.ctx, inbox.Registration{Consumer: "billing", KeyDefinition: def, Replaces: replaces, Retention: time.Hour})
	}
	for range 2 {
		if err := reg("json:a;v1", ""); err != nil {
			s.Fatalf("Register: %v", err)
		}
	}
	for _, replaces := range []string{"", "json:b;v1", "json:x;v1"} {
		err := reg("json:b;v1", replaces)
		var def *inbox.KeyDefinitionError
		if !errors.As(err, &def) || def.Consumer != "billing" || def.Stored != "json:a;v1" || def.Now != "json:b;v1" {
			s.Errorf("Register of another definition that replaces %q: %v", replaces, err)
		}
	}
	if err := reg("json:b;v1", "json:a;v1"); err != nil {
		s.Errorf("a confirmed replacement: %v", err)
	}
	if err := reg("json:b;v1", "json:a;v1"); err != nil {
		s.Errorf("a confirmed replacement, started again: %v", err)
	}
	if err := reg("json:a;v1", ""); err == nil {
		s.Error("the replaced definition is accepted")
	}
	other := inbox.Registration{Consumer: "shipping", KeyDefinition: "json:z;v1", Retention: -1}
	if err := s.Store.Register(s.ctx, other); err != nil {
		s.Errorf("Register of another consumer: %v", err)
	}
	const n = 8
	done := make(chan error, n)
	for range n {
		go func() {
			done <- s.Store.Register(s.ctx, inbox.Registration{Consumer: "at once", KeyDefinition: "d", Retention: time.Hour})
		}()
	}
	for range n {
		if err := <-done; err != nil {
			s.Errorf("one of several at once: %v", err)
		}
	}
}
