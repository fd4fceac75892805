package sqs

import (
	"slices"
	"time"
)

// give is what goes back to SQS together, in this order.
type give struct {
	entries []*entry
	tries   int
	next    time.Time
}

// work is what one call, or a give, has to say.
type work struct {
	acks []ackWork
	give *give
}

// ackWork is an ack with the handle that is the newest now.
type ackWork struct {
	*entry
	handle string
}

func (l *ledger) give(entries []*entry) {
	for _, e := range entries {
		l.forget(e)
	}
	l.gives = append(l.gives, &give{entries: entries})
	l.kick()
}

// pick returns something to send, or else when to look again (zero: when the signal
// is closed); over: there is nothing and will be nothing. done must be called after
// it was sent.
func (l *ledger) pick(now time.Time) (w work, look time.Time, signal <-chan struct{}, over bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	later := func(t time.Time) {
		if look.IsZero() || t.Before(look) {
			look = t
		}
	}
	for i, g := range l.gives {
		switch {
		case slices.ContainsFunc(g.entries, func(e *entry) bool { return e.beating }):
		case now.Before(g.next):
			later(g.next)
		default:
			l.gives = slices.Delete(l.gives, i, i+1)
			l.sending++
			return work{give: g}, look, nil, false
		}
	}
	fresh := 0
	for i, e := range l.acks {
		switch {
		case now.Before(e.next):
			later(e.next)
		case !e.alone:
			fresh++
		default: // It failed before.
			l.acks = slices.Delete(l.acks, i, i+1)
			l.sending++
			return work{acks: []ackWork{{e, e.handle}}}, look, nil, false
		}
	}
	if acks := l.pickFresh(fresh, now, later); len(acks) > 0 {
		l.sending++
		return work{acks: acks}, look, nil, false
	}
	return work{}, look, l.signal, l.complete && len(l.gives) == 0 && len(l.acks) == 0 && l.sending == 0
}

// pickFresh returns acks that may go together, when there are enough for a call or
// they are old enough.
func (l *ledger) pickFresh(fresh int, now time.Time, later func(time.Time)) []ackWork {
	if fresh == 0 {
		return nil
	}
	together := func(e *entry) bool { return !e.alone && !now.Before(e.next) }
	if ripe := l.ripe(together); fresh < batch && !l.closing && now.Before(ripe) {
		later(ripe)
		return nil
	}
	var acks []ackWork
	l.acks = slices.DeleteFunc(l.acks, func(e *entry) bool {
		if !together(e) || len(acks) == batch {
			return false
		}
		acks = append(acks, ackWork{e, e.handle})
		return true
	})
	return acks
}

// ripe is when the first ack of a kind has waited long enough for others, or its lease
// nears its end.
func (l *ledger) ripe(kind func(*entry) bool) (first time.Time) {
	for _, e := range l.acks {
		if !kind(e) {
			continue
		}
		for _, t := range []time.Time{e.settled.Add(l.ackDelay), e.until.Add(-l.lease / 3)} {
			if first.IsZero() || t.Before(first) {
				first = t
			}
		}
	}
	return first
}

// sent notes that a call has ended.
func (l *ledger) sent() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sending--
	l.kick()
}

// acked notes that an ack arrived, or was given up; it returns false when the
// message came again meanwhile, so that the ack has to be sent with the new handle.
func (l *ledger) acked(a ackWork) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if a.handle != a.entry.handle {
		a.tries, a.alone, a.next = 1, true, time.Time{}
		l.acks = append(l.acks, a.entry)
		return false
	}
	l.forget(a.entry)
	return true
}

// again notes that an ack has to be sent again, alone or with others.
func (l *ledger) again(a ackWork, next time.Time, alone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.tries++
	a.alone = a.alone || alone
	a.next = next
	l.acks = append(l.acks, a.entry)
}

// giveAgain notes that what is left of a give has to be sent again.
func (l *ledger) giveAgain(g *give, next time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	g.tries++
	g.next = next
	l.gives = append(l.gives, g)
}

// leftOver is what SQS was not told: acks, and messages that were to go back.
func (l *ledger) leftOver() (acks, gives int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, g := range l.gives {
		gives += len(g.entries)
	}
	return len(l.acks), gives
}
