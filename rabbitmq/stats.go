package rabbitmq

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// remember is for how long Health reports that the ack timeout struck.
const remember = 10 * time.Minute

// counters are what a source has seen; they only grow.
type counters struct {
	acks, staleAcks, lost, unsent, epochs, reconnects   atomic.Int64
	recalled, returned, pauses, starved, ackTimeoutsHit atomic.Int64

	mu    sync.Mutex
	event error // the last ack timeout
	at    time.Time
}

func (c *counters) noteAckTimeout(err error) {
	c.ackTimeoutsHit.Add(1)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.event, c.at = err, time.Now()
}

func (c *counters) recent() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.event == nil || time.Since(c.at) > remember {
		return nil
	}
	return fmt.Errorf("rabbitmq: the ack timeout struck %v ago: %w", time.Since(c.at).Round(time.Second), c.event)
}

// Stats is what a source has done and how it stands.
type Stats struct {
	// Consuming tells whether there is a channel with a consumer.
	Consuming bool
	// Paused tells that nothing is consumed because nobody receives.
	Paused bool
	Epoch  int64  // of the channel; 0 when there is none
	Host   string // of the broker; empty when there is no channel
	// Blocked is why the broker takes nothing that is published on this connection;
	// empty when it does, and when it does not tell: RabbitMQ tells only connections
	// that publish, which a source's does not.
	Blocked string
	// Prefetch is how many messages are asked for at a time: less than
	// Config.Prefetch for a while after messages grew old here.
	Prefetch int
	Waiting  int           // messages that are here and not handed out
	InFlight int           // deliveries that are out
	Oldest   time.Duration // how long the oldest of both has been here
	// Position is the first offset of a stream that is not done; -1 when unknown,
	// and for a queue.
	Position int64

	Epochs      int64 // channels so far
	Reconnects  int64 // failed attempts to consume, and channels that ended by themselves
	Acks        int64 // acks that were sent
	StaleAcks   int64 // acks and nacks that came too late and were dropped
	Lost        int64 // deliveries that were not settled when their channel ended
	Unsent      int64 // acks that could not be sent before their channel ended
	Recalled    int64 // deliveries that were asked back because of their age
	Returned    int64 // messages that were given back because of their age
	Pauses      int64 // times that the source stopped to consume because nobody received
	AckTimeouts int64 // times that the broker closed the channel because of its consumer_timeout
	Starved     int64 // times that Receive waited while all that may be prefetched was out
}

// Stats returns the numbers of this moment.
func (s *Source) Stats() Stats {
	st := Stats{
		Prefetch:    s.window.size(),
		Position:    -1,
		Epochs:      s.counters.epochs.Load(),
		Reconnects:  s.counters.reconnects.Load(),
		Acks:        s.counters.acks.Load(),
		StaleAcks:   s.counters.staleAcks.Load(),
		Lost:        s.counters.lost.Load(),
		Unsent:      s.counters.unsent.Load(),
		Recalled:    s.counters.recalled.Load(),
		Returned:    s.counters.returned.Load(),
		Pauses:      s.counters.pauses.Load(),
		AckTimeouts: s.counters.ackTimeoutsHit.Load(),
		Starved:     s.counters.starved.Load(),
	}
	if s.offsets != nil {
		st.Position = s.offsets.position()
	}
	s.mu.Lock()
	e := s.epoch
	st.Paused, st.Blocked = s.paused, s.blocked
	s.mu.Unlock()
	if e == nil {
		return st
	}
	st.Consuming, st.Epoch, st.Host = !st.Paused, e.id, e.conn.host
	l := e.ledger.stats()
	st.Waiting, st.InFlight = l.waiting, l.out
	if !l.oldest.IsZero() {
		st.Oldest = time.Since(l.oldest)
	}
	return st
}

var _ broker.HealthReporter = (*Source)(nil)

// Health returns nil when the source does its work, and else all that is wrong: it
// is closed or cannot go on, it is not connected, the queue is gone, the broker has
// an alarm, or its ack timeout struck in the last ten minutes. That messages wait
// is not an error, nor that nobody receives. It may be called concurrently and does
// not wait for a broker.
func (s *Source) Health() error {
	if s.closing.Err() != nil {
		return fmt.Errorf("rabbitmq: %w", broker.ErrClosed)
	}
	s.mu.Lock()
	e, err, down, blocked, paused := s.epoch, s.err, s.down, s.blocked, s.paused
	s.mu.Unlock()
	errs := []error{err}
	switch {
	case err != nil:
	case e != nil || paused:
	case down != nil:
		errs = append(errs, fmt.Errorf("rabbitmq: not consuming: %w", down))
	default:
		errs = append(errs, errors.New("rabbitmq: not consuming"))
	}
	if blocked != "" {
		errs = append(errs, fmt.Errorf("rabbitmq: the broker has an alarm: %s", blocked))
	}
	errs = append(errs, s.counters.recent())
	return errors.Join(errs...)
}
