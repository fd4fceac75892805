package inboxsql

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"slices"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// look asks the parked table about the claims: whether their leases hold, whether
// their messages are there, and what is there of their lanes. It comes after the
// claims, so that nobody can park the message of a claimed key any more.
func (b *batch) look(ctx context.Context, deadline time.Time) error {
	d, q := b.store.d, b.s.own
	own, giveUp, err := b.lookAtLeases(ctx)
	if err != nil {
		return err
	}
	var cs []claim
	for _, c := range b.claims {
		e := b.entries[c.entry]
		ordered := b.order.Keep && c.Lane != "" && e.Claimed()
		if ordered || !b.ignoreParked && (e.Claimed() || e.Outcome == inbox.Conflict) {
			cs = append(cs, c)
		}
	}
	if len(cs) == 0 {
		if err := d.opened(ctx, q); err != nil {
			return err
		}
		return d.drop(ctx, q, giveUp)
	}
	states, err := d.parked(ctx, q, cs, own, b.order)
	if err != nil {
		return err
	}
	attached, err := b.attach(ctx, cs, states, deadline)
	if err != nil {
		return err
	}
	var held []int // places in cs
	for i, c := range cs {
		e := &b.entries[c.entry]
		state, isParked := attached[states[i].id]
		switch {
		case isParked:
			if e.Claimed() {
				giveUp = append(giveUp, c)
			}
			*e = inbox.Entry{Outcome: inbox.WasParked}
			if state == inbox.ParkedDead || state == inbox.ParkedDiscarded {
				e.Outcome = inbox.Dead
			}
		case states[i].held && e.Claimed():
			held = append(held, i)
		}
	}
	b.holdBack(cs, states, held)
	return d.drop(ctx, q, giveUp)
}

// attach counts this delivery with the rows of messages that are parked, and
// returns their states by their ids. A row that is gone once nobody else has it
// locked is none.
func (b *batch) attach(ctx context.Context, cs []claim, states []parkedState, deadline time.Time) (map[int64]inbox.ParkedState, error) {
	var ids []int64
	for i, p := range states {
		if p.id != 0 && p.id != cs[i].Parked.ID && !b.ignoreParked {
			ids = append(ids, p.id)
		}
	}
	if len(ids) == 0 {
		return nil, nil
	}
	d, q := b.store.d, b.s.own
	text, err := json.Marshal(ids)
	if err != nil {
		return nil, err
	}
	if err := d.patience(ctx, b.s, max(time.Until(deadline), time.Millisecond)); err != nil {
		return nil, err
	}
	attached := make(map[int64]inbox.ParkedState, len(ids))
	err = scanAll(ctx, q, d.sql(`update @inbox_parked set duplicates = duplicates + 1, updated_at = {now}
		where id in (select p.id from @inbox_parked as p where p.id in {ids} order by p.id{for update}) returning id, state`),
		func(rows *sql.Rows) error {
			var id int64
			var state inbox.ParkedState
			err := rows.Scan(&id, &state)
			attached[id] = state
			return err
		}, string(text))
	if err != nil {
		return nil, err
	}
	return attached, d.opened(ctx, q)
}

// lookAtLeases finds out which claims that came from the parked table are
// nobody else's by now. It returns the rows that are ours, and the claims of the
// others.
func (b *batch) lookAtLeases(ctx context.Context) (own []int64, giveUp []claim, err error) {
	var cs []claim
	for _, c := range b.claims {
		if c.Parked.ID != 0 {
			cs = append(cs, c)
		}
	}
	if len(cs) == 0 {
		return nil, nil, nil
	}
	holds, err := b.store.d.leased(ctx, b.s.own, cs)
	if err != nil {
		return nil, nil, err
	}
	for i, c := range cs {
		if holds[i] {
			own = append(own, c.Parked.ID)
			continue
		}
		if b.entries[c.entry].Claimed() {
			giveUp = append(giveUp, c)
		}
		b.entries[c.entry] = inbox.Entry{Gone: true}
	}
	return own, giveUp, nil
}

// holdBack marks the entries of claims that have to wait, in the caller's order:
// each of them that can be parked takes a place.
func (b *batch) holdBack(cs []claim, states []parkedState, held []int) {
	type lane struct{ consumer, lane string }
	ahead := map[lane]int{}
	slices.SortFunc(held, func(i, j int) int { return cmp.Compare(cs[i].entry, cs[j].entry) })
	for _, i := range held {
		c, p, e := &cs[i], &states[i], &b.entries[cs[i].entry]
		e.Held = true
		if c.Parked.ID != 0 {
			continue // It has its place.
		}
		l := lane{c.Consumer, c.Lane}
		e.Full = b.order.MaxWaiting > 0 && p.waiting+ahead[l] >= b.order.MaxWaiting ||
			b.order.MaxWaitingBytes > 0 && p.bytes >= b.order.MaxWaitingBytes
		if !e.Full {
			ahead[l]++
		}
	}
}
