package inboxsql

import (
	"context"
	"database/sql"
	"strconv"
	"strings"

	"github.com/ackafter/ackafter/inbox"
)

func (d postgres) leased(ctx context.Context, q querier, cs []claim) ([]bool, error) {
	holds := make([]bool, len(cs))
	err := d.query(ctx, q, `
		select c.i from {rows} join @inbox_parked as p on p.id = c.q and p.token = c.o
		where p.lease_until is not null order by p.id for update of p`, cs, func(rows *sql.Rows) error {
		var i int
		if err := rows.Scan(&i); err != nil {
			return err
		}
		holds[i] = true
		return nil
	})
	return holds, err
}

// parked needs a statement, and thus a snapshot, of its own after take: a twin
// that waited for a claim whose message was parked instead has to see that. Only
// at READ COMMITTED does a statement have a snapshot of its own; above that, see
// parkedUnseen.
func (d postgres) parked(ctx context.Context, q querier, cs []claim, own []int64, o inbox.Order) ([]parkedState, error) {
	states := make([]parkedState, len(cs))
	var level string
	var unbound [2]string
	query, more := lookForParked, []any(nil)
	if o.Keep {
		query, more = lookForLanes(o), append(more, idArray(own))
	}
	err := d.query(ctx, q, query, cs, func(rows *sql.Rows) error {
		var i int
		var p parkedState
		if err := rows.Scan(&level, &unbound[0], &unbound[1], &i, &p.id, &p.state, &p.held, &p.waiting, &p.bytes); err != nil {
			return err
		}
		states[i] = p
		return nil
	}, more...)
	if err == nil && (level == "repeatable read" || level == "serializable") {
		err = d.parkedUnseen(ctx, q, cs, states)
	}
	return states, err
}

const (
	parkedAnswer   = `select current_setting('transaction_isolation'), ` + postgresUnbound + `, c.i, coalesce(p.id, 0), coalesce(p.state, ''), `
	withParked     = ` left join @inbox_parked as p on {same p} and p.fingerprint = coalesce(decode(c.f, 'hex'), '')`
	lookForParked  = parkedAnswer + `false, 0, 0 from {rows}` + withParked
	sameLane       = `h.consumer = c.c and h.lane = decode(c.l, 'hex') and h.lane <> '' and (c.q is null or h.id < c.q and h.id <> all($2::text::bigint[]))`
	isHeld         = `exists (select 1 from @inbox_parked as h where ` + sameLane + ` and h.state in ('retry', 'waiting'))`
	isBlocked      = `exists (select 1 from @inbox_parked as h where ` + sameLane + ` and h.state = 'dead')`
	waitingInLanes = `with c as materialized (select * from {rows}),
		w as materialized (
			select c.c, c.l, w.n, w.b
			from (select distinct c.c, c.l from c where c.l is not null and c.q is null) as c
			cross join lateral (select count(*) as n, coalesce(sum(octet_length(h.body)), 0)::bigint as b from @inbox_parked as h
				where h.consumer = c.c and h.lane = decode(c.l, 'hex') and h.lane <> '' and h.state in ('retry', 'waiting')
				and h.state = 'waiting') as w)
		`
	withWaiting = ` left join w on w.c = c.c and w.l = c.l and c.q is null`
)

// lookForLanes is lookForParked together with what holds the claims' lanes. $2 are
// the rows of the batch's own leases.
func lookForLanes(o inbox.Order) string {
	held := isHeld
	if o.BlockedByDead {
		held = `(` + isHeld + ` or ` + isBlocked + `)`
	}
	if o.MaxWaiting <= 0 && o.MaxWaitingBytes <= 0 {
		return parkedAnswer + held + `, 0, 0 from {rows}` + withParked
	}
	return waitingInLanes + parkedAnswer + held + `, coalesce(w.n, 0), coalesce(w.b, 0) from c` + withParked + withWaiting
}

// idArray is an array of PostgreSQL as text, which every driver knows.
func idArray(ids []int64) string {
	var b strings.Builder
	b.WriteByte('{')
	for i, id := range ids {
		if i > 0 {
			b.WriteByte(',')
		}
		b.WriteString(strconv.FormatInt(id, 10))
	}
	b.WriteByte('}')
	return b.String()
}

// parkedUnseen fails with a serialization failure when there is a parked row
// that the transaction's snapshot does not show: the unique constraint looks at
// what is there.
func (d postgres) parkedUnseen(ctx context.Context, q querier, cs []claim, states []parkedState) error {
	var free []claim
	for i, p := range states {
		if p.id == 0 {
			free = append(free, cs[i])
		}
	}
	if len(free) == 0 {
		return nil
	}
	err := d.run(ctx, q, `
		insert into @inbox_parked (tenant, consumer, message_key, fingerprint, state, reason)
		select c.t, c.c, c.k, coalesce(decode(c.f, 'hex'), ''), 'waiting', '' from {rows} order by c.i
		on conflict (tenant, consumer, message_key, fingerprint) do nothing`, free, nil)
	if err != nil {
		return err
	}
	return d.unpark(ctx, q, free)
}

func (d postgres) unpark(ctx context.Context, q querier, cs []claim) error {
	return d.run(ctx, q, `delete from @inbox_parked as p using {rows}
		where {same p} and p.fingerprint = coalesce(decode(c.f, 'hex'), '')`, cs, nil)
}

func (d postgres) unlease(ctx context.Context, q querier, cs []claim) error {
	return d.run(ctx, q, `delete from @inbox_parked as p using {rows} where p.id = c.q and p.token = c.o`, cs, nil)
}
