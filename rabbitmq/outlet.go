package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"sync"

	amqp "github.com/rabbitmq/amqp091-go"
)

// item is a message on its way to the broker.
type item struct {
	amqp.Publishing
	key  string
	ctx  context.Context // of its publisher; it is not written after that has ended
	done chan error      // gets what became of it, once

	returned *amqp.Return // guarded by the outlet's mutex
}

// outlet is a channel that messages are published on. One goroutine writes, so that
// who waits for a broker that takes nothing can stop waiting; another one listens to
// what the broker says.
type outlet struct {
	conn     *connection
	ch       *amqp.Channel
	exchange string
	items    chan *item
	closed   chan *amqp.Error
	running  sync.WaitGroup
	dead     chan struct{} // closed when nothing can be published any more
	err      error         // why; set before dead is closed

	mu   sync.Mutex
	sent map[uint64]*item // not confirmed yet, by the number of the channel
	flow chan struct{}    // closed when the broker takes messages again; nil: it does
	why  string           // it takes none
}

// openOutlet opens a channel with confirms.
func openOutlet(ctx context.Context, conn *connection, exchange string) (*outlet, error) {
	o := &outlet{conn: conn, exchange: exchange, items: make(chan *item), dead: make(chan struct{}), sent: make(map[uint64]*item)}
	err := conn.call(ctx, func() (err error) {
		if o.ch, err = conn.Channel(); err != nil {
			return err
		}
		return o.ch.Confirm(false)
	})
	if err != nil {
		return nil, fmt.Errorf("open a channel: %w", err)
	}
	// The library waits for whoever does not read these. Nothing is buffered, so
	// that a message's return is known before its confirm.
	returns := o.ch.NotifyReturn(make(chan amqp.Return))
	confirms := o.ch.NotifyPublish(make(chan amqp.Confirmation))
	o.closed = o.ch.NotifyClose(make(chan *amqp.Error, 1))
	o.running.Go(func() { o.listen(returns, confirms) })
	return o, nil
}

// start begins to write.
func (o *outlet) start() { o.running.Go(o.write) }

// listen hears what became of the messages, until the channel ends.
func (o *outlet) listen(returns <-chan amqp.Return, confirms <-chan amqp.Confirmation) {
	for returns != nil || confirms != nil {
		select {
		case r, ok := <-returns:
			if !ok {
				returns = nil
				continue
			}
			o.returned(&r)
		case c, ok := <-confirms:
			if !ok {
				confirms = nil
				continue
			}
			o.confirmed(c)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.err = channelError(<-o.closed)
	close(o.dead)
	for _, it := range o.sent {
		it.done <- o.err
	}
	o.sent = nil
}

// returned marks the message that nobody takes. The broker does not say which number
// it is about; but it answers in order, so it is the first that agrees in id and key.
func (o *outlet) returned(r *amqp.Return) {
	o.mu.Lock()
	defer o.mu.Unlock()
	first := uint64(0)
	for number, it := range o.sent {
		if it.MessageId == r.MessageId && it.key == r.RoutingKey && it.returned == nil && (first == 0 || number < first) {
			first = number
		}
	}
	if first > 0 {
		o.sent[first].returned = r
	}
}

func (o *outlet) confirmed(c amqp.Confirmation) {
	o.mu.Lock()
	defer o.mu.Unlock()
	it := o.sent[c.DeliveryTag]
	if it == nil {
		return
	}
	delete(o.sent, c.DeliveryTag)
	switch {
	case it.returned != nil:
		it.done <- fmt.Errorf("%w: %d %s", ErrUnroutable, it.returned.ReplyCode, it.returned.ReplyText)
	case !c.Ack:
		it.done <- ErrRefused
	default:
		it.done <- nil
	}
}

// write publishes what comes, until the channel ends.
func (o *outlet) write() {
	for {
		select {
		case <-o.dead:
			return
		case it := <-o.items:
			if err := o.writable(it.ctx); err != nil {
				it.done <- err
				continue
			}
			o.mu.Lock()
			if o.sent == nil { // It is dead.
				o.mu.Unlock()
				it.done <- o.err
				return
			}
			number := o.ch.GetNextPublishSeqNo()
			o.sent[number] = it
			o.mu.Unlock()
			if err := o.ch.PublishWithContext(it.ctx, o.exchange, it.key, true, false, it.Publishing); err != nil {
				o.unsent(number, it, err)
			}
		}
	}
}

// unsent gives up a message that could not be written; the connection is of no more
// use, unless its publisher just stopped waiting.
func (o *outlet) unsent(number uint64, it *item, err error) {
	o.mu.Lock()
	if o.sent[number] == it {
		delete(o.sent, number)
		it.done <- err
	}
	o.mu.Unlock()
	if it.ctx.Err() == nil || !errors.Is(err, it.ctx.Err()) {
		_ = o.conn.raw.Close()
	}
}

// writable waits until the broker takes messages.
func (o *outlet) writable(ctx context.Context) error {
	for {
		o.mu.Lock()
		flow := o.flow
		o.mu.Unlock()
		if flow == nil {
			return ctx.Err()
		}
		select {
		case <-flow:
		case <-ctx.Done():
			return ctx.Err()
		case <-o.dead:
			return o.err
		}
	}
}

// alarm notes whether the broker takes messages.
func (o *outlet) alarm(b amqp.Blocking) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case b.Active && o.flow == nil:
		o.flow, o.why = make(chan struct{}), b.Reason
	case !b.Active && o.flow != nil:
		close(o.flow)
		o.flow, o.why = nil, ""
	}
}

// blocked is why the broker takes no messages; empty: it does.
func (o *outlet) blocked() (why string, is bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.why, o.flow != nil
}

// isDead tells whether nothing can be published any more.
func (o *outlet) isDead() bool {
	select {
	case <-o.dead:
		return true
	default:
		return false
	}
}

// shut ends the outlet and its connection.
func (o *outlet) shut(ctx context.Context) error {
	err := o.conn.shut(ctx)
	o.running.Wait()
	return err
}
