package inboxpgx

import (
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// laneKey is a lane as it is in the table.
type laneKey struct{ consumer, lane string }

func laneOf(c *inbox.Claim) laneKey { return laneKey{c.Consumer, string(column.Lane(c.Lane))} }

// laneState is what is in a lane's way.
type laneState struct {
	first   int64 // the id of the first parked row that is none of the batch's own
	own     bool  // the batch has a row of it
	waiting int64 // the rows that wait
	bytes   int64 // their bodies
}

// leases are the ids and tokens of the claims that come from the parked table.
func (c *claimSet) leases() (ids, tokens []int64) {
	ids, tokens = make([]int64, len(c.fed)), make([]int64, len(c.fed))
	for n, i := range c.fed {
		ids[n], tokens[n] = c.claims[i].Parked.ID, c.claims[i].Parked.Token
	}
	return ids, tokens
}

// readLocks notes which parked rows were locked; the others are gone.
func (g *begin) readLocks(r *reader, fed []int) {
	if len(fed) == 0 {
		return
	}
	var n int
	r.rows(func() { g.locked[fed[n-1]] = true }, &n)
	for _, i := range fed {
		if !g.locked[i] {
			g.entries[i] = inbox.Entry{Gone: true}
		}
	}
}

// lanesOf returns the lanes of some claims that have to be looked at.
func (g *begin) lanesOf(of []int) []laneKey {
	if !g.o.Order.Keep {
		return nil
	}
	var lanes []laneKey
	seen := map[laneKey]bool{}
	for _, i := range of {
		c := &g.set.claims[i]
		if c.Lane == "" {
			continue
		}
		if k := laneOf(c); !seen[k] {
			seen[k] = true
			lanes = append(lanes, k)
		}
	}
	return lanes
}

// laneArgs are the parameters $5 to $10 of lookLanes.
func (g *begin) laneArgs(of []laneKey) []any {
	consumers, lanes, most := make([]string, len(of)), make([][]byte, len(of)), make([]*int64, len(of))
	live := map[laneKey]bool{}
	for i := range g.set.claims {
		if c := &g.set.claims[i]; c.Lane != "" && c.Parked.ID == 0 {
			live[laneOf(c)] = true
		}
	}
	for n, k := range of {
		consumers[n], lanes[n], most[n] = k.consumer, []byte(k.lane), g.countTo(live[k])
	}
	ids, tokens := g.set.leases()
	return []any{consumers, lanes, g.o.Order.BlockedByDead, ids, tokens, most}
}

// oneLaneArgs are the parameters $5 to $8 of lookLaneOne.
func (g *begin) oneLaneArgs(lane laneKey) []any {
	own := g.set.claims[0].Parked.ID
	return []any{[]byte(lane.lane), g.o.Order.BlockedByDead, own, g.countTo(own == 0)}
}

// countTo is up to where the waiting rows of a lane have to be counted; nil for no
// end. Only live messages ask whether there is room.
func (g *begin) countTo(live bool) *int64 {
	switch o := g.o.Order; {
	case !live, o.MaxWaiting <= 0 && o.MaxWaitingBytes <= 0:
		return new(int64)
	case o.MaxWaiting > 0:
		return new(int64(o.MaxWaiting))
	}
	return nil
}

// readLanes reads the answer of lookLanes: rows of keys, for which it calls found
// as for look, and rows of lanes, which have no state.
func (g *begin) readLanes(r *reader, of []laneKey, found func(), n *int, p *parkedRow) {
	if g.lanes == nil {
		g.lanes = make(map[laneKey]*laneState, len(of))
	}
	for _, k := range of {
		g.lanes[k] = &laneState{}
	}
	var waiting, bytes int64
	r.rows(func() {
		if p.state != "" {
			found()
			return
		}
		l := g.lanes[of[*n-1]]
		l.first, l.waiting, l.bytes = p.id, waiting, bytes
	}, n, &p.id, &p.state, &waiting, &bytes)
}

// hold marks the claimed entries that must not run now.
func (g *begin) hold() {
	if len(g.lanes) == 0 {
		return
	}
	for _, i := range g.set.fed {
		if l := g.lanes[laneOf(&g.set.claims[i])]; l != nil && g.locked[i] {
			l.own = true
		}
	}
	for i := range g.entries {
		c, e := &g.set.claims[i], &g.entries[i]
		l := g.lanes[laneOf(c)]
		switch {
		case !e.Claimed() || c.Lane == "" || l == nil:
		case c.Parked.ID != 0:
			e.Held = l.first != 0 && l.first < c.Parked.ID
		case l.first != 0 || l.own:
			o := g.o.Order
			e.Held = true
			e.Full = o.MaxWaiting > 0 && l.waiting >= int64(o.MaxWaiting) || o.MaxWaitingBytes > 0 && l.bytes >= o.MaxWaitingBytes
			if !e.Full {
				l.waiting++ // It will be parked.
			}
		}
	}
}
