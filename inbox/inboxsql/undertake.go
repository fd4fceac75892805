package inboxsql

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// notLeased tells that nobody works on a row of inbox_parked as p.
const notLeased = `(p.lease_until is null or p.lease_until <= {now})`

// RetryParked makes messages due now, see inbox.Undertaker.
func (s *Store) RetryParked(ctx context.Context, ids []int64) (int, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	n, err := s.change(ctx, `update @inbox_parked set state = 'retry', attempts = 0, next_attempt_at = {now}, dead_at = null,
			lease_until = null, updated_at = {now}
		where id in (select p.id from @inbox_parked as p
			where p.id in {ids} and p.state in ('dead', 'retry') and `+notLeased+` order by p.id{for update})`, ids)
	if err != nil {
		return 0, fmt.Errorf("inboxsql: retry parked messages: %w", s.failed(ctx, err))
	}
	return n, nil
}

// DiscardParked gives messages up, see inbox.Undertaker. note takes the place of
// the error's text.
func (s *Store) DiscardParked(ctx context.Context, ids []int64, note string) (int, error) {
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	n, err := s.change(ctx, `update @inbox_parked set state = 'discarded', error = $2, body = null, headers = null,
			next_attempt_at = null, dead_at = {now}, lease_until = null, updated_at = {now}
		where id in (select p.id from @inbox_parked as p
			where p.id in {ids} and p.state <> 'discarded' and `+notLeased+` order by p.id{for update})`,
		ids, column.Text(note, maxError))
	if err != nil {
		return 0, fmt.Errorf("inboxsql: discard parked messages: %w", s.failed(ctx, err))
	}
	return n, nil
}

// GroupParked counts parked messages, see inbox.Undertaker. It reads all that the
// filter selects.
func (s *Store) GroupParked(ctx context.Context, f inbox.ParkedFilter) ([]inbox.ParkedGroup, error) {
	where, args, ok := filtered(s.d, f)
	if !ok {
		return nil, nil
	}
	ctx, cancel := s.bound(ctx, 0)
	defer cancel()
	var all []inbox.ParkedGroup
	err := s.query(ctx, `
		select g.failure, g.consumer, g.state, g.reason, n.error, g.n, g.since, g.until
		from (
			select p.failure, p.consumer, p.state, p.reason, count(*) as n, max(p.id) as newest,
				min(p.parked_at) as since, max(p.parked_at) as until
			from @inbox_parked as p where `+where+`
			group by p.failure, p.consumer, p.state, p.reason
		) as g join @inbox_parked as n on n.id = g.newest
		order by g.n desc, g.newest desc`,
		func(rows *sql.Rows) error {
			var g inbox.ParkedGroup
			err := rows.Scan(&g.Failure, &g.Consumer, &g.State, &g.Reason, &g.Error, &g.Count, (*moment)(&g.First), (*moment)(&g.Last))
			all = append(all, g)
			return err
		}, args...)
	if err != nil {
		return nil, fmt.Errorf("inboxsql: group parked messages: %w", s.failed(ctx, err))
	}
	return all, nil
}
