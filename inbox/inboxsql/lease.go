package inboxsql

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
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
	after := s.turns.of(r.Consumer)
	due, next, err := s.due(ctx, r, after)
	if err != nil {
		return inbox.Leased{}, err
	}
	if len(due) > r.Limit {
		due, next = due[:r.Limit], 0
		s.turns.set(r.Consumer, due)
	} else {
		s.turns.set(r.Consumer, nil)
	}
	if len(due) == 0 {
		return inbox.Leased{Next: next}, nil
	}
	rows, err := s.takeDue(ctx, r, due)
	if err != nil {
		return inbox.Leased{}, err
	}
	slices.SortFunc(rows, func(a, b inbox.ParkedRecord) int { return cmp.Compare(a.ID, b.ID) })
	return inbox.Leased{Rows: rows, Next: next}, nil
}

// turns remembers, by consumer, the lane after which the next look for messages
// begins, so that every lane gets its turn.
type turns struct {
	mu    sync.Mutex
	lanes map[string][]byte
}

func (t *turns) of(consumer string) []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]byte{}, t.lanes[consumer]...)
}

// set remembers the last lane of rows; without one, the next look begins anew.
func (t *turns) set(consumer string, rows []dueRow) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for i := len(rows) - 1; i >= 0; i-- {
		if len(rows[i].lane) > 0 {
			if t.lanes == nil {
				t.lanes = map[string][]byte{}
			}
			t.lanes[consumer] = rows[i].lane
			return
		}
	}
	delete(t.lanes, consumer)
}

// dueRow is a row that can be leased; its lane is as it is stored.
type dueRow struct {
	id   int64
	lane []byte
}

// due returns the rows that can be leased, up to one more than wanted, those of a
// lane in their order, and the time until the next one is due; negative when none
// waits for a time. It begins with the lanes after one, and ends with that one.
func (s *Store) due(ctx context.Context, r inbox.LeaseRequest, after []byte) (due []dueRow, next time.Duration, err error) {
	var micros sql.NullInt64
	read := func(query string, args ...any) error {
		return s.query(ctx, query, func(rows *sql.Rows) error {
			var d dueRow
			var n int
			var m sql.NullInt64
			var t any // Only for the order.
			if err := rows.Scan(&d.id, &d.lane, &n, &t, &m); err != nil {
				return err
			}
			if n == 0 {
				micros = m
			} else {
				due = append(due, d)
			}
			return nil
		}, args...)
	}
	most := min(r.Limit, math.MaxInt32-1) + 1
	nextDue := `select 0, {none}, 0, null, ` + s.d.until(`(select min(t) from (select * from (`+nextTime("{loose p}")+`) as a
		union all select * from (`+nextTime("{laned p}")+`) as b) as n)`) + ` union all `
	if !r.Order.Keep {
		err = read(`with due (id, t) as (`+dueIn("{loose p}")+` union all `+dueIn("{laned p}")+`)
			`+nextDue+`select id, {none}, row_number() over (order by t, id), t, null from due order by 3 limit $2 + 1`, r.Consumer, most)
	} else {
		err = read(chain(r.Order, false)+`, due (id, t) as (`+dueIn("{loose p}")+`)
			`+nextDue+`select id, lane, taken, t, null from chain where fit = 1
			union all select id, {none}, row_number() over (order by t, id), t, null from due order by 3, 4 limit $2 + 1`, r.Consumer, most, after)
		if err == nil && len(after) > 0 && len(due) < most {
			err = read(chain(r.Order, true)+`select id, lane, taken, t, null from chain where fit = 1 order by 3`, r.Consumer, most, after)
		}
	}
	switch {
	case err != nil:
		return nil, 0, err
	case !micros.Valid:
		return due, -1, nil
	}
	return due, time.Duration(max(micros.Int64, 0)) * time.Microsecond, nil
}

// isDue is since when a row of the table p is due, or when it will be. A row that
// waits has no time of its own.
const isDue = `coalesce(p.next_attempt_at, p.parked_at)`

// isReady tells that a row of the table p can be leased, apart from its place in
// its lane.
const isReady = `((p.state = 'waiting' or p.state = 'retry' and ` + isDue + ` <= {at})
	and (p.lease_until is null or p.lease_until <= {at}))`

// nextTime selects the time of the first row of an arm of the index that is not
// due.
func nextTime(arm string) string {
	return `select ` + isDue + ` as t from @inbox_parked as p
		where p.consumer = $1 and ` + arm + ` and p.state in ('retry', 'waiting') and ` + isDue + ` > {at}
		order by ` + isDue + ` limit 1`
}

// dueIn selects the rows of an arm of the index that are due, the longest due
// first, whatever their lanes.
func dueIn(arm string) string {
	return `select * from (select p.id, ` + isDue + ` as t from @inbox_parked as p
		where p.consumer = $1 and ` + arm + ` and p.state in ('retry', 'waiting') and ` + isDue + ` <= {at} and ` + isReady + `
		order by ` + isDue + ` limit $2) as p`
}

// chain begins a statement with a walk over the rows of the lanes of consumer $1:
// of each lane those that can be leased (fit), up to the first that cannot, until
// it has $2. It walks the lanes after $3, or the rest of them. A step is one look
// into the index, so what waits behind costs nothing.
func chain(o inbox.Order, rest bool) string {
	const live = `select q.id from @inbox_parked as q where q.consumer = $1 and q.lane <> {none} and q.state in ('retry', 'waiting')`
	first, limit := ` and q.lane > $3`, ``
	if rest {
		first, limit = ``, ` and q.lane <= $3`
	}
	fit := isReady
	if o.BlockedByDead {
		fit += ` and not exists (select 1 from @inbox_parked as d where d.consumer = $1 and d.lane = p.lane and d.lane <> {none}
			and d.state = 'dead' and d.id < p.id)`
	}
	fit = `case when ` + fit + ` then 1 else 0 end`
	return `with recursive chain (id, lane, t, fit, taken) as (
		select p.id, p.lane, ` + isDue + `, ` + fit + `, ` + fit + ` from @inbox_parked as p
		where p.id = (` + live + first + limit + ` order by q.lane, q.id limit 1)
		union all
		select p.id, p.lane, ` + isDue + `, ` + fit + `, c.taken + ` + fit + ` from chain as c join @inbox_parked as p
		on p.id = coalesce(
			case when c.fit = 1 then (` + live + ` and q.lane = c.lane and q.id > c.id order by q.id limit 1) end,
			(` + live + ` and q.lane > c.lane` + limit + ` order by q.lane, q.id limit 1))
		where c.taken < $2
	)`
}

// takeDue leases those of the rows that can still be leased, and of a lane only what comes
// before the first that cannot: another process may be at it as well. The case
// hides the state from PostgreSQL's planner: when many rows have become due since the
// last ANALYZE, it would go through the whole index of what is due for a few ids.
func (s *Store) takeDue(ctx context.Context, r inbox.LeaseRequest, due []dueRow) (leased []inbox.ParkedRecord, err error) {
	list := make([][2]any, len(due))
	for i, d := range due {
		list[i] = [2]any{d.id, hex.EncodeToString(d.lane)}
	}
	text, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	if err := s.awaitWriter(ctx, time.Now().Add(writerPatience)); err != nil {
		return nil, err
	}
	defer s.freeWriter()
	query := `with w (n, id, lane) as materialized {due},
		l as materialized (
			select p.id from w join @inbox_parked as p on p.id = w.id where case when ` + isReady + ` then 1 else 0 end = 1 order by p.id{skip locked}
		),
		ok as materialized (
			select o.id from (
				select w.id, w.lane, l.id is not null as got, min(case when l.id is null then 0 else 1 end) over (partition by w.lane order by w.n) as whole
				from w left join l on l.id = w.id
			) as o where o.got and (o.lane = '' or o.whole = 1)
		)
		update @inbox_parked as p set lease_until = ` + s.d.after(2) + `, worker = $3, updated_at = {now}, token = {greatest}(coalesce(p.token, 0) + 1, {token})
		from ok where p.id = ok.id returning ` + s.d.returned(wholeColumns)
	for try := 1; ; try++ {
		err := s.query(ctx, query, func(rows *sql.Rows) error {
			r, token, err := scanWhole(rows.Scan)
			if err != nil {
				return err
			}
			r.Lease = inbox.Lease{ID: r.ID, Token: token}
			leased = append(leased, *r)
			return nil
		}, string(text), r.For.Microseconds(), column.Text(r.Worker, maxText))
		if err == nil || !s.d.clashed(err) || try == maxClashes || ctx.Err() != nil {
			return leased, err
		}
		leased = nil
	}
}

// writerPatience is how long a write beside the batches waits for them, where
// there is one writer.
const writerPatience = 10 * time.Second

// maxClashes is how often a single statement is tried that meets others: above
// READ COMMITTED, or because of a deadlock.
const maxClashes = 10

// Release ends leases, see inbox.Parker.
func (s *Store) Release(ctx context.Context, leases []inbox.Lease) error {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	pairs := make([][2]int64, 0, len(leases))
	for _, l := range leases {
		pairs = append(pairs, [2]int64{l.ID, l.Token})
	}
	_, err := s.change(ctx, `update @inbox_parked set lease_until = null, updated_at = {now}
		where lease_until is not null and (id, token) in {leases}`, pairs)
	if err != nil {
		return fmt.Errorf("inboxsql: release parked messages: %w", s.failed(ctx, err))
	}
	return nil
}

// PurgeDead deletes dead and discarded messages, see inbox.Parker. When there are
// none it only reads.
func (s *Store) PurgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	n, err := s.purgeDead(ctx, consumer, age, blocked, limit)
	if err != nil {
		return 0, fmt.Errorf("inboxsql: purge dead messages of consumer %q: %w", consumer, s.failed(ctx, err))
	}
	return n, nil
}

func (s *Store) purgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	kept := ""
	if limit <= 0 {
		return 0, nil
	}
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
		where p.id in {ids} and p.state in ('dead', 'discarded') and coalesce(p.dead_at, p.parked_at) < `+s.d.after(2)+`
		order by p.id{for update})`, ids, -age.Microseconds())
}

// query runs a query on the pool; scan is called for each row.
func (s *Store) query(ctx context.Context, query string, scan func(rows *sql.Rows) error, args ...any) error {
	return scanAll(ctx, s.db, s.d.sql(query), scan, args...)
}

func scanAll(ctx context.Context, q querier, query string, scan func(rows *sql.Rows) error, args ...any) (err error) {
	rows, err := q.QueryContext(ctx, query, args...)
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

// change runs one statement that writes beside the batches. Its first argument, $1, is a list, given as JSON; nothing is done for an empty
// one. It returns how many rows were changed.
func (s *Store) change(ctx context.Context, query string, list any, args ...any) (int, error) {
	text, err := json.Marshal(list)
	if err != nil || string(text) == "[]" || string(text) == "null" {
		return 0, err
	}
	if err := s.awaitWriter(ctx, time.Now().Add(writerPatience)); err != nil {
		return 0, err
	}
	defer s.freeWriter()
	for try := 1; ; try++ {
		n, err := affected(s.db.ExecContext(ctx, s.d.sql(query), append([]any{string(text)}, args...)...))
		if s.d.clashed(err) && try < maxClashes && ctx.Err() == nil {
			continue
		}
		return int(n), err
	}
}
