package memory

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Source is a receiving end of a [Queue]; it is a [broker.Source]. Make it with
// [Queue.Source]. All methods may be called concurrently.
//
// An Ack or Nack whose context has ended fails with the context's error and
// the message is delivered again at once.
type Source struct {
	queue *Queue

	// Guarded by queue.mu.
	hold     *hold
	recalled []*hold // those that were asked for and may still be out
	closed   bool
}

var (
	_ broker.Source         = (*Source)(nil)
	_ broker.HealthReporter = (*Source)(nil)
)

// hold is what a source has got since its start, a recall or a revoke, up to the
// next one. Its context ends with a revoke.
type hold struct {
	ctx    context.Context
	cancel context.CancelFunc
	recall chan struct{}
	out    map[*entry]struct{}
	over   bool
}

func newHold() *hold {
	ctx, cancel := context.WithCancel(context.Background())
	return &hold{ctx: ctx, cancel: cancel, recall: make(chan struct{}), out: make(map[*entry]struct{})}
}

// Receive returns what is there, at least one and at most limit deliveries,
// the oldest messages first. It blocks only while there is none: nothing is
// published, due, or free of its lane.
//
// When ctx has ended it returns ctx's error and hands out nothing. After Close
// it returns broker.ErrClosed. A limit below 1 is an error.
func (s *Source) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	q := s.queue
	if limit < 1 {
		return nil, fmt.Errorf("memory: receive from %q: limit is %d, must be at least 1", q.name, limit)
	}
	for {
		now := time.Now()
		q.mu.Lock()
		if s.closed {
			q.mu.Unlock()
			return nil, fmt.Errorf("memory: receive from %q: %w", q.name, broker.ErrClosed)
		}
		if err := ctx.Err(); err != nil {
			q.mu.Unlock()
			return nil, fmt.Errorf("memory: receive from %q: %w", q.name, err)
		}
		if deliveries := q.take(s, limit, now); len(deliveries) > 0 {
			q.mu.Unlock()
			return deliveries, nil
		}
		changed := q.change()
		due, ok := q.due()
		q.mu.Unlock()

		if !ok {
			select {
			case <-changed:
			case <-ctx.Done():
			}
			continue
		}
		timer := time.NewTimer(due.Sub(now))
		select {
		case <-changed:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// Recall asks for all unsettled deliveries back, as a rebalance does before it
// takes them away, and returns how many there are: their Recall channels are
// closed. They can still be settled, until Revoke or for ever; those that are
// nacked are delivered again, to any source. Until they are settled or lost,
// nothing else of their lanes is handed out. After Close it does nothing.
func (s *Source) Recall() int {
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.closed {
		return 0
	}
	close(s.hold.recall)
	s.recalled = slices.DeleteFunc(append(s.recalled, s.hold), func(h *hold) bool { return len(h.out) == 0 })
	s.hold = newHold()
	out := 0
	for _, h := range s.recalled {
		out += len(h.out)
	}
	return out
}

// Revoke takes all unsettled deliveries away from the source, as a rebalance
// or a cut connection does, and returns how many: their contexts end, settling
// them returns broker.ErrLost, and their messages are delivered again, to any
// source, in the order of their lanes. The source goes on receiving. After
// Close it does nothing.
func (s *Source) Revoke() int {
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	lost := s.lose()
	q.wake()
	return lost
}

// Health returns nil, and an error that wraps broker.ErrClosed after Close.
func (s *Source) Health() error {
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.closed {
		return fmt.Errorf("memory: %q: %w", q.name, broker.ErrClosed)
	}
	return nil
}

// Close stops receiving and gives the unsettled deliveries back: they are lost
// as in Revoke. A Receive that is running returns broker.ErrClosed. It never
// blocks and always returns nil; it does not look at ctx.
func (s *Source) Close(context.Context) error {
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if s.closed {
		return nil
	}
	s.lose()
	s.closed = true
	s.hold.over = true
	s.hold.cancel()
	delete(q.sources, s)
	q.wake()
	return nil
}

// lose ends what the source holds and starts anew; queue.mu is held.
func (s *Source) lose() int {
	if s.closed {
		return 0
	}
	old := append(s.recalled, s.hold)
	s.recalled, s.hold = nil, newHold()
	now := time.Now()
	lost := 0
	for _, h := range old {
		h.over = true
		h.cancel()
		lost += len(h.out)
		for e := range h.out {
			s.queue.giveBack(e, time.Time{}, now)
		}
	}
	s.queue.stats.Lost += lost
	return lost
}

// settler settles one delivery.
type settler struct {
	queue *Queue
	entry *entry
	hold  *hold
}

var (
	_ broker.Settler         = (*settler)(nil)
	_ broker.RefusalObserver = (*settler)(nil)
)

// Ack implements broker.Settler.
func (s *settler) Ack(ctx context.Context, d *broker.Delivery) error {
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := s.check(ctx); err != nil {
		return fmt.Errorf("memory: ack %q: %w", d.Message.ID, err)
	}
	s.entry.lane.forget(s.entry)
	q.stats.InFlight--
	q.stats.Acked++
	q.place(s.entry.lane, time.Now())
	q.wake()
	return nil
}

// Nack implements broker.Settler.
func (s *settler) Nack(ctx context.Context, d *broker.Delivery, delay time.Duration) error {
	q := s.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := s.check(ctx); err != nil {
		return fmt.Errorf("memory: nack %q: %w", d.Message.ID, err)
	}
	now := time.Now()
	q.giveBack(s.entry, now.Add(delay), now)
	q.stats.Nacked++
	q.wake()
	return nil
}

// Refused implements broker.RefusalObserver.
func (s *settler) Refused(*broker.Delivery, error) {
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	s.queue.stats.Refused++
}

// check tells why the delivery cannot be settled; queue.mu is held. With ctx
// ended the message goes back: a settled delivery gets no second chance.
func (s *settler) check(ctx context.Context) error {
	if s.hold.over { // lost after the delivery itself had looked
		s.queue.stats.Refused++
		return broker.ErrLost
	}
	if err := ctx.Err(); err != nil {
		now := time.Now()
		s.queue.giveBack(s.entry, time.Time{}, now)
		s.queue.wake()
		return err
	}
	return nil
}
