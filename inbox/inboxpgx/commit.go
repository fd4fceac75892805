package inboxpgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// maxError is how much of an error's text is kept with a parked message.
const maxError = 8 << 10

// Park implements inbox.Batch.
func (b *batch) Park(ctx context.Context, i int, p inbox.Parked) error {
	if err := b.park(ctx, i, p); err != nil {
		return fmt.Errorf("inboxpgx: park: %w", err)
	}
	return nil
}

func (b *batch) park(ctx context.Context, i int, p inbox.Parked) error {
	switch {
	case i >= len(b.entries):
		return fmt.Errorf("entry %d: there are %d", i, len(b.entries))
	case p.Message == nil:
		return errors.New("field Message must not be nil")
	}
	if err := b.enter(idle); err != nil {
		return err
	}
	defer b.leave(idle, nil)
	q := &pgx.Batch{}
	if b.over {
		q.BeginTx(pgx.TxOptions{IsoLevel: b.store.isolation})
	}
	if b.sp != spNone {
		// Outside of any run's savepoint, or a later failure would take it along.
		q.Queue(sqlRelease)
	}
	if p.Lease.ID != 0 {
		q.Queue(b.store.sql.parkFed, parkFedArgs(&p)...)
	} else {
		q.Queue(b.store.sql.park, parkArgs(&p)...)
	}
	r := newReader(b.conn.SendBatch(ctx, q))
	for range q.Len() - 1 {
		r.exec()
	}
	tag := r.exec()
	if err := r.close(); err != nil {
		return savepointError(marked(b.conn, err))
	}
	b.sp, b.over = spNone, false
	if i >= 0 {
		b.keep(i, false, nil)
	}
	switch {
	case p.Lease.ID == 0:
	case tag.RowsAffected() == 0:
		return fmt.Errorf("the lease of parked row %d is over: %w", p.Lease.ID, inbox.ErrNotFound)
	case i >= 0:
		b.reparked[i] = true
	}
	return nil
}

// parkFedArgs are the parameters of parkFed.
func parkFedArgs(p *inbox.Parked) []any {
	return []any{
		p.Lease.ID, p.Lease.Token, string(p.State), string(p.Reason), column.Text(p.Error, maxError), column.Text(p.Failure, maxText),
		toInt32(p.Attempts), column.Text(p.Worker, maxText), max(p.After, 0).Microseconds(),
	}
}

func parkArgs(p *inbox.Parked) []any {
	m := p.Message
	return []any{
		p.Tenant, p.Consumer, column.Key(p.MessageKey), orEmpty(p.Fingerprint), column.Lane(p.Lane), string(p.State), string(p.Reason),
		column.Text(p.Error, maxError), column.Text(p.Failure, maxText), toInt32(p.Attempts),
		column.Text(m.ID, maxText), column.Text(m.Source, maxText), toPosition(m.Position), m.Key, column.EncodeHeaders(m.Headers), m.Body,
		toTime(m.Time), toTime(p.EventTime), column.Text(p.Worker, maxText), max(p.After, 0).Microseconds(),
	}
}

// orEmpty is for columns that hold no null.
func orEmpty(b []byte) []byte {
	if b == nil {
		return []byte{}
	}
	return b
}

// Commit implements inbox.Batch.
func (b *batch) Commit(ctx context.Context) error {
	if err := b.commit(ctx); err != nil {
		return fmt.Errorf("inboxpgx: commit: %w", err)
	}
	return nil
}

func (b *batch) commit(ctx context.Context) error {
	if err := b.enter(idle); err != nil {
		if !errors.Is(err, errEnded) {
			b.Abort() //nolint:contextcheck // Like any Abort, it does not depend on a caller's time.
		}
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, err)
	}
	if b.over {
		if b.end() {
			giveBack(ctx, b.pooled)
		}
		return nil
	}
	q := &pgx.Batch{}
	b.queueEnd(q)
	q.Queue(sqlCommit)
	r := newReader(b.conn.SendBatch(ctx, q))
	for range q.Len() - 1 {
		r.exec()
	}
	tag := r.exec()
	err := marked(b.conn, r.close())
	if b.end() {
		giveBack(ctx, b.pooled)
	}
	switch {
	case err == nil && tag.String() == "COMMIT":
		return nil
	case err == nil:
		return fmt.Errorf("%w: the server answered %q", inbox.ErrNotCommitted, tag)
	case notCommitted(err):
		return fmt.Errorf("%w: %w", inbox.ErrNotCommitted, savepointError(err))
	}
	return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, err)
}

// queueEnd queues what precedes COMMIT.
func (b *batch) queueEnd(q *pgx.Batch) {
	var dropped, stored, unparked []int
	var values [][]byte
	var fed []int64
	for _, i := range b.set.order {
		if b.leaves(i) {
			fed = append(fed, b.set.claims[i].Parked.ID)
		}
		switch {
		case b.kept[i]:
			if b.results[i] != nil {
				stored, values = append(stored, i), append(values, b.results[i])
			}
			if b.unparks {
				unparked = append(unparked, i)
			}
		case b.ours[i]:
			// Claimed and not finished, or claimed and found to be parked.
			dropped = append(dropped, i)
		}
	}
	if b.sp != spNone {
		q.Queue(sqlRelease)
	}
	if len(dropped) > 0 {
		q.Queue(b.store.sql.drop, b.set.keyArgs(dropped)...)
	}
	switch len(stored) {
	case 0:
	case 1:
		q.Queue(b.store.sql.saveResult, append(b.set.oneArgs(stored[0])[:3:3], values[0])...)
	default:
		q.Queue(b.store.sql.saveResults, append(b.set.keyArgs(stored), values)...)
	}
	if len(unparked) > 0 {
		q.Queue(b.store.sql.unpark, b.set.fingerprintArgs(unparked)...)
	}
	if len(fed) > 0 {
		q.Queue(b.store.sql.unparkFed, fed)
	}
	if b.sealed {
		q.Queue("select " + durable) // A handler may have changed that, too.
	}
	if b.guarded {
		q.Queue(b.store.sql.unguard)
	}
	if b.replicated {
		q.Queue(waitForStandby)
	}
}

// leaves tells whether entry i leaves the parked table at Commit. Its row is locked.
func (b *batch) leaves(i int) bool {
	if b.locked == nil || !b.locked[i] || b.reparked[i] {
		return false
	}
	outcome := b.entries[i].Outcome
	return b.kept[i] || outcome == inbox.Replay || outcome == inbox.Conflict
}

// notCommitted tells that COMMIT did not happen for certain: the server said so
// and lives, or COMMIT was not sent. A FATAL error is no such answer, since it
// may have come after the work was done.
func notCommitted(err error) bool {
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		severity := pg.SeverityUnlocalized
		if severity == "" {
			severity = pg.Severity
		}
		return severity == severityOfLiveErrors
	}
	var early pgx.ErrPreprocessingBatch
	return errors.As(err, &early) || pgconn.SafeToRetry(err)
}
