package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
)

// Source receives from a queue; it is a broker.Source. Make it with Open. Receive
// is for one goroutine at a time; all other methods may be called concurrently.
type Source struct {
	queue    string
	name     string // Message.Source
	instance string // tells this source from others in ids
	cfg      *Config
	log      *slog.Logger
	dialer   *dialer
	counters counters
	window   *window
	offsets  *progress   // of a stream; nil for a queue
	counts   atomic.Bool // the broker counts deliveries

	ctx     context.Context // ends when nothing may run any more
	cancel  context.CancelFunc
	closing context.Context // ends when Close is called
	stop    context.CancelFunc
	running sync.WaitGroup
	woken   chan struct{} // holds a token when there may be something to receive
	wanted  chan struct{} // holds a token when somebody receives while nothing is consumed
	thirst  sync.Once     // to say that the prefetch is small

	// Of the goroutine that supervises.
	epochs  int64     // so far
	reading time.Time // since when; zero: not yet

	mu        sync.Mutex
	epoch     *epoch // nil between epochs
	err       error  // final
	down      error  // why there is no epoch
	blocked   string // why the broker blocks the connection; empty: it does not
	receivers int    // calls of Receive that wait
	received  time.Time
	paused    bool // nothing is consumed until somebody receives
	flushErr  error
	closeOnce sync.Once
}

var _ broker.Source = (*Source)(nil)

// Receive returns what is there, at least one and at most limit deliveries; see
// broker.Source. For the lanes see LaneBy.
//
// After Close it returns broker.ErrClosed. Every other error is final: ErrNoQueue
// if the queue is gone and the policy says so, and ErrNotAMQP, ErrLogin, ErrVHost,
// ErrForbidden, ErrLocked and ErrMismatch when they last for longer than 30 s. A
// limit below 1 is an error that is not final.
func (s *Source) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	if limit < 1 {
		return nil, fmt.Errorf("rabbitmq: receive: limit is %d, must be at least 1", limit)
	}
	s.receives(1)
	defer s.receives(-1)
	for {
		if err := s.receivable(ctx); err != nil {
			return nil, err
		}
		deliveries, due := s.take(limit)
		if len(deliveries) > 0 {
			return deliveries, nil
		}
		s.wait(ctx, due)
	}
}

// receives notes that somebody receives, or does no longer.
func (s *Source) receives(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.receivers += n
	s.received = time.Now()
	if n > 0 && s.paused {
		select {
		case s.wanted <- struct{}{}:
		default:
		}
	}
}

// tryPause tells whether nobody has received for a while; then nothing needs to be
// consumed until somebody does, who puts a token into wanted.
func (s *Source) tryPause(now time.Time, idle time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.receivers > 0 || now.Sub(s.received) < idle {
		return false
	}
	s.paused = true
	return true
}

// wait waits until there may be something to receive: at once when woken, at the
// time due unless that is zero.
func (s *Source) wait(ctx context.Context, due time.Time) {
	var timer <-chan time.Time
	if !due.IsZero() {
		t := time.NewTimer(time.Until(due))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-s.woken:
	case <-timer:
	case <-ctx.Done():
	case <-s.closing.Done():
	}
}

// receivable tells why nothing can be received.
func (s *Source) receivable(ctx context.Context) error {
	if s.closing.Err() != nil {
		return fmt.Errorf("rabbitmq: receive: %w", broker.ErrClosed)
	}
	s.mu.Lock()
	err := s.err
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("rabbitmq: receive: %w", err)
	}
	return nil
}

func (s *Source) take(limit int) ([]*broker.Delivery, time.Time) {
	s.mu.Lock()
	e := s.epoch
	s.mu.Unlock()
	if e == nil {
		return nil, time.Time{}
	}
	deliveries, due := e.ledger.take(limit)
	if len(deliveries) == 0 && due.IsZero() && e.ledger.stats().out >= s.cfg.Prefetch {
		s.counters.starved.Add(1)
		s.thirst.Do(func() {
			s.log.Info("rabbitmq: all that may be prefetched is out while more is asked for: if workers are idle, raise Config.Prefetch", "prefetch", s.cfg.Prefetch)
		})
	}
	return deliveries, due
}

// wake makes Receive look again. It does not block.
func (s *Source) wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
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
		s.log.Error("rabbitmq: the source cannot go on", "error", err)
	}
	s.wake()
}

// Close stops receiving, sends the acks that are still to be sent, and returns when
// everything has ended. Deliveries that are not settled are lost, and the broker
// gives their messages to others at once; it does not wait for them. It returns
// before ctx ends, or within Config.CloseTimeout when ctx has no deadline.
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
	s.stop()
	s.running.Wait()
	s.cancel()
	s.mu.Lock()
	err := s.flushErr
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("rabbitmq: close: %w", err)
	}
	return nil
}

// Position is the first offset of a stream that is not done, which is where a new
// source would have to begin (StreamOffset). It is false for a queue, and before
// anything was read.
func (s *Source) Position() (offset int64, known bool) {
	if s.offsets == nil {
		return 0, false
	}
	offset = s.offsets.position()
	return offset, offset >= 0
}

// enter makes an epoch the current one.
func (s *Source) enter(e *epoch) {
	s.mu.Lock()
	s.epoch, s.down, s.paused = e, nil, false
	s.mu.Unlock()
	s.counters.epochs.Add(1)
	s.wake()
}

// leave ends being the current one.
func (s *Source) leave(err error) {
	s.mu.Lock()
	s.epoch, s.down, s.blocked = nil, err, ""
	s.mu.Unlock()
}

func (s *Source) setDown(err error) {
	s.mu.Lock()
	s.down = err
	s.mu.Unlock()
}

func (s *Source) setFlushError(err error) {
	if err == nil {
		return
	}
	s.mu.Lock()
	s.flushErr = errors.Join(s.flushErr, err)
	s.mu.Unlock()
}

// consuming reports that an epoch consumes.
func (e *epoch) consuming() {
	event := ConsumingEvent{Epoch: e.id, Host: e.conn.host, Prefetch: e.prefetch}
	e.log.Info("rabbitmq: consuming", "epoch", e.id, "host", event.Host, "prefetch", e.prefetch)
	emit(e.cfg.Hooks, func(h OnConsuming) { h.OnConsuming(hookContext, event) })
}

// report reports an epoch that has ended.
func (e *epoch) report(event EndedEvent) {
	e.counters.lost.Add(int64(event.Lost))
	e.counters.unsent.Add(int64(event.Unsent))
	args := []any{"epoch", event.Epoch, "lost", event.Lost, "unsent", event.Unsent}
	if event.Err != nil {
		args = append(args, "error", event.Err) // Whoever connects again warns of it.
	}
	e.log.Info("rabbitmq: the channel has ended", args...)
	if event.AckTimeout {
		e.counters.noteAckTimeout(event.Err)
		e.log.Error("rabbitmq: a message was not acked within the broker's consumer_timeout: set Config.AckTimeout to what the broker has, and keep handlers shorter than that",
			"ack_timeout", e.cfg.AckTimeout)
	}
	emit(e.cfg.Hooks, func(h OnEnded) { h.OnEnded(hookContext, event) })
}

// recalled reports what went back because of its age.
func (s *Source) recalled(recalled, returned int) {
	if recalled == 0 && returned == 0 {
		return
	}
	s.counters.recalled.Add(int64(recalled))
	s.counters.returned.Add(int64(returned))
	s.log.Warn("rabbitmq: messages have been here for half of AckTimeout and go back to the broker", "recalled", recalled, "returned", returned)
	emit(s.cfg.Hooks, func(h OnRecall) {
		h.OnRecall(hookContext, RecallEvent{Recalled: recalled, Returned: returned})
	})
}

// pausing reports the begin or the end of a pause.
func (s *Source) pausing(on bool, lasted time.Duration) {
	s.mu.Lock()
	s.paused = on
	s.mu.Unlock()
	if on {
		s.counters.pauses.Add(1)
		s.log.Warn("rabbitmq: nobody receives: not consuming until somebody does")
	} else {
		s.log.Info("rabbitmq: somebody receives: consuming again", "after", lasted.Round(time.Millisecond))
	}
	emit(s.cfg.Hooks, func(h OnPause) { h.OnPause(hookContext, PauseEvent{Paused: on, For: lasted}) })
}

// alarm reports that the broker blocks the connection.
func (s *Source) alarm(b amqp.Blocking) {
	reason := ""
	if b.Active {
		reason = b.Reason
		if reason == "" {
			reason = "no reason given"
		}
	}
	s.mu.Lock()
	s.blocked = reason
	s.mu.Unlock()
	s.log.Warn("rabbitmq: the broker has an alarm", "blocked", b.Active, "reason", b.Reason)
	emit(s.cfg.Hooks, func(h OnBlocked) {
		h.OnBlocked(hookContext, BlockedEvent{Blocked: b.Active, Reason: b.Reason})
	})
}
