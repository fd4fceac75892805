package inboxpgx

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// maxLease is the highest number of rows that one call leases.
const maxLease = 10_000

// turns gives every lane its turn when there is more to lease than is asked for:
// who leases begins after the lane that came last.
type turns struct {
	mu    sync.Mutex
	after map[string][]byte // by consumer: the lane to begin after
	odd   bool              // whose turn the odd row is
}

func (t *turns) begin(consumer string) (after []byte, odd bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.odd = !t.odd
	return t.after[consumer], t.odd
}

// end notes the last lane of a call that left lanes out; nil when it left out none.
func (t *turns) end(consumer string, last []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if last == nil {
		delete(t.after, consumer)
		return
	}
	if t.after == nil {
		t.after = map[string][]byte{}
	}
	t.after[consumer] = last
}

// candidates are rows that can be leased, up to one more than the limit of each kind.
type candidates struct {
	free  []int64  // without a lane, or without an order
	laned []int64  // by lane and id
	lanes [][]byte // of these; empty without an order
	wait  *int64   // microseconds until the next; nil when none waits
}

// Lease implements inbox.Parker. It is one round trip when nothing is due. It reads
// the time from the server.
func (s *Store) Lease(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	leased, err := s.leaseDue(ctx, r)
	if err != nil {
		return inbox.Leased{}, fmt.Errorf("inboxpgx: lease parked messages of consumer %q: %w", r.Consumer, err)
	}
	return leased, nil
}

func (s *Store) leaseDue(ctx context.Context, r inbox.LeaseRequest) (inbox.Leased, error) {
	switch {
	case r.Limit < 1:
		return inbox.Leased{}, fmt.Errorf("field Limit = %d: must be at least 1", r.Limit)
	case r.For <= 0:
		return inbox.Leased{}, fmt.Errorf("field For = %v: must be positive", r.For)
	}
	limit := min(r.Limit, maxLease)
	after, odd := s.turns.begin(r.Consumer)
	c, err := s.findDue(ctx, r, limit, after, nil)
	if err == nil && len(after) > 0 && len(c.laned) <= limit {
		// The lanes before.
		var more candidates
		if more, err = s.findDue(ctx, r, limit-len(c.laned), nil, after); err == nil {
			c.laned, c.lanes = append(c.laned, more.laned...), append(c.lanes, more.lanes...)
			c.wait = sooner(c.wait, more.wait)
		}
	}
	if err != nil {
		return inbox.Leased{}, err
	}
	leased := inbox.Leased{Next: -1}
	nFree, nLaned := share(limit, len(c.free), len(c.laned), odd)
	var last []byte
	switch {
	case len(c.lanes) == 0:
	case nLaned == 0:
		last = after
	case nLaned < len(c.laned):
		last = c.lanes[nLaned-1]
	}
	s.turns.end(r.Consumer, last)
	switch {
	case nFree < len(c.free) || nLaned < len(c.laned):
		leased.Next = 0
	case c.wait != nil:
		leased.Next = max(time.Duration(*c.wait)*time.Microsecond, 0)
	}
	ids, lanes := slices.Concat(c.free[:nFree], c.laned[:nLaned]), make([][]byte, nFree+nLaned)
	for i := range lanes {
		lanes[i] = []byte{}
		if i >= nFree && len(c.lanes) > 0 {
			lanes[i] = c.lanes[i-nFree]
		}
	}
	if len(ids) == 0 {
		return leased, nil
	}
	leased.Rows, err = s.take(ctx, r, ids, lanes)
	return leased, err
}

// share divides a limit between two kinds of rows, of which there are a and b: each
// gets half of it if it needs so much, and what the other does not need.
func share(limit, a, b int, odd bool) (na, nb int) {
	half := limit / 2
	if odd {
		half = limit - half
	}
	na = min(a, max(half, limit-b))
	return na, min(b, limit-na)
}

func sooner(a, b *int64) *int64 {
	if a == nil || b != nil && *b < *a {
		return b
	}
	return a
}

// findDue finds what can be leased, of the lanes after one up to another (nil: from
// the first, to the last).
func (s *Store) findDue(ctx context.Context, r inbox.LeaseRequest, limit int, after, upTo []byte) (candidates, error) {
	text := s.sql.leasableUnordered
	if r.Order.Keep {
		text = s.sql.leasable
	}
	var c candidates
	row := s.pool.QueryRow(ctx, text, r.Consumer, orEmpty(after), upTo, limit, r.Order.BlockedByDead)
	if err := row.Scan(&c.free, &c.laned, &c.lanes, &c.wait); err != nil {
		return c, withoutSchema(markedByPool(err))
	}
	return c, nil
}

// take leases rows, of those with a lane only such whose lane is unbroken by what
// somebody else took meanwhile.
func (s *Store) take(ctx context.Context, r inbox.LeaseRequest, ids []int64, lanes [][]byte) ([]inbox.ParkedRecord, error) {
	var found []inbox.ParkedRecord
	err := s.inOwn(ctx, func(q *pgx.Batch) {
		q.Queue(s.sql.lease, ids, lanes, max(r.For.Microseconds(), 1), column.Text(r.Worker, maxText))
	}, func(reader *reader) error {
		found = nil
		scan, token := new(parkedScan), int64(0)
		var wrong error
		reader.rows(func() {
			record, err := scan.doneWhole()
			if err != nil {
				wrong = errors.Join(wrong, fmt.Errorf("parked row %d: %w", scan.record.ID, err))
				return
			}
			record.Lease = inbox.Lease{ID: record.ID, Token: token}
			found = append(found, *record)
			*scan = parkedScan{}
		}, append(scan.whole(), &token)...)
		return wrong
	})
	slices.SortFunc(found, func(a, b inbox.ParkedRecord) int { return cmp.Compare(a.ID, b.ID) })
	return found, err
}

// Release implements inbox.Parker.
func (s *Store) Release(ctx context.Context, leases []inbox.Lease) error {
	if len(leases) == 0 {
		return nil
	}
	ids, tokens := make([]int64, len(leases)), make([]int64, len(leases))
	for i, l := range leases {
		ids[i], tokens[i] = l.ID, l.Token
	}
	if _, err := s.change(ctx, s.sql.release, ids, tokens); err != nil {
		return fmt.Errorf("inboxpgx: release leases: %w", err)
	}
	return nil
}

// PurgeDead implements inbox.Parker. A limit below one deletes nothing.
func (s *Store) PurgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	if limit < 1 {
		return 0, nil
	}
	n, err := s.change(ctx, s.sql.purgeDead, consumer, max(age, 0).Microseconds(), blocked, toInt32(limit))
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: purge dead messages of consumer %q: %w", consumer, err)
	}
	return n, nil
}

// RetryParked implements inbox.Undertaker.
func (s *Store) RetryParked(ctx context.Context, ids []int64) (int, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	n, err := s.change(ctx, s.sql.retryParked, ids)
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: retry parked messages: %w", err)
	}
	return n, nil
}

// DiscardParked implements inbox.Undertaker. The note takes the place of the error's
// text.
func (s *Store) DiscardParked(ctx context.Context, ids []int64, note string) (int, error) {
	if len(ids) == 0 {
		return 0, nil
	}
	n, err := s.change(ctx, s.sql.discardParked, ids, column.Text(note, maxError))
	if err != nil {
		return 0, fmt.Errorf("inboxpgx: discard parked messages: %w", err)
	}
	return n, nil
}

// GroupParked implements inbox.Undertaker. It reads all the rows that the filter
// leaves.
func (s *Store) GroupParked(ctx context.Context, f inbox.ParkedFilter) ([]inbox.ParkedGroup, error) {
	rows, err := s.pool.Query(ctx, s.sql.groupParked, filterArgs(&f)...)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: group parked: %w", notFound(err))
	}
	var groups []inbox.ParkedGroup
	var g inbox.ParkedGroup
	_, err = pgx.ForEachRow(rows, []any{&g.Failure, &g.Consumer, &g.State, &g.Reason, &g.Error, &g.Count, &g.First, &g.Last}, func() error {
		g.First, g.Last = g.First.UTC(), g.Last.UTC()
		groups = append(groups, g)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: group parked: %w", notFound(err))
	}
	return groups, nil
}

// change runs one statement in a transaction of its own and returns how many rows
// it changed.
func (s *Store) change(ctx context.Context, text string, args ...any) (int, error) {
	var n int64
	err := s.inOwn(ctx, func(q *pgx.Batch) { q.Queue(text, args...) }, func(r *reader) error {
		n = r.exec().RowsAffected()
		return nil
	})
	return int(n), err
}

// inOwn runs one statement in a durable transaction of its own, at a level at which
// rows that others changed are seen as they are now. One round trip; again, when
// others got in its way.
func (s *Store) inOwn(ctx context.Context, queue func(q *pgx.Batch), read func(r *reader) error) error {
	conn, err := s.acquire(ctx)
	if err != nil {
		return err
	}
	defer giveBack(ctx, conn)
	for range maxBegins {
		if err = s.oneOwn(ctx, conn.Conn(), queue, read); err == nil || conn.Conn().IsClosed() {
			break
		}
		undo(ctx, conn.Conn())
		switch state(err) {
		case stateSerialization, stateDeadlock, stateStalePlan, stateNoStatement:
			continue
		}
		break
	}
	return withoutSchema(marked(conn.Conn(), err))
}

func (s *Store) oneOwn(ctx context.Context, conn *pgx.Conn, queue func(q *pgx.Batch), read func(r *reader) error) error {
	q := &pgx.Batch{}
	q.BeginTx(pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	q.Queue("select " + durable)
	queue(q)
	q.Queue(sqlCommit)
	r := newReader(conn.SendBatch(ctx, q))
	defer r.skip()
	r.exec()
	r.exec()
	err := read(r)
	r.exec()
	return errors.Join(r.close(), err)
}
