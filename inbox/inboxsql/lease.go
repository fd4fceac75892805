package inboxsql

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// Lease takes parked messages that are due, see inbox.Parker. When nothing is due
// it only reads: with SQLite it then takes no lock. Where it has to write, it
// waits for another writer of the file for at most 10 s; the error then wraps
// inbox.ErrInFlight or is SQLite's own.
func (s *Store) Lease(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	leased, err := s.lease(ctx, r)
	if err != nil {
		return inbox.Leased{}, fmt.Errorf("inboxsql: lease parked messages of consumer %q: %w", r.Consumer, s.failed(ctx, err))
	}
	return leased, nil
}

func (s *Store) lease(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	switch {
	case r.Limit < 1:
		return inbox.Leased{}, fmt.Errorf("Limit = %d: must be at least 1", r.Limit)
	case r.For <= 0:
		return inbox.Leased{}, fmt.Errorf("For = %v: must be positive", r.For)
	}
	r.Limit = min(r.Limit, math.MaxInt32)
	due, next, err := s.due(ctx, r)
	if err != nil || due == 0 {
		return inbox.Leased{Next: next}, err
	}
	if err := s.awaitWriter(ctx, time.Now().Add(writerPatience)); err != nil {
		return inbox.Leased{}, err
	}
	rows, err := s.d.lease(ctx, s.db, r)
	s.freeWriter()
	if err != nil {
		return inbox.Leased{}, err
	}
	slices.SortFunc(rows, func(a, b inbox.ParkedRecord) int { return cmp.Compare(a.ID, b.ID) })
	if due > r.Limit {
		next = 0
	}
	return inbox.Leased{Rows: rows, Next: next}, nil
}

// writerPatience is how long a write beside the batches waits for them, where
// there is one writer.
const writerPatience = 10 * time.Second

// due tells how many rows are due, up to one more than wanted, and the time until
// the next one is; negative when none waits for a time.
func (s *Store) due(ctx context.Context, r inbox.LeaseRequest) (due int, next time.Duration, err error) {
	var micros sql.NullInt64
	err = s.db.QueryRowContext(ctx, s.d.sql(dueRows(r.Order)+`
		select (select count(*) from pick), `+s.d.until(`(select min(t) from (
			select * from (`+nextTime("{loose p}")+`) as a union all
			select * from (`+nextTime("{laned p}")+`) as b) as n)`)), r.Consumer, r.Limit+1).Scan(&due, &micros)
	switch {
	case err != nil:
		return 0, 0, err
	case !micros.Valid:
		return due, -1, nil
	}
	return due, time.Duration(max(micros.Int64, 0)) * time.Microsecond, nil
}

func nextTime(arm string) string {
	return `select ` + isDue + ` as t from @inbox_parked as p
		where p.consumer = $1 and ` + arm + ` and p.state in ('retry', 'waiting') and ` + isDue + ` > {at}
		order by ` + isDue + ` limit 1`
}

// isReady tells that a row of the table p can be leased, apart from its place in
// its lane.
const isReady = `((p.state = 'waiting' or p.state = 'retry' and ` + isDue + ` <= {at})
	and (p.lease_until is null or p.lease_until <= {at}))`

// isDue is since when a row of the table p is due, or when it will be. A row that
// waits has no time of its own.
const isDue = `coalesce(p.next_attempt_at, p.parked_at)`

// dueRows begins a statement with what is due of consumer $1, at most $2 rows, in
// the order in which it is to be leased: pick (id, lane, rank, t). Every lane gets
// its turn: what has been due for longest comes first.
//
// What waits in lanes costs nothing: heads goes from lane to lane and not from row
// to row. From those heads that are ready, walk goes on along the lane for as
// long as rows are ready, and no farther than it takes to have $2 rows if each
// lane has some.
func dueRows(o inbox.Order) string {
	loose := func(arm string) string {
		return `select * from (select p.id, ` + isDue + ` as t from @inbox_parked as p
			where p.consumer = $1 and ` + arm + ` and p.state in ('retry', 'waiting') and ` + isDue + ` <= {at} and ` + isReady + `
			order by ` + isDue + ` limit $2) as `
	}
	if !o.Keep {
		return `with due (id, t) as (` + loose("{loose p}") + `a union all ` + loose("{laned p}") + `b),
			pick (id, lane, rank, t) as (select id, {none}, 1, t from due order by t, id limit $2)`
	}
	const live = `q.consumer = $1 and q.lane <> {none} and q.state in ('retry', 'waiting')`
	blocked := func(lane, after, before string) string {
		if !o.BlockedByDead {
			return ""
		}
		return ` and not exists (select 1 from @inbox_parked as q where q.consumer = $1 and q.lane = ` + lane + ` and q.lane <> {none}
			and q.state = 'dead' and q.id > ` + after + ` and q.id < ` + before + `)`
	}
	return `with recursive
		heads (id, lane, t, fit) as (
			select p.id, p.lane, ` + isDue + `, ` + isReady + ` from @inbox_parked as p where p.id = (
				select q.id from @inbox_parked as q where ` + live + ` order by q.lane, q.id limit 1)
			union all
			select p.id, p.lane, ` + isDue + `, ` + isReady + ` from heads as h join @inbox_parked as p on p.id = (
				select q.id from @inbox_parked as q where ` + live + ` and q.lane > h.lane order by q.lane, q.id limit 1)
		),
		ready (id, lane, t) as (
			select h.id, h.lane, h.t from heads as h where h.fit` + blocked("h.lane", "0", "h.id") + ` order by h.t, h.id limit $2
		),
		walk (id, lane, rank, t) as (
			select id, lane, 1, t from ready
			union all
			select p.id, p.lane, w.rank + 1, ` + isDue + ` from walk as w join @inbox_parked as p on p.id = (
				select q.id from @inbox_parked as q where ` + live + ` and q.lane = w.lane and q.id > w.id order by q.id limit 1)
			where w.rank <= $2 - (select count(*) from ready) and ` + isReady + blocked("w.lane", "w.id", "p.id") + `
		),
		due (id, t) as (` + loose("{loose p}") + `a),
		pick (id, lane, rank, t) as (
			select * from (select id, lane, rank, t from walk union all select id, {none}, 1, t from due) as u
			order by rank, t, id limit $2
		)`
}

// takeLease leases rows of inbox_parked as p for argument n in microseconds, for
// worker n+1. The tokens of a row grow.
func takeLease(d dialect, n int) string {
	return fmt.Sprintf(`update @inbox_parked as p set lease_until = %s, token = coalesce(token, 0) + 1, worker = $%d,
		updated_at = {now}`, d.after(n), n+1)
}

// scanLeased reads rows of wholeColumns that were leased just now.
func scanLeased(rows *sql.Rows) (all []inbox.ParkedRecord, err error) {
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		r, token, err := scanWhole(rows.Scan)
		if err != nil {
			return nil, err
		}
		r.Lease = inbox.Lease{ID: r.ID, Token: token}
		all = append(all, *r)
	}
	return all, rows.Err()
}

// Release ends leases, see inbox.Parker.
func (s *Store) Release(ctx context.Context, leases []inbox.Lease) error {
	pairs := make([][2]int64, 0, len(leases))
	for _, l := range leases {
		pairs = append(pairs, [2]int64{l.ID, l.Token})
	}
	_, err := s.change(ctx, `update @inbox_parked set lease_until = null, updated_at = {now}
		where lease_until is not null and (id, token) in {leases}`, pairs)
	if err != nil {
		return fmt.Errorf("inboxsql: release parked messages: %w", err)
	}
	return nil
}

// PurgeDead deletes dead and discarded messages, see inbox.Parker. When there are
// none it only reads.
func (s *Store) PurgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	n, err := s.purgeDead(ctx, consumer, age, blocked, limit)
	if err != nil {
		return 0, fmt.Errorf("inboxsql: purge dead messages of consumer %q: %w", consumer, err)
	}
	return n, nil
}

func (s *Store) purgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	kept := ""
	if blocked {
		kept = ` and (p.state = 'discarded' or p.lane = {none})`
	}
	var ids []int64
	err := s.query(ctx, `select p.id from @inbox_parked as p
		where p.consumer = $1 and p.state in ('dead', 'discarded') and coalesce(p.dead_at, p.parked_at) < `+s.d.after(2)+kept+`
		order by coalesce(p.dead_at, p.parked_at) limit $3`,
		func(rows *sql.Rows) error {
			ids = append(ids, 0)
			return rows.Scan(&ids[len(ids)-1])
		}, consumer, -age.Microseconds(), limit)
	if err != nil || len(ids) == 0 {
		return 0, err
	}
	return s.change(ctx, `delete from @inbox_parked where id in (select p.id from @inbox_parked as p
		where p.id in {ids} and p.state in ('dead', 'discarded') order by p.id{for update})`, ids)
}

// query runs a query on the pool, within Config.Timeout.
func (s *Store) query(ctx context.Context, query string, scan func(rows *sql.Rows) error, args ...any) (err error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	defer func() { err = s.failed(ctx, err) }()
	rows, err := s.db.QueryContext(ctx, s.d.sql(query), args...)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, rows.Close()) }()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// change runs one statement that writes beside the batches, within Config.Timeout.
// Its first argument, $1, is a list, given as JSON; nothing is done for an empty
// one. It returns how many rows were changed.
func (s *Store) change(ctx context.Context, query string, list any, args ...any) (int, error) {
	text, err := json.Marshal(list)
	if err != nil || string(text) == "[]" || string(text) == "null" {
		return 0, err
	}
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	if err := s.awaitWriter(ctx, time.Now().Add(writerPatience)); err != nil {
		return 0, s.timedOut(ctx, err)
	}
	defer s.freeWriter()
	for try := 1; ; try++ {
		n, err := affected(s.db.ExecContext(ctx, s.d.sql(query), append([]any{string(text)}, args...)...))
		if s.d.clashed(err) && try < maxClashes && ctx.Err() == nil {
			continue // Above READ COMMITTED, or because of a deadlock.
		}
		return int(n), s.failed(ctx, err)
	}
}

// maxClashes is how often a single statement is tried that meets others.
const maxClashes = 10
