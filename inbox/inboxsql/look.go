package inboxsql

import (
	"cmp"
	"context"
	"slices"

	"github.com/ackafter/ackafter/inbox"
)

// look asks the parked table about the claims: whether their leases hold, whether
// their messages are there, and what is there of their lanes. It comes after the
// claims, so that nobody can park the message of a claimed key any more.
func (b *batch) look(ctx context.Context) error {
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
	var held []int // places in cs
	for i, c := range cs {
		p := states[i]
		if found := p.id != 0 && p.id != c.Parked.ID; !found || b.ignoreParked {
			if p.held && b.entries[c.entry].Claimed() {
				held = append(held, i)
			}
			continue
		}
		if _, err := q.ExecContext(ctx, d.sql(`update @inbox_parked set duplicates = duplicates + 1, updated_at = {now} where id = $1`),
			p.id); err != nil {
			return err
		}
		if b.entries[c.entry].Claimed() {
			giveUp = append(giveUp, c)
		}
		outcome := inbox.WasParked
		if p.state == inbox.ParkedDead || p.state == inbox.ParkedDiscarded {
			outcome = inbox.Dead
		}
		b.entries[c.entry] = inbox.Entry{Outcome: outcome}
	}
	b.holdBack(cs, states, held)
	return d.drop(ctx, q, giveUp)
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
