package inboxsql

import (
	"context"
	"database/sql"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

var _ inbox.Marker = (*Store)(nil)

// Beat records that a run is alive, see inbox.Marker.
func (s *Store) Beat(ctx context.Context, consumer string, r inbox.RunRecord) ([]inbox.RunRecord, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	var runs []inbox.RunRecord
	err := s.query(ctx, `select r.run_id, r.worker, r.host, -(`+s.d.until("r.beat_at")+`)
		from @inbox_runs as r where r.consumer = $1 order by r.run_id`,
		func(rows *sql.Rows) error {
			var run inbox.RunRecord
			var age int64
			err := rows.Scan(&run.ID, &run.Worker, &run.Host, &age)
			run.Age = max(time.Duration(age)*time.Microsecond, 0)
			runs = append(runs, run)
			return err
		}, consumer)
	if err == nil {
		err = s.mark(ctx, `insert into @inbox_runs (consumer, run_id, worker, host, started_at, beat_at)
			values ($1, $2, $3, $4, {now}, {now})
			on conflict (consumer, run_id) do update set beat_at = excluded.beat_at`,
			nil, consumer, r.ID, column.Text(r.Worker, maxText), column.Text(r.Host, maxText))
	}
	if err != nil {
		return nil, fmt.Errorf("inboxsql: record a run of consumer %q: %w", consumer, s.failed(ctx, err))
	}
	return runs, nil
}

// EndRuns forgets runs, see inbox.Marker.
func (s *Store) EndRuns(ctx context.Context, consumer string, ids ...string) error {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	var err error
	for _, id := range ids {
		if err == nil {
			err = s.mark(ctx, `delete from @inbox_runs where consumer = $1 and run_id = $2`, nil, consumer, id)
		}
	}
	if err == nil && len(ids) > 0 {
		err = s.mark(ctx, `delete from @inbox_starts where consumer = $1 and updated_at <= `+s.d.after(2),
			nil, consumer, -inbox.MarkRetention.Microseconds())
	}
	if err != nil {
		return fmt.Errorf("inboxsql: end runs of consumer %q: %w", consumer, s.failed(ctx, err))
	}
	return nil
}

// MarkStart records that a message is about to be run, see inbox.Marker.
func (s *Store) MarkStart(ctx context.Context, c inbox.Claim) (int, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	n, err := s.markStart(ctx, &c)
	if err != nil {
		return 0, fmt.Errorf("inboxsql: mark a message of consumer %q: %w", c.Consumer, s.failed(ctx, err))
	}
	return n, nil
}

func (s *Store) markStart(ctx context.Context, c *inbox.Claim) (n int, err error) {
	if err := validKey(c.Key); err != nil {
		return 0, err
	}
	args := markArgs(c)
	done := false
	err = s.query(ctx, `select i.message_key from @inbox as i
		where i.tenant = $1 and i.consumer = $2 and i.message_key = $3 and not `+isExpired,
		func(*sql.Rows) error { done = true; return nil }, args[:3]...)
	if err != nil || done {
		return 0, err
	}
	err = s.mark(ctx, `insert into @inbox_starts as s (tenant, consumer, message_key, fingerprint, starts, worker, updated_at)
		values ($1, $2, $3, coalesce($4, {none}), 1, $5, {now})
		on conflict (tenant, consumer, message_key, fingerprint) do update set worker = excluded.worker, updated_at = excluded.updated_at,
			starts = case when s.updated_at > `+s.d.after(6)+` then s.starts + 1 else 1 end
		returning starts`, &n, append(args, column.Text(c.Worker, maxText), -inbox.MarkRetention.Microseconds())...)
	return n, err
}

// UnmarkStart takes marks back, see inbox.Marker.
func (s *Store) UnmarkStart(ctx context.Context, c inbox.Claim, all bool) error {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	const marked = ` where tenant = $1 and consumer = $2 and message_key = $3 and fingerprint = coalesce($4, {none})`
	args := markArgs(&c)
	var err error
	last := ""
	if !all {
		err = s.mark(ctx, `update @inbox_starts set starts = starts - 1, updated_at = {now}`+marked, nil, args...)
		last = ` and starts <= 0`
	}
	if err == nil {
		err = s.mark(ctx, `delete from @inbox_starts`+marked+last, nil, args...)
	}
	if err != nil {
		return fmt.Errorf("inboxsql: unmark a message of consumer %q: %w", c.Consumer, s.failed(ctx, err))
	}
	return nil
}

func markArgs(c *inbox.Claim) []any {
	return []any{c.Tenant, c.Consumer, storedKey(*c), c.Fingerprint}
}

// mark runs one statement that writes beside the batches, and again when others get
// in its way. With n it has one row, of one number.
func (s *Store) mark(ctx context.Context, query string, n *int, args ...any) error {
	if err := s.awaitWriter(ctx, time.Now().Add(writerPatience)); err != nil {
		return err
	}
	defer s.freeWriter()
	for try := 1; ; try++ {
		var err error
		if n != nil {
			err = s.db.QueryRowContext(ctx, s.d.sql(query), args...).Scan(n)
		} else {
			_, err = s.db.ExecContext(ctx, s.d.sql(query), args...)
		}
		if err == nil || !s.d.clashed(err) || try == maxClashes || ctx.Err() != nil {
			return err
		}
	}
}
