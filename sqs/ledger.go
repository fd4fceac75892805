package sqs

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// ledger holds what was received and is not done: what waits, what is out, and what
// has to be said to SQS about those that were settled. It does no input or output.
// Its methods may be called concurrently.
//
// What must stay true: of one lane, nothing is handed out while an earlier message
// of it was given back or lost here. The rest of the lane then goes back, too, all
// together and the last one first, when nothing of it is out any more: SQS hands
// out nothing of a group of which something is in flight.
type ledger struct {
	settler  broker.Settler
	lease    time.Duration // VisibilityTimeout
	beat     time.Duration // Heartbeat; negative: none
	ackDelay time.Duration
	wake     func() // there may be something to take

	mu       sync.Mutex
	closing  bool
	byID     map[string]*entry // the newest of each message, until it is settled and SQS knows
	waiting  []*entry          // in the order in which they came
	lanes    map[string]*lane
	acks     []*entry // settled, and SQS does not know; oldest first
	gives    []*give
	sending  int // calls under way
	out      int
	next     uint64
	signal   chan struct{} // closed when there may be something to send
	returned int           // messages given back without having been handed out
}

type entryState int

const (
	waiting entryState = iota
	out
	held  // given back, and waits until nothing else of its lane is out
	acked // until SQS knows
	gone
)

// entry is a message that was received.
type entry struct {
	message  *broker.Message
	id       string // MessageId
	lane     string
	attempt  int
	received time.Time // the lease ends 12 h later at the latest

	// Guarded by the ledger's mutex.
	handle  string // the newest
	state   entryState
	place   uint64 // in the order of arrival
	until   time.Time
	beatAt  time.Time
	beating bool
	settled time.Time // acked
	due     time.Time // given back: not before
	tries   int       // of sending its ack
	next    time.Time // when to try again
	cancel  context.CancelFunc
}

// lane is a message group of which something is here.
type lane struct {
	out  []*entry
	held []*entry // by place
}

// give is what goes back to SQS together, in this order.
type give struct {
	entries []*entry
	tries   int
	next    time.Time
}

func newLedger(settler broker.Settler, cfg *Config, wake func()) *ledger {
	return &ledger{
		settler: settler, lease: cfg.VisibilityTimeout, beat: cfg.Heartbeat, ackDelay: max(cfg.AckDelay, 0), wake: wake,
		byID: make(map[string]*entry), lanes: make(map[string]*lane), signal: make(chan struct{}),
	}
}

// kick wakes those who send.
func (l *ledger) kick() {
	close(l.signal)
	l.signal = make(chan struct{})
}

// add takes in what was received now. A message that is here already has a new
// handle from now on, and the old delivery is lost.
func (l *ledger) add(entries []*entry, now time.Time) (lost []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range entries {
		old := l.byID[e.id]
		switch {
		case old == nil:
		case old.state == acked:
			// Done here: only the delete was late.
			old.handle, old.received = e.handle, e.received
			continue
		case old.state == waiting || old.state == held:
			old.handle, old.received, old.attempt = e.handle, e.received, e.attempt
			l.leased(old, now)
			continue
		default:
			lost = append(lost, l.lose(old)...)
		}
		l.next++
		e.place, e.state = l.next, waiting
		l.leased(e, now)
		l.byID[e.id] = e
		if ln := l.lanes[e.lane]; ln != nil && len(ln.held) > 0 || l.closing {
			l.hold(e, now)
			l.release(e.lane)
			continue
		}
		l.waiting = append(l.waiting, e)
	}
	l.wake()
	return lost
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

// take hands out up to limit entries.
func (l *ledger) take(limit int) []*broker.Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closing {
		return nil
	}
	n := min(limit, len(l.waiting))
	deliveries := make([]*broker.Delivery, 0, n)
	for _, e := range l.waiting[:n] {
		ctx, cancel := context.WithCancel(context.Background())
		e.state, e.cancel = out, cancel
		l.out++
		if e.lane != "" {
			ln := l.laneOf(e.lane)
			ln.out = append(ln.out, e)
		}
		d := broker.NewDelivery(ctx, e.message, e.lane, l.settler)
		d.Tag, d.Attempt = e, e.attempt
		deliveries = append(deliveries, d)
	}
	l.waiting = slices.Delete(l.waiting, 0, n)
	return deliveries
}

func (l *ledger) laneOf(name string) *lane {
	ln := l.lanes[name]
	if ln == nil {
		ln = &lane{}
		l.lanes[name] = ln
	}
	return ln
}

// ack marks an entry as done.
func (l *ledger) ack(e *entry, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.settle(e, now); err != nil {
		return err
	}
	e.state, e.settled = acked, now
	l.acks = append(l.acks, e)
	l.release(e.lane)
	if n := len(l.acks); n <= batch || n%batch == 0 {
		l.kick() // Else they know already when to look.
	}
	return nil
}

// nack gives an entry back, and with it what waits of its lane.
func (l *ledger) nack(e *entry, delay time.Duration, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.settle(e, now); err != nil {
		return err
	}
	l.hold(e, now.Add(delay))
	l.holdWaiting(e.lane, now)
	l.release(e.lane)
	return nil
}

// settle takes an entry off those that are out.
func (l *ledger) settle(e *entry, now time.Time) error {
	if e.state != out || !now.Before(e.until) {
		return broker.ErrLost
	}
	l.takeOff(e)
	return nil
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

func (l *ledger) give(entries []*entry) {
	for _, e := range entries {
		l.forget(e)
	}
	l.gives = append(l.gives, &give{entries: entries})
	l.kick()
}

// forget ends that an entry is the newest of its message.
func (l *ledger) forget(e *entry) {
	e.state = gone
	if l.byID[e.id] == e {
		delete(l.byID, e.id)
	}
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

// expire ends the leases that are over, and returns the deliveries that are lost.
func (l *ledger) expire(now time.Time) (lost []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.byID {
		if e.state != acked && !now.Before(e.until) {
			lost = append(lost, l.end(e)...)
		}
	}
	return lost
}

// end takes an entry away whose lease is over.
func (l *ledger) end(e *entry) []*entry {
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

// giveBack gives back all that waits.
func (l *ledger) giveBack(now time.Time) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := len(l.waiting)
	l.giveWaiting(now)
	return n
}

func (l *ledger) giveWaiting(now time.Time) {
	all := l.waiting
	l.waiting = nil
	l.returned += len(all)
	for _, e := range all {
		l.hold(e, now)
	}
	for _, e := range all {
		l.release(e.lane)
	}
}

// close loses what is out and gives everything back.
func (l *ledger) close(now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closing = true
	for _, e := range l.byID {
		if e.state == out {
			l.takeOff(e)
			e.cancel()
			l.hold(e, now)
		}
	}
	l.giveWaiting(now)
	for name := range l.lanes {
		l.release(name)
	}
	l.kick()
}

// lease is what a heartbeat has to say.
type lease struct {
	*entry
	handle string
	lasts  time.Duration // for how long from now
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

// beaten notes how a heartbeat ended that began at from. stale: the lease is over.
func (l *ledger) beaten(b lease, from time.Time, ok, stale bool) (lost []*entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	b.beating = false
	switch {
	case b.handle != b.entry.handle:
	case ok:
		b.until, b.beatAt = from.Add(b.lasts), from.Add(l.beat)
	case stale:
		lost = l.end(b.entry)
	default:
		b.beatAt = from.Add(l.beat / 4)
	}
	l.kick()
	return lost
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
		case e.tries == 0:
			fresh++
		case now.Before(e.next):
			later(e.next)
		default: // It failed before: alone.
			l.acks = slices.Delete(l.acks, i, i+1)
			l.sending++
			return work{acks: []ackWork{{e, e.handle}}}, look, nil, false
		}
	}
	if acks := l.pickFresh(fresh, now, later); len(acks) > 0 {
		l.sending++
		return work{acks: acks}, look, nil, false
	}
	return work{}, look, l.signal, l.closing && len(l.gives) == 0 && len(l.acks) == 0 && l.sending == 0
}

// pickFresh returns acks that were not sent yet, when there are enough for a call or
// they are old enough.
func (l *ledger) pickFresh(fresh int, now time.Time, later func(time.Time)) []ackWork {
	if fresh == 0 {
		return nil
	}
	i := slices.IndexFunc(l.acks, func(e *entry) bool { return e.tries == 0 })
	if ripe := l.acks[i].settled.Add(l.ackDelay); fresh < batch && !l.closing && now.Before(ripe) {
		later(ripe)
		return nil
	}
	var acks []ackWork
	l.acks = slices.DeleteFunc(l.acks, func(e *entry) bool {
		if e.tries > 0 || len(acks) == batch {
			return false
		}
		acks = append(acks, ackWork{e, e.handle})
		return true
	})
	return acks
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
		a.tries, a.next = 1, time.Time{}
		l.acks = append(l.acks, a.entry)
		return false
	}
	l.forget(a.entry)
	return true
}

// again notes that an ack has to be sent again.
func (l *ledger) again(a ackWork, next time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	a.tries++
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

// buffered is how many messages wait.
func (l *ledger) buffered() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.waiting)
}

// ledgerStats is how a ledger stands.
type ledgerStats struct {
	waiting, out, unsent, returned int
	oldest                         time.Time
}

func (l *ledger) stats() ledgerStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := ledgerStats{waiting: len(l.waiting), out: l.out, unsent: len(l.acks), returned: l.returned}
	for _, e := range l.byID {
		if e.state != acked && (st.oldest.IsZero() || e.received.Before(st.oldest)) {
			st.oldest = e.received
		}
	}
	return st
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
