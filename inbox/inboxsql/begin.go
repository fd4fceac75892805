package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// Begin opens a transaction and claims the keys in it, see inbox.Store.
//
// SQLite has one writer: there LockTimeout bounds the wait for any other writing
// transaction, this store's or another's.
func (s *Store) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[*sql.Tx], error) {
	if o.LockTimeout <= 0 {
		return nil, fmt.Errorf("inboxsql: begin: LockTimeout = %v: must be positive", o.LockTimeout)
	}
	sorted, err := sortedClaims(claims)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: begin: %w", err)
	}
	ctx, cancel := s.bound(ctx, o.LockTimeout)
	defer cancel()
	deadline := time.Now().Add(o.LockTimeout)
	for {
		b, err := s.begin(ctx, sorted, o, deadline)
		switch {
		case err == nil:
			return b, nil
		case s.d.clashed(err) && ctx.Err() == nil && time.Now().Before(deadline):
			continue // Above READ COMMITTED the loser of a claim has to begin anew.
		case s.d.lockTimedOut(err) && ctx.Err() == nil:
			err = fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
		}
		return nil, fmt.Errorf("inboxsql: begin: %w", s.timedOut(ctx, err))
	}
}

func (s *Store) begin(ctx context.Context, cs []claim, o inbox.BeginOptions, deadline time.Time) (*batch, error) {
	if err := s.awaitWriter(ctx, deadline); err != nil {
		return nil, err
	}
	session, err := borrow(ctx, s.db, s.writer != nil)
	if err != nil {
		s.freeWriter()
		return nil, err
	}
	session.before = o.BeforeStatement
	b := newBatch(s, session, cs, o)
	o.LockTimeout = max(time.Until(deadline), time.Millisecond)
	if err = s.d.open(ctx, session, o); err == nil {
		err = b.claimAll(ctx, deadline)
	}
	if err != nil {
		b.abort(ctx)
		return nil, err
	}
	return b, nil
}

// awaitWriter waits until no other batch of this store is open, where the
// database lets only one write. Waiting here is fair and costs nothing; SQLite's
// own wait is a poll.
func (s *Store) awaitWriter(ctx context.Context, deadline time.Time) error {
	if s.writer == nil {
		return nil
	}
	patience := time.NewTimer(time.Until(deadline))
	defer patience.Stop()
	select {
	case <-s.writer:
		if ctx.Err() != nil {
			s.freeWriter()
			return ctx.Err()
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-patience.C:
		return fmt.Errorf("%w: another transaction is writing", inbox.ErrInFlight)
	}
}

func (s *Store) freeWriter() {
	if s.writer != nil {
		s.writer <- struct{}{}
	}
}

// claimAll takes the keys and fills in the entries. In the usual case, all keys
// new and no message parked, that is one statement for the claims and one to
// look for parked rows.
func (b *batch) claimAll(ctx context.Context, deadline time.Time) error {
	pending := b.claims
	for round := 0; len(pending) > 0; round++ {
		if round > 0 {
			left := time.Until(deadline)
			if left <= 0 {
				return fmt.Errorf("%w: the row of a key comes and goes", inbox.ErrInFlight)
			}
			if err := b.store.d.patience(ctx, b.s, left); err != nil {
				return err
			}
		}
		var err error
		if pending, err = b.claimRound(ctx, pending); err != nil {
			return err
		}
	}
	return b.look(ctx, deadline)
}

// claimRound tries to take keys once and returns those that have to be tried
// again, because their rows went away in between.
func (b *batch) claimRound(ctx context.Context, cs []claim) (again []claim, err error) {
	d, q := b.store.d, b.s.own
	taken, err := d.take(ctx, q, cs)
	if err != nil {
		return nil, err
	}
	var rest, expired []claim
	for i, c := range cs {
		if !taken[i] {
			rest = append(rest, c)
			continue
		}
		b.entries[c.entry] = inbox.Entry{Outcome: inbox.FirstAttempt}
	}
	if len(rest) == 0 {
		return nil, nil
	}
	rows, err := d.read(ctx, q, rest)
	if err != nil {
		return nil, err
	}
	for i, c := range rest {
		switch row := rows[i]; {
		case row == nil:
			again = append(again, c)
		case row.expired:
			expired = append(expired, c)
		case row.record.Status == inbox.StatusProcessing:
			return nil, fmt.Errorf("%w: its work is under way elsewhere", inbox.ErrInFlight)
		default:
			b.entries[c.entry] = entryOf(&c, &row.record)
		}
	}
	if len(expired) == 0 {
		return again, nil
	}
	renewed, err := d.renew(ctx, q, expired)
	if err != nil {
		return nil, err
	}
	for i, c := range expired {
		if renewed[i] {
			b.entries[c.entry] = inbox.Entry{Outcome: inbox.FirstAttempt}
			continue
		}
		again = append(again, c)
	}
	return again, nil
}

// entryOf compares a claim with the row that has its key.
func entryOf(c *claim, r *inbox.Record) inbox.Entry {
	outcome := inbox.Replay
	if c.Fingerprint != nil && r.Fingerprint != nil && string(c.Fingerprint) != string(r.Fingerprint) {
		outcome = inbox.Conflict
	}
	return inbox.Entry{Outcome: outcome, Stored: r}
}

// Claim takes a key inside a transaction that the caller owns, see inbox.Store.
// Config.Timeout does not bound it: how long it may wait is the caller's to say.
//
// With SQLite the transaction should have begun as a writer, as it does with
// SQLiteDSN (_txlock=immediate): one that has read before may not be able to
// write any more, which is an inbox.ErrInFlight as well and means that it has to
// begin anew.
func (s *Store) Claim(ctx context.Context, tx *sql.Tx, consumer, key string, opts ...inbox.ClaimOption) (inbox.Entry, error) {
	if tx == nil {
		return inbox.Entry{}, errors.New("inboxsql: claim: tx: must not be nil")
	}
	c, err := inbox.NewClaim(consumer, key, opts...)
	if err != nil {
		return inbox.Entry{}, fmt.Errorf("inboxsql: claim: %w", err)
	}
	sorted, err := sortedClaims([]inbox.Claim{c})
	if err != nil {
		return inbox.Entry{}, fmt.Errorf("inboxsql: claim: %w", err)
	}
	e, err := s.claim(ctx, tx, sorted)
	if err != nil {
		err = s.d.explain(ctx, tx, marked(err))
		if s.d.lockTimedOut(err) && ctx.Err() == nil {
			err = fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
		}
		return inbox.Entry{}, fmt.Errorf("inboxsql: claim: %w", err)
	}
	return e, nil
}

func (s *Store) claim(ctx context.Context, tx *sql.Tx, cs []claim) (inbox.Entry, error) {
	for {
		taken, err := s.d.take(ctx, tx, cs)
		if err != nil {
			return inbox.Entry{}, err
		}
		if taken[0] {
			return inbox.Entry{Outcome: inbox.FirstAttempt}, nil
		}
		rows, err := s.d.read(ctx, tx, cs)
		if err != nil {
			return inbox.Entry{}, err
		}
		switch row := rows[0]; {
		case row == nil: // It went away in between.
		case row.expired:
			renewed, err := s.d.renew(ctx, tx, cs)
			if err != nil {
				return inbox.Entry{}, err
			}
			if renewed[0] {
				return inbox.Entry{Outcome: inbox.FirstAttempt}, nil
			}
		case row.record.Status == inbox.StatusProcessing:
			return inbox.Entry{}, fmt.Errorf("%w: its work is under way elsewhere", inbox.ErrInFlight)
		default:
			return entryOf(&cs[0], &row.record), nil
		}
	}
}

// SaveResult stores a result with a key that was claimed in tx by Claim, see
// inbox.Store.
func (s *Store) SaveResult(ctx context.Context, tx *sql.Tx, consumer, key string, result []byte, opts ...inbox.ClaimOption) error {
	if tx == nil {
		return errors.New("inboxsql: save result: tx: must not be nil")
	}
	c, err := inbox.NewClaim(consumer, key, opts...)
	if err != nil {
		return fmt.Errorf("inboxsql: save result: %w", err)
	}
	sorted, err := sortedClaims([]inbox.Claim{c})
	if err != nil {
		return fmt.Errorf("inboxsql: save result: %w", err)
	}
	n, err := affected(tx.ExecContext(ctx,
		s.d.sql(`update @inbox set result = $1 where tenant = $2 and consumer = $3 and message_key = $4`),
		bytesOrNull(result), c.Tenant, c.Consumer, sorted[0].key))
	switch {
	case err != nil:
		return fmt.Errorf("inboxsql: save result: %w", s.d.explain(ctx, tx, marked(err)))
	case n == 0:
		return fmt.Errorf("inboxsql: save result of consumer %q: the key: %w", consumer, inbox.ErrNotFound)
	}
	return nil
}
