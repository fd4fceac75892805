package inboxsql

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// maxError is how much of an error's text is stored.
const maxError = 8 << 10

// park inserts a parked row, unless there is one, or changes the one that p has a
// lease of.
func park(ctx context.Context, q querier, d dialect, p inbox.Parked) error {
	if p.Lease.ID != 0 {
		return parkAgain(ctx, q, d, p)
	}
	if err := validKey(p.Key); err != nil {
		return err
	}
	m := p.Message
	if m == nil {
		m = &broker.Message{}
	}
	_, err := q.ExecContext(ctx, d.sql(`
		insert into @inbox_parked (tenant, consumer, message_key, fingerprint, lane, state, reason, error, attempts,
			message_id, source, position, broker_key, headers, body, message_time, event_time, worker, failure,
			next_attempt_at, dead_at, parked_at, updated_at)
		values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, `+d.time(16)+`, `+d.time(17)+`, $18, $19,
			`+d.after(20)+`, `+d.after(21)+`, {now}, {now})
		on conflict (tenant, consumer, message_key, fingerprint) do nothing`),
		p.Tenant, p.Consumer, column.Key(p.MessageKey), append([]byte{}, p.Fingerprint...), column.Lane(p.Lane),
		string(p.State), string(p.Reason), column.Text(p.Error, maxError), min(p.Attempts, math.MaxInt32),
		column.Text(m.ID, maxText), column.Text(m.Source, maxText), positionOrNull(m.Position),
		bytesOrNull(m.Key), bytesOrNull(column.EncodeHeaders(m.Headers)), bytesOrNull(m.Body),
		microsOrNull(m.Time), microsOrNull(p.EventTime), column.Text(p.Worker, maxText), column.Text(p.Failure, maxText),
		untilDue(p), sinceDead(p.State))
	return err
}

// parkAgain ends a lease with a verdict.
func parkAgain(ctx context.Context, q querier, d dialect, p inbox.Parked) error {
	n, err := affected(q.ExecContext(ctx, d.sql(`
		update @inbox_parked set state = $3, reason = $4, error = $5, failure = $6, attempts = $7, worker = $8,
			next_attempt_at = `+d.after(9)+`, dead_at = `+d.after(10)+`, lease_until = null, updated_at = {now}
		where id = $1 and token = $2 and lease_until is not null`),
		p.Lease.ID, p.Lease.Token, string(p.State), string(p.Reason), column.Text(p.Error, maxError),
		column.Text(p.Failure, maxText), min(p.Attempts, math.MaxInt32), column.Text(p.Worker, maxText),
		untilDue(p), sinceDead(p.State)))
	if err == nil && n == 0 {
		return fmt.Errorf("the lease of parked message %d is over: %w", p.Lease.ID, inbox.ErrNotFound)
	}
	return err
}

// untilDue is the time until the next attempt in microseconds; nil for none.
func untilDue(p inbox.Parked) any {
	if p.State != inbox.ParkedRetry {
		return nil
	}
	return max(p.After, 0).Microseconds()
}

// sinceDead is 0, for now, in the states that have such a time; else nil.
func sinceDead(s inbox.ParkedState) any {
	if s != inbox.ParkedDead && s != inbox.ParkedDiscarded {
		return nil
	}
	return 0
}

// parkedColumns are the columns of inbox_parked as p, without what only getting
// one row is for.
const parkedColumns = `p.id, p.tenant, p.consumer, p.message_key, p.fingerprint, p.lane, p.state, p.reason, p.error, p.failure,
	p.attempts, p.duplicates, p.message_id, p.source, p.position, p.message_time, p.event_time, p.worker,
	case p.state when 'retry' then coalesce(p.next_attempt_at, p.parked_at) end, p.lease_until,
	case when p.state in ('dead', 'discarded') then coalesce(p.dead_at, p.parked_at) end, p.parked_at, p.updated_at`

// scanParked reads a row of parkedColumns, and more columns after it.
func scanParked(scan func(dest ...any) error, more ...any) (*inbox.ParkedRecord, error) {
	r := &inbox.ParkedRecord{}
	m := &broker.Message{}
	r.Message = m
	var lane []byte
	err := scan(append([]any{
		&r.ID, &r.Tenant, &r.Consumer, &r.MessageKey, &r.Fingerprint, &lane, &r.State, &r.Reason, &r.Error, &r.Failure,
		&r.Attempts, &r.Duplicates, &m.ID, &m.Source, (*position)(&m.Position), (*moment)(&m.Time),
		(*moment)(&r.EventTime), &r.Worker,
		(*moment)(&r.NextAttempt), (*moment)(&r.LeasedUntil), (*moment)(&r.Died), (*moment)(&r.ParkedAt), (*moment)(&r.UpdatedAt),
	}, more...)...)
	if err != nil {
		return nil, err
	}
	r.Lane = string(lane)
	return r, nil
}

// wholeColumns are all that there is of a message.
const wholeColumns = parkedColumns + `, coalesce(p.token, 0), p.broker_key, p.broker_key is not null, p.body, p.body is not null, p.headers`

// scanWhole reads a row of wholeColumns. It also returns the token of the last
// lease.
func scanWhole(scan func(dest ...any) error) (r *inbox.ParkedRecord, token int64, err error) {
	var key, body, headers []byte
	var hasKey, hasBody bool
	r, err = scanParked(scan, &token, &key, &hasKey, &body, &hasBody, &headers)
	if err != nil {
		return nil, 0, err
	}
	r.Message.Key, r.Message.Body = present(key, hasKey), present(body, hasBody)
	if r.Message.Headers, err = column.DecodeHeaders(headers); err != nil {
		return nil, 0, fmt.Errorf("parked message %d: %w", r.ID, err)
	}
	return r, token, nil
}

// filtered returns the condition of a filter on inbox_parked as p, and its
// arguments; ok is false when nothing can match.
func filtered(d dialect, f inbox.ParkedFilter) (where string, args []any, ok bool) {
	where = "true"
	for _, c := range []struct{ condition, value string }{
		{"p.consumer = $%d", f.Consumer}, {"p.tenant = $%d", f.Tenant}, {"p.state = $%d", string(f.State)},
		{"p.reason = $%d", string(f.Reason)}, {"p.failure = $%d", f.Failure}, {"{find}(p.error, $%d) > 0", f.Error},
	} {
		if c.value == "" {
			continue
		}
		if !storable(c.value) {
			return "", nil, false
		}
		args = append(args, c.value)
		where += " and " + fmt.Sprintf(c.condition, len(args))
	}
	if f.MessageKey != "" {
		if !storable(f.MessageKey) {
			return "", nil, false
		}
		forms := column.Forms(f.MessageKey)
		args = append(args, forms[0], forms[len(forms)-1])
		where += fmt.Sprintf(" and p.message_key in ($%d, $%d)", len(args)-1, len(args))
	}
	for _, t := range []struct {
		operator string
		value    time.Time
	}{{">=", f.Since}, {"<", f.Before}} {
		if !t.value.IsZero() {
			args = append(args, microsOrNull(t.value))
			where += " and p.parked_at " + t.operator + " " + d.time(len(args))
		}
	}
	return where, args, true
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
	where, args, ok := filtered(s.d, f)
	if !ok {
		return nil, nil
	}
	args = append(args, f.After, f.Limit)
	err = s.query(ctx, `select `+parkedColumns+` from @inbox_parked as p where `+where+
		fmt.Sprintf(` and p.id > $%d order by p.id limit $%d`, len(args)-1, len(args)),
		func(rows *sql.Rows) error {
			r, err := scanParked(rows.Scan)
			if err == nil {
				all = append(all, *r)
			}
			return err
		}, args...)
	return all, err
}

// GetParked returns one parked row whole. inbox.ErrNotFound when there is none.
func (s *Store) GetParked(ctx context.Context, id int64) (*inbox.ParkedRecord, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	r, _, err := scanWhole(s.db.QueryRowContext(ctx, s.d.sql(`select `+wholeColumns+` from @inbox_parked as p where p.id = $1`), id).Scan)
	switch {
	case errors.Is(err, sql.ErrNoRows):
		err = inbox.ErrNotFound
	case err == nil:
		return r, nil
	}
	return nil, fmt.Errorf("inboxsql: get parked message %d: %w", id, s.failed(ctx, err))
}
