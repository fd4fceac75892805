package inboxpgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
)

// Claim implements inbox.Store. tx may be any pgx.Tx on the inbox's database:
// of a pool, a connection, or one that a handler was given.
//
// Errors of the server, such as a serialization failure or a lock timeout, leave
// tx in error, as any failed statement does.
func (s *Store) Claim(ctx context.Context, tx pgx.Tx, consumer, key string, opts ...inbox.ClaimOption) (inbox.Entry, error) {
	e, err := s.claimIn(ctx, tx, consumer, key, opts)
	if err != nil {
		return inbox.Entry{}, fmt.Errorf("inboxpgx: claim: %w", err)
	}
	return e, nil
}

func (s *Store) claimIn(ctx context.Context, tx pgx.Tx, consumer, key string, opts []inbox.ClaimOption) (inbox.Entry, error) {
	c, err := inbox.NewClaim(consumer, key, opts...)
	if err != nil {
		return inbox.Entry{}, err
	}
	if tx == nil {
		return inbox.Entry{}, errors.New("tx must not be nil")
	}
	set, err := newClaimSet([]inbox.Claim{c})
	if err != nil {
		return inbox.Entry{}, err
	}
	args := set.claimArgs(set.order)
	for range maxRounds {
		tag, err := tx.Exec(ctx, s.sql.claim, args...)
		if err != nil {
			return inbox.Entry{}, claimError(err)
		}
		if tag.RowsAffected() == 1 {
			return inbox.Entry{Outcome: inbox.FirstAttempt}, nil
		}
		row := new(storedRow)
		err = tx.QueryRow(ctx, s.sql.storedOne, set.oneArgs(0)[:3]...).Scan(append([]any{&row.n, &row.expired}, row.dest()...)...)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			continue // It was removed since.
		case err != nil:
			return inbox.Entry{}, claimError(err)
		case row.expired:
			if _, err := tx.Exec(ctx, s.sql.forget, args[:3]...); err != nil {
				return inbox.Entry{}, claimError(err)
			}
			continue
		case row.record.Status != inbox.StatusDone:
			return inbox.Entry{}, fmt.Errorf("%w: it is leased", inbox.ErrInFlight)
		}
		e := inbox.Entry{Outcome: inbox.Replay, Stored: row.done(key)}
		if other(c.Fingerprint, row.record.Fingerprint) {
			e.Outcome = inbox.Conflict
		}
		return e, nil
	}
	return inbox.Entry{}, fmt.Errorf("%w: %w", inbox.ErrInFlight, errRestless)
}

func claimError(err error) error {
	if state(err) == stateLockTimeout {
		return fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
	}
	return withoutSchema(err)
}

// SaveResult implements inbox.Store. A nil result takes a stored one back.
func (s *Store) SaveResult(ctx context.Context, tx pgx.Tx, consumer, key string, result []byte, opts ...inbox.ClaimOption) error {
	if err := s.saveResult(ctx, tx, consumer, key, result, opts); err != nil {
		return fmt.Errorf("inboxpgx: save result: %w", err)
	}
	return nil
}

func (s *Store) saveResult(ctx context.Context, tx pgx.Tx, consumer, key string, result []byte, opts []inbox.ClaimOption) error {
	c, err := inbox.NewClaim(consumer, key, opts...)
	if err != nil {
		return err
	}
	if tx == nil {
		return errors.New("tx must not be nil")
	}
	k := toStored(c.Key)
	tag, err := tx.Exec(ctx, s.sql.saveResult, k.tenant, k.consumer, k.key, result)
	if err != nil {
		return claimError(err)
	}
	if tag.RowsAffected() == 0 {
		return inbox.ErrNotFound
	}
	return nil
}
