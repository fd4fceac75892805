package memory

import (
	"slices"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// entry is a message of the current pass that is not acked.
type entry struct {
	message *broker.Message
	place   int // in the queue's log; the order within a lane
	lane    *lane
	attempt int
	due     time.Time // not handed out before; zero: at once
	holder  *hold     // who has it; nil while it is pending
	index   int       // in lane.pending
}

func (e *entry) setIndex(i int) { e.index = i }
func (e *entry) getIndex() int  { return e.index }

// lane is an ordering domain: the messages that wait and those that are out.
//
// What must stay true: the messages that are out went out in their order, and
// all of them to one source. So whoever holds several works on them in order,
// and one that was given back is not handed out while a later one is still out.
type lane struct {
	name    string // "" for a message without order; such a lane has one message
	pending heap[*entry]
	out     []*entry // by place
	index   int      // in Queue.ready or Queue.delayed
}

func (l *lane) setIndex(i int) { l.index = i }
func (l *lane) getIndex() int  { return l.index }

func newLane(name string) *lane {
	return &lane{name: name, pending: newHeap(func(a, b *entry) bool { return a.place < b.place })}
}

func (l *lane) head() *entry { return l.pending.top() }

func (l *lane) empty() bool { return l.pending.len() == 0 && len(l.out) == 0 }

// open tells whether the first pending message may go out, apart from its due
// time.
func (l *lane) open() bool {
	if l.pending.len() == 0 {
		return false
	}
	return len(l.out) == 0 || l.out[len(l.out)-1].place < l.head().place
}

func (l *lane) heldByOther(h *hold) bool {
	return len(l.out) > 0 && l.out[0].holder != h
}

// handOut moves the first pending message to those that are out.
func (l *lane) handOut(h *hold) *entry {
	e := l.head()
	l.pending.remove(e)
	e.holder = h
	e.attempt++
	e.due = time.Time{}
	h.out[e] = struct{}{}
	l.out = append(l.out, e)
	return e
}

// forget takes a message off those that are out.
func (l *lane) forget(e *entry) {
	if i := slices.Index(l.out, e); i >= 0 {
		l.out = slices.Delete(l.out, i, i+1)
	}
	delete(e.holder.out, e)
	e.holder = nil
}

// takeBack moves a message that is out to its old place among the pending.
func (l *lane) takeBack(e *entry, due time.Time) {
	l.forget(e)
	e.due = due
	l.pending.push(e)
}
