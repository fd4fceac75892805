package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// maxError is how much of an error's text is stored.
const maxError = 8 << 10

// park inserts a parked row, unless there is one.
func park(ctx context.Context, q querier, d dialect, p inbox.Parked) error {
	if err := validKey(p.Key); err != nil {
		return err
	}
	m := p.Message
	if m == nil {
		m = &broker.Message{}
	}
	_, err := q.ExecContext(ctx, d.sql(`
		insert into @inbox_parked (tenant, consumer, message_key, fingerprint, lane, state, reason, error, attempts,
			message_id, source, position, broker_key, headers, body, message_time, event_time, worker, parked_at, updated_at)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, {time 16}, {time 17}, $18, {now}, {now})
		on conflict (tenant, consumer, message_key, fingerprint) do nothing`),
		p.Tenant, p.Consumer, column.Key(p.MessageKey), append([]byte{}, p.Fingerprint...), []byte(p.Lane),
		string(p.State), string(p.Reason), column.Text(p.Error, maxError), min(p.Attempts, math.MaxInt32),
		column.Text(m.ID, maxText), column.Text(m.Source, maxText), positionOrNull(m.Position),
		bytesOrNull(m.Key), bytesOrNull(column.EncodeHeaders(m.Headers)), bytesOrNull(m.Body),
		microsOrNull(m.Time), microsOrNull(p.EventTime), column.Text(p.Worker, maxText))
	return err
}

const parkedColumns = `p.id, p.tenant, p.consumer, p.message_key, p.fingerprint, p.lane, p.state, p.reason, p.error,
	p.attempts, p.duplicates, p.message_id, p.source, p.position, p.message_time, p.event_time, p.worker, p.parked_at, p.updated_at`

// scanParked reads a row of parkedColumns, and more columns after it.
func scanParked(scan func(dest ...any) error, more ...any) (*inbox.ParkedRecord, error) {
	r := &inbox.ParkedRecord{}
	m := &broker.Message{}
	r.Message = m
	var lane []byte
	err := scan(append([]any{
		&r.ID, &r.Tenant, &r.Consumer, &r.MessageKey, &r.Fingerprint, &lane, &r.State, &r.Reason, &r.Error,
		&r.Attempts, &r.Duplicates, &m.ID, &m.Source, (*position)(&m.Position), (*moment)(&m.Time),
		(*moment)(&r.EventTime), &r.Worker, (*moment)(&r.ParkedAt), (*moment)(&r.UpdatedAt),
	}, more...)...)
	if err != nil {
		return nil, err
	}
	r.Lane = string(lane)
	return r, nil
}

// ListParked returns parked rows, oldest first, without bodies and headers.
func (s *Store) ListParked(ctx context.Context, f inbox.ParkedFilter) ([]inbox.ParkedRecord, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	all, err := s.listParked(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: list parked messages: %w", s.failed(ctx, err))
	}
	return all, nil
}

func (s *Store) listParked(ctx context.Context, f inbox.ParkedFilter) (all []inbox.ParkedRecord, err error) {
	if f.Limit <= 0 {
		f.Limit = 100
	}
	if validKey(inbox.Key{Tenant: f.Tenant, Consumer: f.Consumer, MessageKey: f.MessageKey}) != nil {
		return nil, nil // Nothing is stored under such a name.
	}
	query, args := `select `+parkedColumns+` from @inbox_parked as p where p.id > $1`, []any{f.After}
	for _, filter := range []struct{ column, value string }{
		{"consumer", f.Consumer}, {"tenant", f.Tenant}, {"message_key", column.Key(f.MessageKey)},
		{"state", string(f.State)}, {"reason", string(f.Reason)},
	} {
		if filter.value != "" {
			args = append(args, filter.value)
			query += fmt.Sprintf(" and p.%s = $%d", filter.column, len(args))
		}
	}
	args = append(args, f.Limit)
	rows, err := s.db.QueryContext(ctx, s.d.sql(query+fmt.Sprintf(" order by p.id limit $%d", len(args))), args...)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		r, err := scanParked(rows.Scan)
		if err != nil {
			return nil, err
		}
		all = append(all, *r)
	}
	return all, rows.Err()
}

// GetParked returns one parked row whole. inbox.ErrNotFound when there is none.
func (s *Store) GetParked(ctx context.Context, id int64) (*inbox.ParkedRecord, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	r, err := s.getParked(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: get parked message %d: %w", id, s.failed(ctx, err))
	}
	return r, nil
}

func (s *Store) getParked(ctx context.Context, id int64) (*inbox.ParkedRecord, error) {
	var key, body, headers []byte
	var hasKey, hasBody bool
	row := s.db.QueryRowContext(ctx, s.d.sql(`select `+parkedColumns+`,
		p.broker_key, p.broker_key is not null, p.body, p.body is not null, p.headers from @inbox_parked as p where p.id = $1`), id)
	r, err := scanParked(row.Scan, &key, &hasKey, &body, &hasBody, &headers)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		return nil, inbox.ErrNotFound
	case err != nil:
		return nil, err
	}
	r.Message.Key, r.Message.Body = present(key, hasKey), present(body, hasBody)
	if r.Message.Headers, err = column.DecodeHeaders(headers); err != nil {
		return nil, err
	}
	return r, nil
}
