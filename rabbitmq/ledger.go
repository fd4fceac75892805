package rabbitmq

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// ledger holds what one epoch, that is one channel, was given: the messages that
// wait, those that are out, and what has to be said to the broker about those that
// were settled. It does no input or output. Its methods may be called concurrently.
//
// An epoch's ledger is open, then perhaps draining (nothing more is handed out,
// what is out can be settled), then over (everything that is out is lost).
type ledger struct {
	settler broker.Settler
	ordered bool          // there are lanes, or it is a stream: nothing goes back by itself
	limit   time.Duration // how old a delivery may get before it is asked back; 0: no limit
	offsets *progress     // of a stream; nil for a queue

	wake func() // there may be something to take
	kick func() // there is something to tell the broker

	ctx    context.Context // of the deliveries
	cancel context.CancelFunc

	mu        sync.Mutex
	state     ledgerState
	paused    bool     // nothing is pushed, and nobody receives
	queue     []*entry // pushed, not handed out, by tag
	lanes     map[string]*lane
	waiting   laneHeap // open lanes with entries that were given back
	held      int      // entries that lanes hold back
	out       int      // deliveries that are out
	tags      tracker
	acks      []uint64      // settled, and the broker does not know yet
	nacks     []uint64      // to be put back into the queue, and the broker does not know yet
	old       int           // given back after they were asked back, since tookBack was called
	recall    chan struct{} // of what is handed out next
	drained   chan struct{}
	isDrained bool
}

type ledgerState int

const (
	open ledgerState = iota
	draining
	over
)

// entry is a message that was pushed.
type entry struct {
	message *broker.Message
	lane    string
	epoch   int64
	tag     uint64
	attempt int       // the broker's count of deliveries; 0: it does not count
	pushed  time.Time // when it came
	due     time.Time // not handed out before; zero: at once

	// Guarded by the ledger's mutex.
	in      *lane // while it is out or held
	isOut   bool
	handed  int           // how often it was handed out
	recall  chan struct{} // of the last time
	outside *ledger       // for the settler; set once
}

// recalled tells whether it was asked back since it was handed out last.
func (e *entry) recalled() bool {
	select {
	case <-e.recall:
		return true
	default:
		return false
	}
}

func newLedger(settler broker.Settler, cfg *Config, offsets *progress, wake, kick func()) *ledger {
	l := &ledger{
		settler: settler, ordered: cfg.Lanes != LaneNone || offsets != nil, limit: max(cfg.AckTimeout, 0) / 2, offsets: offsets,
		wake: wake, kick: kick, lanes: make(map[string]*lane),
		recall: make(chan struct{}), drained: make(chan struct{}),
	}
	l.ctx, l.cancel = context.WithCancel(context.Background())
	return l
}

// add takes in what was pushed.
func (l *ledger) add(e *entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == over {
		return
	}
	e.outside = l
	for missing := l.tags.last() + 1; missing < e.tag; missing++ {
		l.tags.add(missing, nil) // Never seen, so never done: no ack may speak for it.
	}
	if !l.tags.add(e.tag, e) {
		return
	}
	switch {
	case l.offsets != nil && !l.offsets.add(e):
		l.answer(e, &l.acks) // It was done before: the begin of a chunk.
	case l.paused:
		l.answer(e, &l.nacks) // It was under way when the consumer was cancelled.
	default:
		l.queue = append(l.queue, e)
		l.wake()
	}
}

// answer notes what the broker has to be told about an entry.
func (l *ledger) answer(e *entry, list *[]uint64) {
	l.tags.done(e.tag)
	*list = append(*list, e.tag)
	l.kick()
}

// take hands out up to limit entries: first those that were given back and are due.
// With nothing to hand out it returns when something will be due; zero: nothing is
// waiting for its time.
func (l *ledger) take(limit int) ([]*broker.Delivery, time.Time) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != open {
		return nil, time.Time{}
	}
	var deliveries []*broker.Delivery
	for len(deliveries) < limit && len(l.waiting) > 0 && !l.waiting[0].due().After(now) {
		ln := l.waiting[0]
		e := ln.held[0]
		ln.held = slices.Delete(ln.held, 0, 1)
		l.held--
		deliveries = append(deliveries, l.handOut(ln, e))
	}
	for len(deliveries) < limit && len(l.queue) > 0 {
		e := l.queue[0]
		l.queue[0] = nil
		l.queue = l.queue[1:]
		ln := l.laneOf(e)
		if len(ln.held) > 0 {
			ln.held = append(ln.held, e) // behind one that was given back
			l.held++
			continue
		}
		deliveries = append(deliveries, l.handOut(ln, e))
	}
	if len(deliveries) == 0 && len(l.waiting) > 0 {
		return nil, l.waiting[0].due()
	}
	return deliveries, time.Time{}
}

// laneOf returns the entry's lane, which it enters now.
func (l *ledger) laneOf(e *entry) *lane {
	ln := e.in
	if ln == nil {
		ln = l.lanes[e.lane]
	}
	if ln == nil {
		ln = &lane{name: e.lane, at: -1}
		if e.lane != "" {
			l.lanes[e.lane] = ln
		}
	}
	e.in = ln
	return ln
}

// handOut makes a delivery of an entry that waits no more.
func (l *ledger) handOut(ln *lane, e *entry) *broker.Delivery {
	ln.out = append(ln.out, e)
	e.isOut, e.recall = true, l.recall
	e.handed++
	l.out++
	l.place(ln)
	d := broker.NewDelivery(l.ctx, e.message, e.lane, l.settler)
	d.Recall, d.Tag = e.recall, e
	if e.attempt > 0 {
		d.Attempt = e.attempt + e.handed - 1
	}
	return d
}

// place puts a lane where it belongs after anything about it changed.
func (l *ledger) place(ln *lane) {
	l.waiting.remove(ln)
	switch {
	case ln.empty():
		if ln.name != "" {
			delete(l.lanes, ln.name)
		}
	case ln.open():
		l.waiting.add(ln)
	}
}

// ack marks an entry as done.
func (l *ledger) ack(e *entry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.settle(e); err != nil {
		return err
	}
	if l.offsets != nil {
		l.offsets.done(e)
	}
	l.answer(e, &l.acks)
	return nil
}

// nack gives an entry back: to the front of its lane here, or to the broker when it
// is too old to wait here, or nobody receives.
func (l *ledger) nack(e *entry, delay time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.settle(e); err != nil {
		return err
	}
	now := time.Now()
	switch {
	case l.state != open:
		return nil // The end of the channel gives it back.
	case l.paused:
		l.answer(e, &l.nacks)
		return nil
	case e.recalled() && now.Sub(e.pushed) >= l.limit/2: // never where there is an order
		l.old++
		l.answer(e, &l.nacks)
		return nil
	}
	e.due = time.Time{}
	if delay > 0 {
		e.due = now.Add(delay)
		if l.limit > 0 && e.due.After(e.pushed.Add(l.limit)) {
			e.due = e.pushed.Add(l.limit)
		}
	}
	ln := l.laneOf(e)
	l.waiting.remove(ln) // its due time may change
	ln.held = insertByTag(ln.held, e)
	l.held++
	l.place(ln)
	l.wake()
	return nil
}

// settle takes an entry off those that are out.
func (l *ledger) settle(e *entry) error {
	if l.state == over {
		return broker.ErrLost
	}
	ln := e.in
	e.isOut, e.in = false, nil
	l.out--
	l.noteDrained()
	ln.out = removeByTag(ln.out, e)
	l.place(ln)
	if len(ln.held) > 0 {
		l.wake() // the lane may have opened
	}
	if e.lane == "" {
		e.in = ln // in case that it is given back
	}
	return nil
}

// aged tells whether something that was not asked back yet has been here for too
// long.
func (l *ledger) aged(now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != open || l.limit == 0 {
		return false
	}
	for _, t := range l.tags.open() {
		switch e := t.entry; {
		case e == nil: // unknown or done
		case now.Sub(e.pushed) < l.limit:
			return false // and so are all after it
		case !e.isOut || !e.recalled():
			return true
		}
	}
	return false
}

// giveBack asks for what is out for too long and gives back what waits for too
// long, or everything that waits when the epoch is paused. It is for ledgers
// without order.
func (l *ledger) giveBack(now time.Time) (recalled, returned int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != open || l.ordered {
		return 0, 0
	}
	for _, t := range slices.Clone(l.tags.open()) {
		e := t.entry
		if e == nil {
			continue
		}
		age := now.Sub(e.pushed)
		switch {
		case e.isOut && age >= l.limit && !e.recalled():
			recalled++
		case !e.isOut && (l.paused || age >= l.limit/2):
			// Those of half the age, too: they would follow one by one.
			l.drop(e)
			l.answer(e, &l.nacks)
			returned++
		}
	}
	if recalled > 0 {
		// One channel for all: who is young and not started comes out again at once.
		close(l.recall)
		l.recall = make(chan struct{})
	}
	return recalled, returned
}

// tookBack tells how many were given back after they were asked back, since the last
// call.
func (l *ledger) tookBack() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.old
	l.old = 0
	return n
}

// drop takes an entry out that waits.
func (l *ledger) drop(e *entry) {
	if ln := e.in; ln != nil {
		l.waiting.remove(ln)
		ln.held = removeByTag(ln.held, e)
		l.held--
		l.place(ln)
		return
	}
	if i, found := slices.BinarySearchFunc(l.queue, e.tag, byTag); found {
		l.queue = slices.Delete(l.queue, i, i+1)
	}
}

// pause says that nothing is pushed any more, or that it is again.
func (l *ledger) pause(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.paused = on
}

// drain stops handing out and asks for what is out. The returned channel is closed
// when nothing is out any more.
func (l *ledger) drain() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == open {
		l.state = draining
		close(l.recall)
		l.noteDrained()
	}
	return l.drained
}

// noteDrained closes drained when the last delivery is back.
func (l *ledger) noteDrained() {
	if l.state == draining && l.out == 0 && !l.isDrained {
		l.isDrained = true
		close(l.drained)
	}
}

// end loses what is still out, and returns how much that is. What was settled
// before can still be told to the broker.
func (l *ledger) end() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == over {
		return 0
	}
	lost := l.out
	l.state = over
	l.cancel()
	l.queue, l.waiting, l.lanes = nil, nil, nil
	l.out, l.held = 0, 0
	return lost
}

// settlements is what the broker has to be told.
type settlements struct {
	requeue []uint64 // one by one, in order
	acks    []uint64 // one by one
	upTo    uint64   // this one and all before it are acked; 0: none
	count   int      // how many acks that are
}

// settlements returns what the broker was not told yet. Every number below upTo is
// settled, and told, or is told by this: the requeued ones have to be sent first.
func (l *ledger) settlements() settlements {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := settlements{requeue: l.nacks, acks: l.acks, count: len(l.acks)}
	l.nacks, l.acks = nil, nil
	slices.Sort(s.requeue)
	slices.Sort(s.acks)
	// The broker refuses a number that it does not wait for, so upTo is one of ours.
	n, _ := slices.BinarySearch(s.acks, l.tags.upTo+1)
	if n > 0 {
		s.upTo = s.acks[n-1]
		s.acks = s.acks[n:]
	}
	return s
}

// unsent is how many acks the broker was not told.
func (l *ledger) unsent() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.acks)
}

// ledgerStats is how a ledger stands.
type ledgerStats struct {
	waiting, out int
	oldest       time.Time // when the oldest that is not settled came; zero: there is none
}

func (l *ledger) stats() ledgerStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	st := ledgerStats{waiting: len(l.queue) + l.held, out: l.out}
	if l.state == over {
		return st
	}
	for _, t := range l.tags.open() {
		if t.entry != nil {
			st.oldest = t.entry.pushed
			break
		}
	}
	return st
}
