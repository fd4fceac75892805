package sqs

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Source receives from a queue; it is a broker.Source. Make it with Open. Receive
// is for one goroutine at a time; all other methods may be called concurrently.
type Source struct {
	queue      address
	url        string
	name       string // Message.Source
	fifo       bool
	cfg        *Config
	log        *slog.Logger
	client     Client
	release    func() // ends the client's connections
	ledger     *ledger
	counters   counters
	finalAfter time.Duration
	redrive    redrive

	ctx      context.Context // ends when nothing may run any more
	cancel   context.CancelFunc
	closing  context.Context // ends when Close is called
	stop     context.CancelFunc
	asking   context.Context // ends when requests for messages are broken off
	breakOff context.CancelFunc
	taking   sync.WaitGroup // what receives, and renews leases
	telling  sync.WaitGroup // what settles
	woken    chan struct{}  // holds a token when there may be something to receive
	wanted   chan struct{}  // holds a token when more may be wanted

	mu        sync.Mutex
	err       error // final
	down      error // why nothing is received
	flushErr  error
	closeWait time.Duration // see patience
	closeOnce sync.Once
}

var _ broker.Source = (*Source)(nil)

// Receive returns what is there, at least one and at most limit deliveries; see
// broker.Source. Only while it waits are messages asked for, and never more than
// limit; what comes after its ctx has ended waits for the next call.
//
// After Close it returns broker.ErrClosed. Every other error is final: ErrNoQueue,
// ErrForbidden and ErrLogin when they last for longer than 30 s. A limit below 1 is
// an error that is not final.
func (s *Source) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	if limit < 1 {
		return nil, fmt.Errorf("sqs: receive: limit is %d, must be at least 1", limit)
	}
	defer func() { s.ledger.want(0, time.Now()) }()
	for {
		if err := s.receivable(ctx); err != nil {
			return nil, err
		}
		if deliveries := s.ledger.take(limit); len(deliveries) > 0 { //nolint:contextcheck // deliveries outlive ctx
			return deliveries, nil
		}
		s.ledger.want(limit, time.Now())
		token(s.wanted)
		select {
		case <-s.woken:
		case <-ctx.Done():
		case <-s.closing.Done():
		}
	}
}

func token(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// receivable tells why nothing can be received.
func (s *Source) receivable(ctx context.Context) error {
	if s.closing.Err() != nil {
		return fmt.Errorf("sqs: receive: %w", broker.ErrClosed)
	}
	s.mu.Lock()
	err := s.err
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("sqs: receive: %w", err)
	}
	return nil
}

// fail makes the source end with an error; the first one counts.
func (s *Source) fail(err error) {
	s.mu.Lock()
	first := s.err == nil
	if first {
		s.err = err
	}
	s.mu.Unlock()
	if first {
		s.log.Error("sqs: the source cannot go on", "error", err)
	}
	token(s.woken)
}

func (s *Source) setDown(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.down = err
}

// noteFlush notes an ack that did not reach SQS though the source said so.
func (s *Source) noteFlush(err error) {
	if s.closing.Err() == nil {
		return // It was reported.
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flushErr = errors.Join(s.flushErr, err)
}

// Close stops receiving, sends the deletes that are still to be sent, makes the
// messages visible that are not settled, and returns when everything has ended.
// Deliveries that are not settled are lost. It returns before ctx ends, or within
// Config.CloseTimeout when ctx has no deadline.
//
// It waits for the requests for messages that are under way, which takes up to
// Config.WaitTime at an empty queue, so that what they bring can be given back. SQS
// would go on with a request that is broken off, and the messages that it gives to it
// would be hidden until VisibilityTimeout has passed. When less than about 1.4 times
// WaitTime is left that happens all the same.
//
// The error says what could not be done in that time: then acked messages may come
// again. A second Close returns nil.
func (s *Source) Close(ctx context.Context) error {
	var err error
	s.closeOnce.Do(func() { err = s.close(ctx) })
	return err
}

func (s *Source) close(ctx context.Context) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(s.cfg.CloseTimeout)
	}
	// A part of the time is kept for ending what did not end by itself.
	rest := time.Until(deadline)
	hard, cancel := context.WithTimeout(ctx, rest-min(rest/5, time.Second))
	defer cancel()
	defer context.AfterFunc(hard, s.cancel)()
	s.mu.Lock()
	s.closeWait = rest * 7 / 10
	s.mu.Unlock()
	s.stop()
	s.ledger.close(time.Now())
	s.taking.Wait()
	s.ledger.end()
	s.telling.Wait()
	s.breakOff()
	s.cancel()
	s.release()
	acks, gives := s.ledger.leftOver()
	s.mu.Lock()
	err := s.flushErr
	s.mu.Unlock()
	if acks > 0 || gives > 0 {
		err = errors.Join(err, fmt.Errorf("%d deletes and %d returns were not sent: the messages come when VisibilityTimeout has passed", acks, gives))
	}
	if err != nil {
		return fmt.Errorf("sqs: close: %w", err)
	}
	return nil
}

// patience is for how long Close waits for requests for messages.
func (s *Source) patience() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.closeWait
}
