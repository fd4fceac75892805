package inboxpgx

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// parkedPage is how many parked rows are listed by default.
const parkedPage = 100

// Lookup implements inbox.Store.
func (s *Store) Lookup(ctx context.Context, key inbox.Key) (*inbox.Record, error) {
	k := toStored(key)
	r := new(recordScan)
	err := s.pool.QueryRow(ctx, s.sql.lookup, k.tenant, k.consumer, k.key).Scan(r.dest()...)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: lookup: %w", notFound(err))
	}
	return r.done(key.MessageKey), nil
}

// notFound turns the absence of a row into inbox.ErrNotFound.
func notFound(err error) error {
	if errors.Is(err, pgx.ErrNoRows) {
		return inbox.ErrNotFound
	}
	return withoutSchema(markedByPool(err))
}

// Find implements inbox.Inspector. It reads the whole table: there is no index
// by message key alone, since every claim would have to pay for it.
func (s *Store) Find(ctx context.Context, messageKey string) ([]inbox.Record, error) {
	rows, err := s.pool.Query(ctx, s.sql.find, column.Key(messageKey))
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: find: %w", notFound(err))
	}
	var found []inbox.Record
	r := new(recordScan)
	_, err = pgx.ForEachRow(rows, r.dest(), func() error {
		found = append(found, *r.done(messageKey))
		*r = recordScan{}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: find: %w", notFound(err))
	}
	return found, nil
}

// ListParked implements inbox.Inspector. A key or lane of more than 512 bytes is
// given as it is stored, shortened with a hash; the filter finds a key by its own
// text and by that. A filter by Error reads all the rows that the others leave.
func (s *Store) ListParked(ctx context.Context, f inbox.ParkedFilter) ([]inbox.ParkedRecord, error) {
	if f.Limit <= 0 {
		f.Limit = parkedPage
	}
	args := append(filterArgs(&f), f.After, int64(f.Limit))
	rows, err := s.pool.Query(ctx, s.sql.listParked, args...)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: list parked: %w", notFound(err))
	}
	var found []inbox.ParkedRecord
	r := new(parkedScan)
	_, err = pgx.ForEachRow(rows, r.dest(), func() error {
		found = append(found, *r.done())
		*r = parkedScan{}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: list parked: %w", notFound(err))
	}
	return found, nil
}

// GetParked implements inbox.Inspector.
func (s *Store) GetParked(ctx context.Context, id int64) (*inbox.ParkedRecord, error) {
	r := new(parkedScan)
	if err := s.pool.QueryRow(ctx, s.sql.getParked, id).Scan(r.whole()...); err != nil {
		return nil, fmt.Errorf("inboxpgx: get parked row %d: %w", id, notFound(err))
	}
	record, err := r.doneWhole()
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: get parked row %d: %w", id, err)
	}
	return record, nil
}

// filterArgs are the parameters of parkedFilter.
func filterArgs(f *inbox.ParkedFilter) []any {
	var keys []string
	if f.MessageKey != "" {
		keys = column.Forms(f.MessageKey)
	}
	return []any{
		f.Consumer, f.Tenant, keys, string(f.State), string(f.Reason), f.Failure, column.Text(f.Error, maxError),
		toTime(f.Since), toTime(f.Before),
	}
}

// parkedScan reads one row of parkedColumns.
type parkedScan struct {
	record                           inbox.ParkedRecord
	message                          broker.Message
	lane, headers                    []byte
	position                         *int64
	messageTime, eventTime           *time.Time
	nextAttempt, leasedUntil, diedAt *time.Time
}

func (r *parkedScan) dest() []any {
	x, m := &r.record, &r.message
	return []any{
		&x.ID, &x.Tenant, &x.Consumer, &x.MessageKey, &x.Fingerprint, &r.lane, &x.State, &x.Reason, &x.Error, &x.Failure,
		&x.Attempts, &x.Duplicates, &m.ID, &m.Source, &r.position, &r.messageTime, &r.eventTime, &x.Worker,
		&r.nextAttempt, &r.leasedUntil, &r.diedAt, &x.ParkedAt, &x.UpdatedAt,
	}
}

// whole is dest with the message's content.
func (r *parkedScan) whole() []any {
	return append(r.dest(), &r.message.Key, &r.headers, &r.message.Body)
}

// doneWhole is done after whole.
func (r *parkedScan) doneWhole() (*inbox.ParkedRecord, error) {
	var err error
	if r.message.Headers, err = column.DecodeHeaders(r.headers); err != nil {
		return nil, err
	}
	return r.done(), nil
}

func (r *parkedScan) done() *inbox.ParkedRecord {
	x, m := r.record, r.message
	m.Position, m.Time = fromPosition(r.position), fromTime(r.messageTime)
	x.Message, x.Lane, x.EventTime = &m, string(r.lane), fromTime(r.eventTime)
	x.NextAttempt, x.LeasedUntil, x.Died = fromTime(r.nextAttempt), fromTime(r.leasedUntil), fromTime(r.diedAt)
	x.ParkedAt, x.UpdatedAt = x.ParkedAt.UTC(), x.UpdatedAt.UTC()
	return &x
}
