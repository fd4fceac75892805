package inboxpgx

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

var _ inbox.Marker = (*Store)(nil)

// The statements of inbox.Marker. What beat returns is as it was before.
const (
	beat = `with b as (insert into {inbox_runs} (consumer, run_id, worker, host) values ($1::text, $2::text, $3::text, $4::text)
  on conflict (consumer, run_id) do update set beat_at = clock_timestamp())
select r.run_id, r.worker, r.host, greatest((extract(epoch from clock_timestamp() - r.beat_at) * 1000000)::bigint, 0)
from {inbox_runs} r where r.consumer = $1::text order by r.run_id`

	endRuns = `delete from {inbox_runs} where consumer = $1::text and run_id = any($2::text[])`

	purgeMarks = `with l as (select tenant, consumer, message_key, fingerprint from {inbox_starts}
  where consumer = $1::text and updated_at <= clock_timestamp() - $2::bigint * interval '1 microsecond'
  limit 1000 for update skip locked)
delete from {inbox_starts} x using l where x.tenant = l.tenant and x.consumer = l.consumer
  and x.message_key = l.message_key and x.fingerprint = l.fingerprint`

	markStart = `insert into {inbox_starts} as s (tenant, consumer, message_key, fingerprint, worker)
select $1::text, $2::text, $3::text, $4::bytea, $5::text
where not exists (select from {inbox} i
  where i.tenant = $1::text and i.consumer = $2::text and i.message_key = $3::text and not ` + isExpired + `)
on conflict (tenant, consumer, message_key, fingerprint) do update set worker = excluded.worker, updated_at = clock_timestamp(),
  starts = case when s.updated_at > clock_timestamp() - $6::bigint * interval '1 microsecond' then s.starts + 1 else 1 end
returning s.starts`

	isMarked = `tenant = $1::text and consumer = $2::text and message_key = $3::text and fingerprint = $4::bytea`

	unmarkStart = `with d as (delete from {inbox_starts} where ` + isMarked + ` and ($5::boolean or starts <= 1))
update {inbox_starts} set starts = starts - 1, updated_at = clock_timestamp() where ` + isMarked + ` and not $5::boolean and starts > 1`
)

// Beat implements inbox.Marker. It is one round trip.
func (s *Store) Beat(ctx context.Context, consumer string, r inbox.RunRecord) ([]inbox.RunRecord, error) {
	var runs []inbox.RunRecord
	err := s.inOwn(ctx, func(q *pgx.Batch) {
		q.Queue(s.sql.beat, consumer, r.ID, column.Text(r.Worker, maxText), column.Text(r.Host, maxText))
	}, func(reader *reader) error {
		runs = nil
		var run inbox.RunRecord
		var age int64
		reader.rows(func() {
			run.Age = time.Duration(age) * time.Microsecond
			runs = append(runs, run)
		}, &run.ID, &run.Worker, &run.Host, &age)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: record a run of consumer %q: %w", consumer, err)
	}
	return runs, nil
}

// EndRuns implements inbox.Marker.
func (s *Store) EndRuns(ctx context.Context, consumer string, ids ...string) error {
	if len(ids) == 0 {
		return nil
	}
	err := s.inOwn(ctx, func(q *pgx.Batch) {
		q.Queue(s.sql.endRuns, consumer, ids)
		q.Queue(s.sql.purgeMarks, consumer, inbox.MarkRetention.Microseconds())
	}, func(reader *reader) error {
		reader.exec()
		reader.exec()
		return nil
	})
	if err != nil {
		return fmt.Errorf("inboxpgx: end runs of consumer %q: %w", consumer, err)
	}
	return nil
}

// MarkStart implements inbox.Marker. It is one round trip.
func (s *Store) MarkStart(ctx context.Context, c inbox.Claim) (int, error) {
	marks := 0
	err := s.inOwn(ctx, func(q *pgx.Batch) {
		q.Queue(s.sql.markStart, append(markArgs(&c), column.Text(c.Worker, maxText), inbox.MarkRetention.Microseconds())...)
	}, func(reader *reader) error {
		marks = 0
		var n int32
		reader.rows(func() { marks = int(n) }, &n)
		return nil
	})
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: mark a message of consumer %q: %w", c.Consumer, err)
	}
	return marks, nil
}

// UnmarkStart implements inbox.Marker. It is one round trip.
func (s *Store) UnmarkStart(ctx context.Context, c inbox.Claim, all bool) error {
	if _, err := s.change(ctx, s.sql.unmarkStart, append(markArgs(&c), all)...); err != nil {
		return fmt.Errorf("inboxpgx: unmark a message of consumer %q: %w", c.Consumer, err)
	}
	return nil
}

func markArgs(c *inbox.Claim) []any {
	k := claimKey(c)
	return []any{k.tenant, k.consumer, k.key, orEmpty(c.Fingerprint)}
}
