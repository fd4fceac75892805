package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/internal/retry"
)

const (
	// refusedGrace is how long a refusal may last before Receive returns it: a
	// broker that starts, or whose users are being changed, refuses for a while.
	refusedGrace = 30 * time.Second
	// healthyAfter is how long an epoch has to last for the backoff to begin anew.
	healthyAfter = 5 * time.Second
)

// link is a connection and an epoch on it.
type link struct {
	conn  *connection
	epoch *epoch
}

// establish opens what is missing of a link. The connection that it was given is
// gone when it returns none.
func (s *Source) establish(ctx context.Context, l link) (link, error) {
	if l.conn != nil && l.conn.IsClosed() {
		l.conn.kill()
		l.conn = nil
	}
	if l.conn == nil {
		conn, err := s.dialer.connect(ctx)
		if err != nil {
			return link{}, err
		}
		l.conn = conn
	}
	e, err := s.openEpoch(ctx, l.conn)
	if err != nil {
		return l, err
	}
	l.epoch = e
	return l, nil
}

// supervise keeps the source consuming until it closes or cannot go on. It begins
// with a link that Open has established.
func (s *Source) supervise(l link) {
	wait := retry.Backoff{Most: s.cfg.MaxBackoff}
	bad := newTrouble(s.log, "consume")
	var refused time.Time // since when the broker refuses
	for s.closing.Err() == nil {
		var err error
		if e := l.epoch; e != nil {
			s.enter(e)
			bad.Over(s.ctx)
			refused = time.Time{}
			err = e.run()
			s.leave(err)
			l.epoch = nil
			if time.Since(e.began) > healthyAfter {
				wait.Reset()
			}
			if s.closing.Err() != nil {
				s.setFlushError(err)
				break
			}
			if err == nil { // It ended as it should.
				if e.pauseAfter {
					s.awaitReceiver()
				}
				continue
			}
		} else if l, err = s.establish(s.closing, l); err == nil || s.closing.Err() != nil {
			continue
		}
		attempt := bad.Note(s.ctx, err, "hosts", hosts(s.dialer.addresses))
		s.setDown(err)
		emit(s.cfg.Hooks, func(h OnReconnect) {
			h.OnReconnect(hookContext, ReconnectEvent{Attempt: attempt, Err: err})
		})
		s.counters.reconnects.Add(1)
		if s.refusal(err, &refused) {
			break
		}
		if !wait.Sleep(s.closing) {
			break
		}
	}
	if l.epoch != nil { // The source was closed before it was entered.
		s.setFlushError(l.epoch.finish(s.ctx, nil, true))
	}
	if l.conn != nil {
		ctx, cancel := context.WithTimeout(s.ctx, s.cfg.RequestTimeout)
		defer cancel()
		if err := l.conn.shut(ctx); err != nil && s.closing.Err() != nil {
			s.setFlushError(err)
		}
	}
}

// awaitReceiver waits until somebody receives, or the source closes.
func (s *Source) awaitReceiver() {
	began := time.Now()
	s.pausing(true, 0)
	select {
	case <-s.wanted:
	case <-s.closing.Done():
	}
	s.pausing(false, time.Since(began))
}

// refusal looks at an error that stays. It tells whether the source has failed.
func (s *Source) refusal(err error, since *time.Time) bool {
	if !isFinal(err) {
		*since = time.Time{}
		return false
	}
	first := since.IsZero()
	if first {
		*since = time.Now()
	}
	if errors.Is(err, ErrNoQueue) {
		if first {
			s.log.ErrorContext(s.ctx, "rabbitmq: the queue does not exist any more", "error", err)
			emit(s.cfg.Hooks, func(h OnQueueDeleted) {
				h.OnQueueDeleted(hookContext, QueueDeletedEvent{Queue: s.queue, Err: err})
			})
		}
		if s.cfg.OnQueueDeleted == QueueDeletedWait {
			return false
		}
	} else if time.Since(*since) < refusedGrace {
		return false
	}
	s.fail(fmt.Errorf("rabbitmq: %w", err))
	return true
}

// run works until the channel ends, the source closes, or the epoch has to be
// replaced by another one, which is no error. When it returns, nothing of it runs
// any more and everything that is out of it is lost.
func (e *epoch) run() error {
	e.consuming()
	var tick <-chan time.Time
	if e.ledger.limit > 0 {
		t := time.NewTicker(e.cfg.lookEvery)
		defer t.Stop()
		tick = t.C
	}
	for {
		var err error
		replace := false
		select {
		case <-e.closing.Done():
			return e.finish(e.ctx, nil, true)
		case refusal := <-e.closed:
			return e.finish(e.ctx, channelError(refusal), false)
		case <-e.canceled:
			err = errCanceled
		case <-e.ended:
			if e.tag != "" {
				err = errCanceled
			}
		case err = <-e.broken:
		case <-e.wanted:
			err = e.resume()
		case now := <-tick:
			replace, err = e.look(now)
		}
		if err == nil && !replace {
			continue
		}
		return e.end(err)
	}
}

// channelError is why a channel was closed.
func channelError(refusal *amqp.Error) error {
	if refusal == nil {
		return errors.New("the channel was closed")
	}
	return fmt.Errorf("the channel was closed: %w", refusal)
}

// end ends an epoch whose channel may still work.
func (e *epoch) end(cause error) error {
	if cause == nil {
		return e.finish(e.ctx, nil, true)
	}
	// Why the channel was closed says more than that it is.
	select {
	case refusal := <-e.closed:
		cause = channelError(refusal)
	default:
	}
	return e.finish(e.ctx, cause, false)
}

// resume consumes again after a pause.
func (e *epoch) resume() error {
	if e.idle.IsZero() {
		return nil
	}
	since := e.idle
	e.ledger.pause(false)
	if err := e.consume(e.ctx); err != nil {
		return err
	}
	e.pausing(false, time.Since(since))
	e.consuming()
	return nil
}

// look sees to it that nothing grows too old here. It tells whether the epoch has to
// be replaced.
func (e *epoch) look(now time.Time) (replace bool, err error) {
	if back := e.ledger.tookBack(); back > 0 && e.idle.IsZero() {
		e.recalled(0, back)
		if e.window.shrink(now) {
			return false, e.reconsume()
		}
	}
	if !e.ledger.aged(now) {
		if e.idle.IsZero() && e.window.grow(now, 2*e.ledger.limit) {
			return false, e.reconsume()
		}
		return false, nil
	}
	received := !e.tryPause(now, e.ledger.limit/2)
	if e.ledger.ordered {
		return e.drain(now, received)
	}
	if !received && e.idle.IsZero() {
		if err := e.pause(); err != nil {
			return false, err
		}
	}
	recalled, returned := e.ledger.giveBack(now)
	e.recalled(recalled, returned)
	if received && returned > 0 && e.window.shrink(now) {
		return false, e.reconsume()
	}
	return false, nil
}

// pause stops to consume.
func (e *epoch) pause() error {
	// What is still pushed is given back at once.
	e.ledger.pause(true)
	if err := e.cancel(e.ctx); err != nil {
		return err
	}
	e.idle = time.Now()
	e.pausing(true, 0)
	return nil
}

// reconsume makes another size of the window count: the broker looks at it only when
// a consumer begins. Deliveries that are out stay out.
func (e *epoch) reconsume() error {
	if e.tag == "" {
		return nil
	}
	if err := e.cancel(e.ctx); err != nil {
		return err
	}
	if err := e.consume(e.ctx); err != nil {
		return err
	}
	e.consuming()
	return nil
}

// drain asks for everything, waits for it, and lets the channel end, which gives
// back in order what is not acked. When nobody receives, it waits for somebody.
//
// The consumer stays until then: a single active consumer that is cancelled makes
// room for another one, which would get what comes after the messages that are here.
// And the window stays as it is: a quorum queue puts what comes back behind what
// came back before and was not fetched again.
func (e *epoch) drain(now time.Time, received bool) (replace bool, err error) {
	st := e.ledger.stats()
	e.recalled(st.out, st.waiting)
	drained := e.ledger.drain()
	t := time.NewTimer(st.oldest.Add(e.ledger.limit * 18 / 10).Sub(now))
	defer t.Stop()
	select {
	case <-drained:
	case <-t.C:
	case <-e.closing.Done():
		return false, nil
	case err := <-e.broken:
		return false, err
	case refusal := <-e.closed:
		return false, channelError(refusal)
	}
	e.pauseAfter = !received
	return true, nil
}
