package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
)

// epoch is one channel with its consumer, and all that was pushed on it. Its
// deliveries can be settled on it and on no other: the numbers of another channel
// mean other messages. Requests on the channel are made by the goroutine that runs
// the epoch; acks are sent by one of its own.
type epoch struct {
	*Source
	id     int64
	conn   *connection
	ch     *amqp.Channel
	ledger *ledger

	closed   chan *amqp.Error // the channel is
	canceled chan string      // the broker cancelled the consumer
	ended    chan struct{}    // holds a token when deliveries end by themselves
	broken   chan error       // holds what keeps acks from being sent
	kicked   chan struct{}    // holds a token when there is something to send
	stopSend chan struct{}
	sender   sync.WaitGroup
	pumps    sync.WaitGroup

	tag      string // of the consumer; empty: there is none
	consumer int    // counts consumers
	prefetch int    // of the consumer
	began    time.Time
	idle     time.Time // since when nothing is consumed; zero: it is
	unsent   int       // acks that could not be sent; of the sender
	sent     burst

	// pauseAfter says that nobody receives: the next epoch begins when somebody does.
	pauseAfter bool
}

// openEpoch opens a channel and consumes on it.
func (s *Source) openEpoch(ctx context.Context, conn *connection) (*epoch, error) {
	s.epochs++
	e := &epoch{
		Source: s, id: s.epochs, conn: conn, began: time.Now(),
		ended: make(chan struct{}, 1), broken: make(chan error, 1), kicked: make(chan struct{}, 1), stopSend: make(chan struct{}),
	}
	err := conn.call(ctx, func() (err error) {
		e.ch, err = conn.Channel()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("open a channel: %w", err)
	}
	// The library waits for whoever does not read these, so there is room for all
	// that can come.
	e.closed = e.ch.NotifyClose(make(chan *amqp.Error, 1))
	e.canceled = e.ch.NotifyCancel(make(chan string, 1))
	e.ledger = newLedger(e, s.cfg, s.offsets, s.wake, e.kick)
	if err := conn.call(ctx, func() error { return declare(e.ch, s.queue, s.cfg.Declare) }); err != nil {
		e.abandon(ctx)
		return nil, explain(err, stepDeclare)
	}
	if err := e.consume(ctx); err != nil {
		e.abandon(ctx)
		return nil, err
	}
	e.sender.Go(e.send)
	return e, nil
}

// abandon closes the channel of an epoch that never began.
func (e *epoch) abandon(ctx context.Context) {
	e.ledger.end()
	_ = e.closeChannel(ctx) // it is closed whatever comes back
	e.pumps.Wait()
}

// consume starts a consumer.
func (e *epoch) consume(ctx context.Context) error {
	e.prefetch = e.window.size()
	if err := e.conn.call(ctx, func() error { return e.ch.Qos(e.prefetch, 0, false) }); err != nil {
		return fmt.Errorf("set the prefetch: %w", explain(err, stepConsume))
	}
	var arguments amqp.Table
	if e.cfg.Stream != nil {
		arguments = e.cfg.Stream.arguments(e.offsets.begin(e.id), e.reading)
	}
	e.consumer++
	tag := fmt.Sprintf("%s-%d.%d", e.cfg.ClientID, e.id, e.consumer)
	var deliveries <-chan amqp.Delivery
	err := e.conn.call(ctx, func() (err error) {
		deliveries, err = e.ch.Consume(e.queue, tag, false, false, false, false, arguments)
		return err
	})
	if err != nil {
		return fmt.Errorf("consume from queue %q: %w", e.queue, explain(err, stepConsume))
	}
	if e.reading.IsZero() {
		e.reading = time.Now().Add(-time.Second) // Clocks, and the whole seconds of the protocol.
	}
	e.tag, e.idle = tag, time.Time{}
	e.pumps.Go(func() { e.pump(deliveries) })
	return nil
}

// pump moves what is pushed into the ledger.
func (e *epoch) pump(deliveries <-chan amqp.Delivery) {
	for d := range deliveries {
		e.ledger.add(e.entry(&d))
	}
	select {
	case e.ended <- struct{}{}:
	default:
	}
}

// entry makes an entry of what was pushed.
func (e *epoch) entry(d *amqp.Delivery) *entry {
	en := &entry{epoch: e.id, tag: d.DeliveryTag, lane: e.cfg.Lanes.laneOf(e.queue, d), pushed: time.Now()}
	offset, isStream := int64(0), false
	if e.cfg.Stream != nil {
		offset, isStream = wholeNumber(d.Headers[headerStreamOffset])
	}
	id := fmt.Sprintf("%s#%s.%d", e.queue, e.instance, e.id)
	if isStream {
		id = streamID(e.queue, offset)
	} else {
		id = fmt.Sprintf("%s.%d", id, d.DeliveryTag)
	}
	en.message = newMessage(d, e.name, id)
	if isStream {
		en.message.Position = broker.At(offset)
	}
	switch count, counted := wholeNumber(d.Headers[headerDeliveryCount]); {
	case counted:
		e.counts.Store(true)
		en.attempt = int(count) + 1
	case e.counts.Load() && !d.Redelivered:
		en.attempt = 1 // The first time the broker leaves the count out.
	}
	return en
}

// kick asks for what is settled to be sent. It does not block.
func (e *epoch) kick() {
	select {
	case e.kicked <- struct{}{}:
	default:
	}
}

// send tells the broker what is settled, until it is stopped or that fails. While
// it writes, more is settled, which then goes out together.
func (e *epoch) send() {
	for {
		select {
		case <-e.stopSend:
			return
		case <-e.kicked:
		}
		if err := e.flush(); err != nil {
			e.broken <- err
			return
		}
	}
}

// flush sends what is settled. It returns when it is written, or the connection is
// at its end.
func (e *epoch) flush() error {
	s := e.ledger.settlements()
	for _, tag := range s.requeue {
		if err := e.ch.Nack(tag, false, true); err != nil {
			return fmt.Errorf("give back: %w", err)
		}
		e.sent.note()
	}
	acked := func(tag uint64, multiple bool, n int) error {
		if err := e.ch.Ack(tag, multiple); err != nil {
			e.unsent += s.count
			return fmt.Errorf("ack: %w", err)
		}
		s.count -= n
		e.sent.note()
		e.counters.acks.Add(int64(n))
		return nil
	}
	if s.upTo > 0 {
		if err := acked(s.upTo, true, s.count-len(s.acks)); err != nil {
			return err
		}
	}
	for _, tag := range s.acks {
		if err := acked(tag, false, 1); err != nil {
			return err
		}
	}
	return nil
}

// cancel ends the consumer. What was pushed before is in the ledger, or will be.
func (e *epoch) cancel(ctx context.Context) error {
	if e.tag == "" {
		return nil
	}
	tag := e.tag
	e.tag = ""
	if err := e.conn.call(ctx, func() error { return e.ch.Cancel(tag, false) }); err != nil {
		return fmt.Errorf("cancel the consumer: %w", err)
	}
	e.pumps.Wait() // All that was pushed is taken in.
	select {
	case <-e.ended:
	default:
	}
	return nil
}

// closeChannel closes the channel; the broker gives everything back that is not
// acked. Without an error, it has what was sent before.
func (e *epoch) closeChannel(ctx context.Context) error {
	if err := e.conn.call(ctx, e.ch.Close); err != nil {
		return fmt.Errorf("close the channel: %w", err)
	}
	return nil
}

// finish ends an epoch. With polite, what is settled is sent first; the error then
// says that it could not be.
func (e *epoch) finish(ctx context.Context, cause error, polite bool) error {
	if polite && !e.ledger.ordered {
		// No more than this may be pushed: it would have to be given back. Where there
		// is an order, the consumer has to stay, see drain.
		if err := e.cancel(ctx); err != nil {
			polite, cause = false, errors.Join(cause, err)
		}
	}
	lost := e.ledger.end()
	close(e.stopSend)
	e.sender.Wait()
	var err error
	if polite {
		select {
		case err = <-e.broken:
		default:
			err = e.flush()
		}
		if err == nil {
			e.sent.settle(ctx, e.ctx)
		}
	}
	closed := e.closeChannel(ctx)
	if err == nil && polite {
		err = closed
	}
	e.pumps.Wait()
	unsent := e.unsent + e.ledger.unsent()
	if err == nil && polite && ctx.Err() != nil {
		err = ctx.Err()
	}
	if !polite {
		err = cause
	}
	e.report(EndedEvent{Epoch: e.id, Lost: lost, Unsent: unsent, AckTimeout: isAckTimeout(cause), Err: cause}) //nolint:contextcheck // hooks get a context of their own
	return err
}

// burst remembers when the last acks were sent.
//
// A quorum queue's client inside the broker (seen on 3.10) keeps acks back while
// more than 32 of them are on their way to the queue, and forgets these when the
// channel is closed; then messages come again that were acked. Nothing tells when
// all have arrived, so after many acks in a short time the channel is left open for
// a moment.
type burst struct {
	times [16]time.Time
	n     int
}

const (
	burstTime  = 500 * time.Millisecond
	settleTime = 300 * time.Millisecond
)

// note takes in that something was sent.
func (b *burst) note() {
	b.times[b.n%len(b.times)] = time.Now()
	b.n++
}

// settle waits when it is needed, or until a context ends.
func (b *burst) settle(ctx, hard context.Context) {
	if b.n < len(b.times) || time.Since(b.times[b.n%len(b.times)]) > burstTime {
		return
	}
	last := b.times[(b.n-1)%len(b.times)]
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(hard, cancel)()
	retry.Sleep(ctx, settleTime-time.Since(last))
}
