package inboxsql

import (
	"context"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"fmt"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

func leaseArgs(c *claim) []any { return []any{c.Parked.ID, c.Parked.Token} }

func (d sqlite) leased(ctx context.Context, q querier, cs []claim) ([]bool, error) {
	holds := make([]bool, len(cs))
	err := d.eachRow(ctx, q, `select true from inbox_parked where id = $1 and token = $2 and lease_until is not null`,
		cs, leaseArgs, func(i int, row *sql.Row) error { return row.Scan(&holds[i]) })
	return holds, err
}

func (d sqlite) parked(ctx context.Context, q querier, cs []claim, own []int64, o inbox.Order) ([]parkedState, error) {
	states := make([]parkedState, len(cs))
	var some bool // Usually nothing is parked.
	if err := q.QueryRowContext(ctx, `select exists (select 1 from inbox_parked)`).Scan(&some); err != nil || !some {
		return states, err
	}
	err := d.eachRow(ctx, q, `select id, state from inbox_parked
		where tenant = $1 and consumer = $2 and message_key = $3 and fingerprint = $4`,
		cs, fingerprintArgs, func(i int, row *sql.Row) error { return row.Scan(&states[i].id, &states[i].state) })
	if err == nil && o.Keep {
		err = d.lanes(ctx, q, cs, own, o, states)
	}
	return states, err
}

// sqliteLane is what is parked of one lane.
type sqliteLane struct {
	first   int64 // the row that holds it; 0 for none
	other   int64 // the first one that is not the batch's own
	waiting int
	bytes   int64
}

// lanes looks at each lane once, in one query.
func (d sqlite) lanes(ctx context.Context, q querier, cs []claim, own []int64, o inbox.Order, states []parkedState) error {
	var names [][2]string // consumer, and lane in hex
	places := map[[2]string]int{}
	for i := range cs {
		if n := laneName(&cs[i]); cs[i].Lane != "" {
			if _, ok := places[n]; !ok {
				places[n] = len(names)
				names = append(names, n)
			}
		}
	}
	lanes, err := d.readLanes(ctx, q, names, own, o)
	if err != nil {
		return err
	}
	for i := range cs {
		c := &cs[i]
		if c.Lane == "" {
			continue
		}
		l := lanes[places[laneName(c)]]
		if c.Parked.ID != 0 {
			states[i].held = l.other != 0 && l.other < c.Parked.ID
			continue
		}
		states[i].held, states[i].waiting, states[i].bytes = l.first != 0, l.waiting, l.bytes
	}
	return nil
}

func laneName(c *claim) [2]string {
	return [2]string{c.Consumer, hex.EncodeToString(column.Lane(c.Lane))}
}

func (d sqlite) readLanes(ctx context.Context, q querier, names [][2]string, own []int64, o inbox.Order) (lanes []sqliteLane, err error) {
	lanes = make([]sqliteLane, len(names))
	if len(names) == 0 {
		return lanes, nil
	}
	const inLane = ` from inbox_parked as p where p.consumer = n.consumer and p.lane = n.lane and p.lane <> x'' and p.state `
	const counted = `case when first then (select %s` + inLane + `in ('retry', 'waiting') and p.state = 'waiting') else 0 end`
	number, size := fmt.Sprintf(counted, "count(*)"), fmt.Sprintf(counted, "coalesce(sum(length(p.body)), 0)")
	if o.MaxWaiting <= 0 {
		number = "0"
	}
	if o.MaxWaitingBytes <= 0 {
		size = "0"
	}
	dead := "0"
	if o.BlockedByDead {
		dead = `coalesce((select p.id` + inLane + `= 'dead' order by p.id limit 1), 0)`
	}
	texts := [2]string{}
	for i, v := range []any{names, append([]int64{}, own...)} {
		text, err := json.Marshal(v)
		if err != nil {
			return nil, err
		}
		texts[i] = string(text)
	}
	err = scanAll(ctx, q, d.sql(`
		with n (i, consumer, lane) as materialized (select key, value ->> 0, unhex(value ->> 1) from json_each($1)),
		f (i, consumer, lane, first, other, dead) as materialized (select i, consumer, lane,
			coalesce((select p.id`+inLane+`in ('retry', 'waiting') order by p.id limit 1), 0),
			coalesce((select p.id`+inLane+`in ('retry', 'waiting')
				and p.id not in (select value from json_each($2)) order by p.id limit 1), 0), `+dead+` from n)
		select i, first, other, dead, `+number+`, `+size+` from f as n`), func(rows *sql.Rows) error {
		var i int
		var dead int64
		var l sqliteLane
		if err := rows.Scan(&i, &l.first, &l.other, &dead, &l.waiting, &l.bytes); err != nil {
			return err
		}
		l.first, l.other = earlier(l.first, dead), earlier(l.other, dead)
		lanes[i] = l
		return nil
	}, texts[0], texts[1])
	return lanes, err
}

// earlier is the lower of two ids that may be 0, for none.
func earlier(a, b int64) int64 {
	if a == 0 || b != 0 && b < a {
		return b
	}
	return a
}

func (d sqlite) unpark(ctx context.Context, q querier, cs []claim) error {
	_, err := d.each(ctx, q, `delete from inbox_parked
		where tenant = $1 and consumer = $2 and message_key = $3 and fingerprint = $4`,
		cs, func(_ int, c *claim) []any { return fingerprintArgs(c) })
	return err
}

func (d sqlite) unlease(ctx context.Context, q querier, cs []claim) error {
	_, err := d.each(ctx, q, `delete from inbox_parked where id = $1 and token = $2`,
		cs, func(_ int, c *claim) []any { return leaseArgs(c) })
	return err
}
