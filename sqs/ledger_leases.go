package sqs

import (
	"slices"
	"time"
)

// lease is what a heartbeat has to say.
type lease struct {
	*entry
	handle string
	lasts  time.Duration // for how long from now
}

// leased notes that SQS hides an entry from others for a while from then on.
func (l *ledger) leased(e *entry, from time.Time) {
	e.until = from.Add(l.lease)
	if end := e.received.Add(maxVisibility); e.until.After(end) {
		e.until = end
	}
	if l.beat > 0 {
		e.beatAt = from.Add(l.beat)
	}
}

// expire ends the leases that are over, and returns the deliveries that are lost.
func (l *ledger) expire(now time.Time) (lost []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.byID {
		if e.state != acked && !now.Before(e.until) {
			lost = append(lost, l.drop(e)...)
		}
	}
	return lost
}

// drop takes an entry away whose lease is over.
func (l *ledger) drop(e *entry) []*entry {
	switch e.state {
	case out:
		return l.lose(e)
	case waiting:
		l.waiting = slices.DeleteFunc(l.waiting, func(w *entry) bool { return w == e })
		l.forget(e)
		l.holdWaiting(e.lane, time.Time{}) // its followers must not overtake it
		l.release(e.lane)
	case held:
		ln := l.lanes[e.lane]
		ln.held = slices.DeleteFunc(ln.held, func(h *entry) bool { return h == e })
		l.forget(e)
	case acked, gone:
	}
	return nil
}

// dueBeats returns the entries whose leases have to be renewed, until beaten is
// called for each.
func (l *ledger) dueBeats(now time.Time) []lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.beat <= 0 {
		return nil
	}
	var due []lease
	for _, e := range l.byID {
		if e.state == acked || e.beating || now.Before(e.beatAt) {
			continue
		}
		lasts := min(l.lease, e.received.Add(maxVisibility).Sub(now)).Truncate(time.Second)
		if lasts < time.Second || !e.until.Before(e.received.Add(maxVisibility)) {
			continue // The ceiling: nothing can be renewed.
		}
		e.beating = true
		due = append(due, lease{e, e.handle, lasts})
	}
	slices.SortFunc(due, func(a, b lease) int {
		if a.place < b.place {
			return -1
		}
		return 1
	})
	return due
}

// live returns those of the due leases that still have to be renewed: no heartbeat
// may hide a message that nobody here has any more.
func (l *ledger) live(due []lease) []lease {
	l.mu.Lock()
	defer l.mu.Unlock()
	before := len(due)
	due = slices.DeleteFunc(due, func(b lease) bool {
		if b.state != acked && b.state != gone {
			return false
		}
		b.beating = false
		return true
	})
	if len(due) < before {
		l.kick() // What goes back waits for heartbeats.
	}
	return due
}

// why is what SQS said to the last heartbeat of an entry, if that failed.
func (l *ledger) why(e *entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return e.beatErr
}

// beaten notes how a heartbeat ended that began at from. stale: the lease is over.
func (l *ledger) beaten(b lease, from time.Time, err error, stale bool) (lost []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.beating = false
	switch {
	case b.handle != b.entry.handle:
	case err == nil:
		b.until, b.beatAt, b.beatErr = from.Add(b.lasts), from.Add(l.beat), nil
	case stale:
		lost = l.drop(b.entry)
	default:
		b.beatAt, b.beatErr = from.Add(l.beat/4), err
	}
	l.kick()
	return lost
}
