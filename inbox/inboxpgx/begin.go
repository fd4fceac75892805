package inboxpgx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
)

const (
	// maxBegins is how often a begin is tried when another transaction got in
	// its way (40001, 40P01) or a prepared statement has gone stale.
	maxBegins = 8
	// maxRounds is how often rows that vanish or expire are claimed again in
	// one transaction.
	maxRounds = 8
)

// errRestless is the failure of a begin whose rows came and went.
var errRestless = errors.New("the rows of the keys kept changing")

// Begin implements inbox.Store.
func (s *Store) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[pgx.Tx], error) {
	if o.LockTimeout <= 0 {
		return nil, fmt.Errorf("inboxpgx: begin: LockTimeout = %v: must be positive", o.LockTimeout)
	}
	set, err := newClaimSet(claims)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: begin: %w", err)
	}
	conn, err := s.acquire(ctx)
	if err != nil {
		return nil, fmt.Errorf("inboxpgx: begin: %w", err)
	}
	deadline, thorough := time.Now().Add(o.LockTimeout), false
	for try := 1; ; try++ {
		g := &begin{store: s, conn: conn.Conn(), set: set, o: o, deadline: deadline, thorough: thorough}
		if err = g.run(ctx); err == nil {
			return newBatch(s, conn, g), nil
		}
		thorough = thorough || errors.Is(err, errNotDone)
		if try == maxBegins || !g.again(err) {
			break
		}
		undo(ctx, g.conn)
	}
	err = beginError(ctx, marked(conn.Conn(), err))
	giveBack(ctx, conn)
	return nil, fmt.Errorf("inboxpgx: begin: %w", err)
}

// begin is one try to open a transaction with claims.
type begin struct {
	store    *Store
	conn     *pgx.Conn
	set      *claimSet
	o        inbox.BeginOptions
	deadline time.Time
	thorough bool // do not expect that a batch of duplicates needs nothing more

	tx      pgx.Tx // for large objects only
	entries []inbox.Entry
	ours    []bool            // by index: the row is this transaction's
	parked  map[int]parkedRow // by index; found, not attached yet
	guarded bool
	over    bool // nothing is claimed and the transaction has ended

	replicated bool // COMMIT waits for a standby

	locked []bool                 // by index: the parked row that the claim comes from is locked; nil when none comes from there
	lanes  map[laneKey]*laneState // what is in the way of lanes
}

type parkedRow struct {
	id    int64
	state inbox.ParkedState
}

func (r parkedRow) outcome() inbox.Outcome {
	if r.state == inbox.ParkedDead || r.state == inbox.ParkedDiscarded {
		return inbox.Dead
	}
	return inbox.WasParked
}

// errFrozen makes a begin start again with probes, because the database's
// default is a level with one snapshot per transaction.
var errFrozen = errors.New("transactions keep one snapshot")

// errNotDone makes a begin start again: what looked like a batch of duplicates
// needs more.
var errNotDone = errors.New("not all keys are done")

// again tells whether the begin can be tried again at once.
func (g *begin) again(err error) bool {
	if g.conn.IsClosed() {
		return false
	}
	if errors.Is(err, errFrozen) || errors.Is(err, errNotDone) {
		return true
	}
	switch state(err) {
	case stateSerialization, stateDeadlock:
		return time.Now().Before(g.deadline)
	case stateStalePlan, stateNoStatement:
		return true
	}
	return errors.Is(err, errRestless) && time.Now().Before(g.deadline)
}

// beginError says what a failed begin means.
func beginError(ctx context.Context, err error) error {
	switch state(err) {
	case stateLockTimeout, stateQueryCanceled:
		if ctx.Err() == nil {
			return fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
		}
	}
	if errors.Is(err, errRestless) {
		return fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
	}
	return withoutSchema(err)
}

// run does the one round trip that is the rule, and more where something was
// in the way.
func (g *begin) run(ctx context.Context) error {
	g.entries = make([]inbox.Entry, len(g.set.claims))
	g.ours = make([]bool, len(g.set.claims))
	g.parked = map[int]parkedRow{}
	g.guarded = len(g.set.claims) > 1
	g.lanes = nil
	if len(g.set.fed) > 0 {
		g.locked = make([]bool, len(g.set.claims))
	}
	if err := g.first(ctx); err != nil {
		return err
	}
	var open []int
	for i := range g.entries {
		if !g.entries[i].Claimed() && !g.entries[i].Gone {
			open = append(open, i)
		}
	}
	if len(open) > 0 && len(open) == len(g.entries) && len(g.parked) == 0 && len(g.set.fed) == 0 && !g.thorough && !g.replicated {
		return g.duplicates(ctx, open)
	}
	for round := 0; len(open) > 0 || len(g.parked) > 0; round++ {
		if round == maxRounds {
			return errRestless
		}
		var err error
		if open, err = g.resolve(ctx, open); err != nil {
			return err
		}
	}
	g.hold()
	return nil
}

// bound queues the time limits of what waits for others.
func (g *begin) bound(q *pgx.Batch) {
	q.Queue(g.store.sql.bound, milliseconds(max(time.Until(g.deadline), time.Millisecond)), milliseconds(max(g.o.IdleTimeout, 0)))
}

func milliseconds(d time.Duration) string {
	return strconv.FormatInt((d + time.Millisecond - 1).Milliseconds(), 10)
}

// first begins the transaction and claims everything.
func (g *begin) first(ctx context.Context) error {
	q := &pgx.Batch{}
	q.BeginTx(pgx.TxOptions{IsoLevel: g.store.isolation})
	g.bound(q)
	if g.guarded {
		q.Queue(g.store.sql.guard)
	}
	sent := g.queueClaims(q, g.set.order, g.set.fed)
	q.Queue(g.store.sql.unbound)
	q.Queue(sqlSavepoint)
	r := newReader(g.conn.SendBatch(ctx, q))
	defer r.skip()
	g.tx = r.results.Tx()
	r.exec()
	var level, ignored string
	var overruled *string
	r.row(&ignored, &ignored, &ignored, &ignored, &ignored, &overruled, &level, &g.replicated)
	if g.guarded {
		r.exec()
	}
	g.readClaims(r, sent)
	r.exec()
	r.exec()
	if err := r.close(); err != nil {
		return err
	}
	keeps := level == "repeatable read" || level == "serializable"
	if keeps && !sent.frozen && !g.o.IgnoreParked && len(g.set.claims) > 0 {
		g.store.frozen.Store(true)
		return errFrozen
	}
	return nil
}

// sentClaims are claims whose answers are still to be read.
type sentClaims struct {
	of     []int
	frozen bool      // with probes for parked rows that the snapshot cannot see
	fed    []int     // of these the parked rows are locked
	lanes  []laneKey // these are looked at
}

// queueClaims queues the claim of some keys, then, if there are such, the locks of
// the parked rows that they come from, then the look for their parked rows and at
// their lanes. The order is that in which all others lock: first keys, then rows.
func (g *begin) queueClaims(q *pgx.Batch, of, fed []int) sentClaims {
	sent := sentClaims{of: of, fed: fed}
	if len(of) == 0 {
		return sent
	}
	sent.frozen = g.store.frozen.Load() && !g.o.IgnoreParked
	args := g.set.claimArgs(of)
	if sent.frozen {
		q.Queue(g.store.sql.claimFrozen, args...)
		q.Queue(g.store.sql.unprobe, args[:3]...)
	} else {
		q.Queue(g.store.sql.claim, args...)
	}
	if len(fed) > 0 {
		ids, tokens := g.set.leases()
		q.Queue(g.store.sql.lockFed, ids, tokens)
	}
	sent.lanes = g.lanesOf(of)
	one := len(of) == 1 && len(g.entries) == 1
	switch {
	case len(sent.lanes) > 0 && one:
		q.Queue(g.store.sql.lookLaneOne, append(g.set.oneArgs(0), g.oneLaneArgs(sent.lanes[0])...)...)
	case len(sent.lanes) > 0:
		q.Queue(g.store.sql.lookLanes, append(args[:4:4], g.laneArgs(sent.lanes)...)...)
	case g.o.IgnoreParked:
	case one:
		q.Queue(g.store.sql.lookOne, g.set.oneArgs(0)...)
	default:
		q.Queue(g.store.sql.look, args[:4]...)
	}
	return sent
}

func (g *begin) readClaims(r *reader, sent sentClaims) {
	of := sent.of
	if len(of) == 0 {
		return
	}
	var k storedKey
	r.rows(func() {
		if i, ok := g.set.index[k]; ok {
			g.entries[i], g.ours[i] = inbox.Entry{Outcome: inbox.FirstAttempt}, true
		}
	}, &k.tenant, &k.consumer, &k.key)
	if sent.frozen {
		r.exec()
	}
	g.readLocks(r, sent.fed)
	var n int
	var p parkedRow
	found := func() {
		i := of[n-1]
		if !g.o.IgnoreParked && !g.entries[i].Gone && p.id != g.set.claims[i].Parked.ID {
			g.parked[i] = p
		}
	}
	switch {
	case len(sent.lanes) > 0:
		g.readLanes(r, sent.lanes, found, &n, &p)
	case !g.o.IgnoreParked:
		r.rows(found, &n, &p.id, &p.state)
	}
}

// duplicates reads the rows of a batch in which nothing was claimed and ends the
// transaction in the same round trip: mostly, all are done, and there is nothing
// to commit.
func (g *begin) duplicates(ctx context.Context, open []int) error {
	q := &pgx.Batch{}
	g.queueStored(q, open)
	q.Queue(sqlRollback)
	r := newReader(g.conn.SendBatch(ctx, q))
	defer r.skip()
	found := g.readStored(r, open)
	r.exec()
	if err := r.close(); err != nil {
		return err
	}
	for _, i := range open {
		if row := found[i]; row == nil || row.expired || row.record.Status != inbox.StatusDone {
			return errNotDone
		}
		if err := g.decide(i, found[i], nil); err != nil {
			return err
		}
	}
	g.over = true
	return nil
}

// queueStored queues the look for the rows of some keys.
func (g *begin) queueStored(q *pgx.Batch, of []int) {
	if len(of) == 1 {
		q.Queue(g.store.sql.storedOne, g.set.oneArgs(of[0])[:3]...)
		return
	}
	q.Queue(g.store.sql.stored, g.set.keyArgs(of)...)
}

// readStored reads the rows of some keys, by index.
func (g *begin) readStored(r *reader, of []int) map[int]*storedRow {
	found := make(map[int]*storedRow, len(of))
	row := new(storedRow)
	r.rows(func() {
		copied := *row
		found[of[row.n-1]] = &copied
		*row = storedRow{}
	}, append([]any{&row.n, &row.expired}, row.dest()...)...)
	return found
}

// resolve finds out about the keys that were not claimed (open) and about those
// with a parked row. It returns the keys that are still open.
func (g *begin) resolve(ctx context.Context, open []int) ([]int, error) {
	claimedParked := map[int64]int{}
	for i, p := range g.parked {
		if g.entries[i].Claimed() {
			claimedParked[p.id] = i
		}
	}
	var found map[int]*storedRow
	err := g.send(ctx, func(q *pgx.Batch) {
		if len(open) > 0 {
			g.queueStored(q, open)
		}
		g.queueAttach(q, claimedParked)
	}, func(r *reader) {
		if len(open) > 0 {
			found = g.readStored(r, open)
		}
		g.readAttach(r, claimedParked)
	})
	if err != nil {
		return nil, err
	}
	var again, expired []int
	conflicts := map[int64]int{}
	for _, i := range open {
		row := found[i]
		switch {
		case row == nil:
			again = append(again, i)
		case row.expired:
			again, expired = append(again, i), append(expired, i)
		default:
			if err := g.decide(i, row, conflicts); err != nil {
				return nil, err
			}
		}
	}
	return g.claimAgain(ctx, again, expired, conflicts)
}

// storedRow is a row that was in the way of the n-th key asked for.
type storedRow struct {
	recordScan
	n       int
	expired bool
}

// decide gives an entry the outcome of a stored row.
func (g *begin) decide(i int, row *storedRow, conflicts map[int64]int) error {
	if row.record.Status != inbox.StatusDone {
		return fmt.Errorf("%w: it is leased", inbox.ErrInFlight)
	}
	e := inbox.Entry{Outcome: inbox.Replay, Stored: row.done(g.set.claims[i].MessageKey)}
	if other(g.set.claims[i].Fingerprint, row.record.Fingerprint) {
		e.Outcome = inbox.Conflict
		if p, ok := g.parked[i]; ok {
			conflicts[p.id] = i
		}
	}
	g.entries[i] = e
	if e.Outcome == inbox.Replay {
		delete(g.parked, i)
	}
	return nil
}

// other tells whether two fingerprints differ; they are compared only when
// there are two.
func other(a, b []byte) bool { return a != nil && b != nil && !bytes.Equal(a, b) }

// claimAgain deletes expired rows, claims again, and attaches conflicts that are
// parked. It returns the keys that were not claimed.
func (g *begin) claimAgain(ctx context.Context, again, expired []int, conflicts map[int64]int) ([]int, error) {
	if len(again) == 0 && len(conflicts) == 0 {
		return nil, nil
	}
	g.set.sort(again)
	g.set.sort(expired)
	for _, i := range again {
		delete(g.parked, i) // To be looked for again.
	}
	var sent sentClaims
	err := g.send(ctx, func(q *pgx.Batch) {
		g.queueAttach(q, conflicts)
		if len(expired) > 0 {
			q.Queue(g.store.sql.forget, g.set.keyArgs(expired)...)
		}
		sent = g.queueClaims(q, again, nil)
	}, func(r *reader) {
		g.readAttach(r, conflicts)
		if len(expired) > 0 {
			r.exec()
		}
		g.readClaims(r, sent)
	})
	if err != nil {
		return nil, err
	}
	var open []int
	for _, i := range again {
		if !g.entries[i].Claimed() {
			open = append(open, i)
		}
	}
	return open, nil
}

// queueAttach queues the attachment of duplicates to parked rows, by row id.
func (g *begin) queueAttach(q *pgx.Batch, rows map[int64]int) {
	if len(rows) == 0 {
		return
	}
	ids := make([]int64, 0, len(rows))
	for id := range rows {
		ids = append(ids, id)
	}
	q.Queue(g.store.sql.attach, ids)
}

// readAttach gives entries whose duplicate was attached their outcome. A row
// that is no longer there leaves the entry as it is.
func (g *begin) readAttach(r *reader, rows map[int64]int) {
	if len(rows) == 0 {
		return
	}
	var p parkedRow
	r.rows(func() { g.entries[rows[p.id]] = inbox.Entry{Outcome: p.outcome()} }, &p.id, &p.state)
	for _, i := range rows {
		delete(g.parked, i)
	}
}

// send sends further statements of the begin in one round trip, outside the
// run's savepoint and with time limits of their own.
func (g *begin) send(ctx context.Context, queue func(q *pgx.Batch), read func(r *reader)) error {
	q := &pgx.Batch{}
	q.Queue(sqlRelease)
	g.bound(q)
	queue(q)
	q.Queue(g.store.sql.unbound)
	q.Queue(sqlSavepoint)
	r := newReader(g.conn.SendBatch(ctx, q))
	defer r.skip()
	r.exec()
	r.exec()
	read(r)
	return r.close()
}
