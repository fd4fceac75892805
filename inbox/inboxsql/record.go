package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// recordColumns are the columns of inbox as i that scanRecord reads. Some
// drivers do not tell an empty value from NULL, hence the extra columns.
const recordColumns = `i.tenant, i.consumer, i.message_key, i.status, i.fingerprint, i.fingerprint is not null,
	i.message_id, i.source, i.position, i.event_time, i.worker, i.trace_id, i.attempts,
	i.result, i.result is not null, i.processed_at, i.expires_at, ` + isExpired

// isExpired tells that a row is past its window; a lease that is held keeps it.
const isExpired = `(i.expires_at is not null and i.expires_at <= {now}
	and (i.status = 'done' or i.lease_until is null or i.lease_until <= {now}))`

// scanRecord reads a row of recordColumns, and more columns after it.
func scanRecord(scan func(dest ...any) error, more ...any) (*found, error) {
	var f found
	var hasFingerprint, hasResult bool
	r := &f.record
	err := scan(append([]any{
		&r.Tenant, &r.Consumer, &r.MessageKey, &r.Status, &r.Fingerprint, &hasFingerprint,
		&r.MessageID, &r.Source, (*position)(&r.Position), (*moment)(&r.EventTime), &r.Worker, &r.TraceID, &r.Attempts,
		&r.Result, &hasResult, (*moment)(&r.ProcessedAt), (*moment)(&r.ExpiresAt), &f.expired,
	}, more...)...)
	if err != nil {
		return nil, err
	}
	r.Fingerprint = present(r.Fingerprint, hasFingerprint)
	r.Result = present(r.Result, hasResult)
	return &f, nil
}

// present tells an empty value from NULL.
func present(b []byte, has bool) []byte {
	if has && b == nil {
		return []byte{}
	}
	return b
}

// moment scans a time: PostgreSQL has them as such, SQLite as microseconds.
type moment time.Time

func (m *moment) Scan(v any) error {
	switch v := v.(type) {
	case nil:
		*m = moment{}
	case time.Time:
		*m = moment(v.UTC())
	case int64:
		*m = moment(time.UnixMicro(v).UTC())
	default:
		return fmt.Errorf("inboxsql: a time is stored as %T", v)
	}
	return nil
}

// position scans a position, NULL for none.
type position broker.Position

func (p *position) Scan(v any) error {
	var n sql.NullInt64
	if err := n.Scan(v); err != nil {
		return err
	}
	*p = position{Offset: n.Int64, Known: n.Valid}
	return nil
}

func positionOrNull(p broker.Position) any {
	if !p.Known {
		return nil
	}
	return p.Offset
}

func bytesOrNull(b []byte) any {
	if b == nil {
		return nil
	}
	return b
}

// microsOrNull is a time in microseconds; NULL for none, and for times that no
// database and no calendar has.
func microsOrNull(t time.Time) any {
	if y := t.Year(); t.IsZero() || y < 1 || y > 9999 {
		return nil
	}
	return t.UnixMicro()
}

// Lookup returns the row of a key, expired or not. inbox.ErrNotFound when there
// is none.
func (s *Store) Lookup(ctx context.Context, key inbox.Key) (*inbox.Record, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	r, err := s.lookup(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: look up a key of consumer %q: %w", key.Consumer, s.failed(ctx, err))
	}
	return r, nil
}

func (s *Store) lookup(ctx context.Context, key inbox.Key) (*inbox.Record, error) {
	if validKey(key) != nil {
		return nil, inbox.ErrNotFound // No store would have taken it.
	}
	row := s.db.QueryRowContext(ctx, s.d.sql(`select `+recordColumns+`
		from @inbox as i where tenant = $1 and consumer = $2 and message_key = $3`),
		key.Tenant, key.Consumer, column.Key(key.MessageKey))
	f, err := scanRecord(row.Scan)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, inbox.ErrNotFound
	case err != nil:
		return nil, err
	}
	f.record.MessageKey = key.MessageKey
	return &f.record, nil
}

// Find returns the rows of a message key over all consumers and tenants, ordered
// by consumer and tenant; nil when there are none. A long key is found by its text
// and by what is stored of it. It reads the whole table.
func (s *Store) Find(ctx context.Context, messageKey string) ([]inbox.Record, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	all, err := s.find(ctx, messageKey)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: find a key: %w", s.failed(ctx, err))
	}
	return all, nil
}

func (s *Store) find(ctx context.Context, messageKey string) (all []inbox.Record, err error) {
	if !storable(messageKey) {
		return nil, nil
	}
	forms := column.Forms(messageKey)
	err = s.query(ctx, `select `+recordColumns+`
		from @inbox as i where message_key in ($1, $2) order by consumer, tenant`, func(rows *sql.Rows) error {
		f, err := scanRecord(rows.Scan)
		if err == nil {
			f.record.MessageKey = messageKey
			all = append(all, f.record)
		}
		return err
	}, forms[0], forms[len(forms)-1])
	return all, err
}
