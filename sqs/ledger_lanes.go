package sqs

import (
	"slices"
	"time"
)

// lane is a message group of which something is here.
type lane struct {
	out  []*entry
	held []*entry // by place
}

func (l *ledger) laneOf(name string) *lane {
	ln := l.lanes[name]
	if ln == nil {
		ln = &lane{}
		l.lanes[name] = ln
	}
	return ln
}

func (l *ledger) takeOff(e *entry) {
	l.out--
	if ln := l.lanes[e.lane]; ln != nil {
		ln.out = slices.DeleteFunc(ln.out, func(o *entry) bool { return o == e })
	}
}

// hold lets an entry, which is in no list, go back to SQS as soon as its lane may.
func (l *ledger) hold(e *entry, due time.Time) {
	e.state, e.due = held, due
	if e.lane == "" {
		l.give([]*entry{e})
		return
	}
	ln := l.laneOf(e.lane)
	i, _ := slices.BinarySearchFunc(ln.held, e.place, func(h *entry, place uint64) int {
		if h.place < place {
			return -1
		}
		return 1
	})
	ln.held = slices.Insert(ln.held, i, e)
}

// holdWaiting lets go back what waits of a lane.
func (l *ledger) holdWaiting(name string, now time.Time) {
	if name == "" {
		return
	}
	l.waiting = slices.DeleteFunc(l.waiting, func(e *entry) bool {
		if e.lane != name {
			return false
		}
		l.returned++
		l.hold(e, now)
		return true
	})
}

// release gives a lane's entries back when nothing of it is out: the last one
// first, and none before the time of any.
func (l *ledger) release(name string) {
	ln := l.lanes[name]
	if ln == nil || len(ln.out) > 0 {
		return
	}
	delete(l.lanes, name)
	if len(ln.held) == 0 {
		return
	}
	due := ln.held[0].due
	for _, e := range ln.held {
		if e.due.After(due) {
			due = e.due
		}
	}
	for _, e := range ln.held {
		e.due = due
	}
	slices.Reverse(ln.held)
	l.give(ln.held)
}

// lose takes an entry away that is out, and what is out of its lane after it: its
// message comes again, and first. It returns what was lost.
func (l *ledger) lose(e *entry) []*entry {
	lost := []*entry{e}
	if ln := l.lanes[e.lane]; ln != nil {
		for _, o := range slices.Clone(ln.out) {
			if o.place > e.place {
				l.takeOff(o)
				o.cancel()
				l.hold(o, time.Time{})
				lost = append(lost, o)
			}
		}
	}
	l.takeOff(e)
	l.forget(e)
	e.cancel()
	l.holdWaiting(e.lane, time.Time{})
	l.release(e.lane)
	return lost
}
