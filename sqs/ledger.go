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
	closing  bool              // what comes now goes back
	complete bool              // nothing comes any more
	wanted   int               // what Receive waits for; 0: nobody receives
	asked    time.Time         // when Receive last waited
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
	beatErr error     // of the last heartbeat
	settled time.Time // acked
	due     time.Time // given back: not before
	tries   int       // of sending its ack
	alone   bool      // and it goes in no batch any more
	next    time.Time // when to try again
	cancel  context.CancelFunc
}

func newLedger(settler broker.Settler, cfg *Config, wake func()) *ledger {
	return &ledger{
		asked: time.Now(), settler: settler, lease: cfg.VisibilityTimeout, beat: cfg.Heartbeat, ackDelay: max(cfg.AckDelay, 0), wake: wake,
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
			continue
		}
		l.waiting = append(l.waiting, e)
	}
	for _, e := range entries {
		l.release(e.lane) // only where nothing is out any more
	}
	l.wake()
	return lost
}

// want notes for how many messages Receive waits; 0: for none.
func (l *ledger) want(limit int, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.wanted, l.asked = limit, now
}

// demand is how many more messages Receive waits for than are here: none while too
// many acks are unsent.
func (l *ledger) demand() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.acks) >= maxUnsent {
		return 0
	}
	return max(l.wanted-len(l.waiting), 0)
}

// idle is for how long nobody has received.
func (l *ledger) idle(now time.Time) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.wanted > 0 {
		return 0
	}
	return now.Sub(l.asked)
}

// take hands out up to limit entries. From then on nothing is wanted: else more
// would be asked for in the place of what has just been taken.
func (l *ledger) take(limit int) []*broker.Delivery {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := min(limit, len(l.waiting))
	if n == 0 || l.closing {
		return nil
	}
	l.wanted = 0
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

// forget ends that an entry is the newest of its message.
func (l *ledger) forget(e *entry) {
	e.state = gone
	if l.byID[e.id] == e {
		delete(l.byID, e.id)
	}
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

// close loses what is out and gives everything back, and what still comes.
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

// end notes that nothing comes any more.
func (l *ledger) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complete = true
	l.kick()
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
