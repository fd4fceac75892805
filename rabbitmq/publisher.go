package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
)

// Publisher publishes messages to one exchange, for dead letters, for what handlers
// send on, and for tests. Make it with OpenPublisher. Its methods may be called
// concurrently. It has a connection of its own, so that an alarm of the broker,
// which stops publishing, does not stop a Source.
type Publisher struct {
	exchange string
	cfg      *PublisherConfig
	log      *slog.Logger
	dialer   *dialer

	ctx    context.Context // ends when nothing may run any more
	cancel context.CancelCauseFunc
	turn   chan struct{} // holds one token: who has it may replace the outlet

	mu      sync.Mutex
	closed  bool
	running sync.WaitGroup // calls of Publish
	outlet  *outlet        // nil: there is none
	failure error          // of the last attempt; nil: it worked
	trouble retry.Trouble
}

// OpenPublisher makes a Publisher. urls are as for Open. exchange may be empty: that
// is the default exchange, which takes the routing key as the name of a queue.
//
// Before it returns, it makes sure that the login works and that the exchange
// exists, or creates it (PublisherConfig.ExchangeType). Whether the user may write
// to it shows with the first Publish. While no broker can be reached it tries again,
// logging why, until ctx ends; the error then wraps ctx's error and the last reason.
// What only a person can mend is an error at once: a wrong argument or
// PublisherConfig, ErrNoExchange, ErrNotAMQP, ErrLogin, ErrVHost, ErrForbidden,
// ErrMismatch, and a certificate that cannot be verified. ctx has no part in what
// happens afterwards. Close the publisher when done.
func OpenPublisher(ctx context.Context, urls []string, exchange string, cfg *PublisherConfig) (*Publisher, error) {
	addresses, err := parseAddresses(urls)
	if err != nil {
		return nil, fmt.Errorf("rabbitmq: open: %w", err)
	}
	if exchange != "" {
		if err := validateName("exchange", exchange); err != nil {
			return nil, fmt.Errorf("rabbitmq: open: %w", err)
		}
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	p := &Publisher{exchange: exchange, cfg: cfg, log: cfg.Logger.With("exchange", exchange), turn: make(chan struct{}, 1)}
	p.trouble = newTrouble(p.log, "publish")
	p.dialer = &dialer{
		addresses: addresses, clientID: cfg.ClientID, tls: cfg.TLS, credentials: cfg.Credentials, dial: cfg.Dial,
		dialTimeout: cfg.DialTimeout, requestTimeout: cfg.RequestTimeout, heartbeat: cfg.Heartbeat, blocked: p.alarm,
	}
	p.turn <- struct{}{}
	p.ctx, p.cancel = context.WithCancelCause(context.Background())
	if err := p.begin(ctx); err != nil {
		p.cancel(nil)
		return nil, fmt.Errorf("rabbitmq: open: %w", err)
	}
	return p, nil
}

// begin opens the first outlet. It waits for a broker that cannot be reached.
func (p *Publisher) begin(ctx context.Context) error {
	wait := retry.Backoff{Most: p.cfg.MaxBackoff}
	var last error
	for {
		_, err := p.reach(ctx)
		if err == nil || isFinal(err) {
			return err
		}
		if last == nil || ctx.Err() == nil {
			last = err // an attempt that the end of ctx broke off tells nothing
		}
		if !wait.Sleep(ctx) {
			return fmt.Errorf("%w; last: %w", ctx.Err(), last)
		}
	}
}

// reach returns an outlet that works, as far as is known.
func (p *Publisher) reach(ctx context.Context) (*outlet, error) {
	select {
	case <-p.turn:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { p.turn <- struct{}{} }()
	p.mu.Lock()
	o := p.outlet
	p.mu.Unlock()
	if o != nil && !o.isDead() {
		return o, nil
	}
	if o != nil {
		o.conn.kill()
		o.running.Wait()
		p.setOutlet(nil)
	}
	o, err := p.connect(ctx)
	attempt := p.note(ctx, err)
	if err != nil {
		if ctx.Err() == nil {
			p.failed(ReconnectEvent{Attempt: attempt, Err: err}) //nolint:contextcheck // hooks get a context of their own
		}
		return nil, err
	}
	return o, nil
}

func (p *Publisher) failed(e ReconnectEvent) {
	emit(p.cfg.Hooks, func(h OnReconnect) { h.OnReconnect(hookContext, e) })
}

// note takes in how an attempt went, and returns how many failed in a row.
func (p *Publisher) note(ctx context.Context, err error) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failure = err
	if err == nil {
		p.trouble.Over(ctx)
		return 0
	}
	return p.trouble.Note(ctx, err, "hosts", hosts(p.dialer.addresses))
}

func (p *Publisher) setOutlet(o *outlet) {
	p.mu.Lock()
	p.outlet = o
	p.mu.Unlock()
}

func (p *Publisher) connect(ctx context.Context) (*outlet, error) {
	conn, err := p.dialer.connect(ctx)
	if err != nil {
		return nil, err
	}
	o, err := openOutlet(ctx, conn, p.exchange)
	if err != nil {
		conn.kill()
		return nil, err
	}
	p.setOutlet(o) // An alarm may be told of from now on.
	if err := conn.call(ctx, func() error { return p.checkExchange(o.ch) }); err != nil {
		p.setOutlet(nil)
		conn.kill()
		o.running.Wait()
		return nil, fmt.Errorf("exchange %q: %w", p.exchange, explain(err, stepExchange))
	}
	o.start()
	return o, nil
}

func (p *Publisher) checkExchange(ch *amqp.Channel) error {
	switch {
	case p.exchange == "":
		return nil
	case p.cfg.ExchangeType == "":
		return ch.ExchangeDeclarePassive(p.exchange, amqp.ExchangeTopic, true, false, false, false, nil)
	}
	return ch.ExchangeDeclare(p.exchange, p.cfg.ExchangeType, true, false, false, false, nil)
}

// alarm reports that the broker takes no messages, or takes them again.
func (p *Publisher) alarm(b amqp.Blocking) {
	p.mu.Lock()
	o := p.outlet
	p.mu.Unlock()
	if o != nil {
		o.alarm(b)
	}
	p.log.Warn("rabbitmq: the broker has an alarm", "blocked", b.Active, "reason", b.Reason)
	emit(p.cfg.Hooks, func(h OnBlocked) { h.OnBlocked(hookContext, BlockedEvent{Blocked: b.Active, Reason: b.Reason}) })
}

// Publish publishes messages and returns when the broker has confirmed them: they
// are in every queue that is bound for them, and on disk where the queue is durable.
// All are persistent.
//
// The routing key is the message's Key, unless PublisherConfig.RoutingKey is set. ID
// becomes the message-id (a random one if it is empty), Time the timestamp, headers
// become properties (HeaderContentType and the others) and entries of the header
// table: text as strings, other bytes as bytes, several of one name as a list.
// HeaderUserID, HeaderExpiration, HeaderExchange, CC, BCC and the broker's own counts
// are left out, so that what came from a queue can be passed on. Source and Position are not
// written. A nil body becomes an empty one. The messages must not be changed before
// it returns.
//
// Messages are written in their order. What fails for a reason that may pass, as a
// broken connection or a broker that refuses a message (ErrRefused: a full queue), is
// published again, until ctx ends or, when it has no deadline, for
// PublisherConfig.PublishTimeout; so a message can be there twice, as after a Publish
// that is called again. One message that is refused does not stop the others.
//
// A message that is nil, or too large (ErrTooLarge), is refused before anything is
// written, and so is everything after Close (ErrPublisherClosed). Every other error is
// a *PublishError that tells which messages were not confirmed; it wraps the reason:
// ctx's error, also while the broker has an alarm and takes nothing; ErrUnroutable;
// ErrForbidden, ErrNoExchange, or what the broker says. After it no more is sent.
func (p *Publisher) Publish(ctx context.Context, messages ...*broker.Message) error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return fmt.Errorf("rabbitmq: publish: %w", ErrPublisherClosed)
	}
	p.running.Add(1)
	p.mu.Unlock()
	defer p.running.Done()

	items := make([]*item, len(messages))
	for i, m := range messages {
		publishing, key, err := p.cfg.newPublishing(m)
		if err != nil {
			return fmt.Errorf("rabbitmq: publish: message %d: %w", i, err)
		}
		items[i] = &item{Publishing: publishing, key: key}
	}
	if _, ok := ctx.Deadline(); !ok {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.cfg.PublishTimeout)
		defer cancel()
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(p.ctx, func() { cancel(context.Cause(p.ctx)) })() //nolint:contextcheck // Close ends it too
	failed, reason := p.publish(ctx, items)
	if len(failed) == 0 {
		return nil
	}
	return &PublishError{Exchange: p.exchange, Failed: failed, Of: len(messages), Err: reason}
}

// publish writes items until all are confirmed or nothing more can be done. It
// returns the places of those that are not, and why.
func (p *Publisher) publish(ctx context.Context, items []*item) (failed []int, reason error) {
	left := make([]int, len(items))
	for i := range left {
		left[i] = i
	}
	wait := retry.Backoff{Most: p.cfg.MaxBackoff}
	var last error // why something is tried again
	for len(left) > 0 {
		o, err := p.reach(ctx)
		if err == nil {
			before := len(left)
			var refused []int
			var why error
			left, refused, why, err = o.round(ctx, items, left)
			failed = append(failed, refused...)
			reason = firstError(reason, why)
			if len(left) < before {
				wait.Reset()
			}
		}
		switch {
		case len(left) == 0:
			continue
		case isFinal(err):
			return sorted(failed, left), firstError(reason, err)
		case err != nil && ctx.Err() == nil:
			last = err
		}
		if ctx.Err() != nil || !wait.Sleep(ctx) {
			return sorted(failed, left), firstError(reason, p.ending(ctx, last))
		}
	}
	return sorted(failed, nil), reason
}

// ending is the error of a publish whose context has ended.
func (p *Publisher) ending(ctx context.Context, last error) error {
	err := context.Cause(ctx)
	p.mu.Lock()
	o := p.outlet
	p.mu.Unlock()
	if o != nil {
		if why, blocked := o.blocked(); blocked {
			return fmt.Errorf("%w; the broker takes nothing: it has an alarm: %s", err, why)
		}
	}
	if last != nil {
		return fmt.Errorf("%w; last: %w", err, last)
	}
	return err
}

func firstError(first, second error) error {
	if first != nil {
		return first
	}
	return second
}

func sorted(a, b []int) []int {
	all := slices.Concat(a, b)
	slices.Sort(all)
	return all
}

// round writes the items that are left and waits for what becomes of them. It returns
// those that may be written again, with the last reason, and those that never will,
// with the first.
func (o *outlet) round(ctx context.Context, items []*item, left []int) (again, refused []int, why, err error) {
	var written []int
	for i, n := range left {
		it := items[n]
		it.ctx, it.done, it.returned = ctx, make(chan error, 1), nil
		select {
		case o.items <- it:
			written = append(written, n)
			continue
		case <-o.dead:
			err = explain(o.err, stepPublish)
		case <-ctx.Done():
			err = ctx.Err()
		}
		again = append(again, left[i:]...)
		break
	}
	for _, n := range written {
		var outcome error
		select {
		case outcome = <-items[n].done:
		case <-ctx.Done():
			outcome = ctx.Err()
			items[n] = &item{Publishing: items[n].Publishing, key: items[n].key} // the old one is still the outlet's
		}
		switch {
		case outcome == nil:
		case errors.Is(outcome, ErrUnroutable):
			refused = append(refused, n)
			why = firstError(why, outcome)
		default:
			again = append(again, n)
			err = explain(outcome, stepPublish)
		}
	}
	slices.Sort(again)
	return again, refused, why, err
}

// Health returns nil when the last attempt to reach the broker worked and it takes
// messages, and else what is wrong. It may be called concurrently and does not wait
// for a broker.
func (p *Publisher) Health() error {
	p.mu.Lock()
	o, failure, closed := p.outlet, p.failure, p.closed
	p.mu.Unlock()
	switch {
	case closed:
		return fmt.Errorf("rabbitmq: %w", ErrPublisherClosed)
	case failure != nil:
		return fmt.Errorf("rabbitmq: not connected: %w", failure)
	case o == nil:
		return errors.New("rabbitmq: not connected")
	case o.isDead():
		return fmt.Errorf("rabbitmq: not connected: %w", o.err)
	}
	if why, blocked := o.blocked(); blocked {
		return fmt.Errorf("rabbitmq: the broker takes nothing: it has an alarm: %s", why)
	}
	return nil
}

// Close waits for the calls of Publish that run, and frees everything. It returns
// before ctx ends, or within PublisherConfig.CloseTimeout when ctx has no deadline;
// calls that still run then are cut off and return ErrPublisherClosed, and so does
// Close. A second Close returns nil.
func (p *Publisher) Close(ctx context.Context) error {
	p.mu.Lock()
	first := !p.closed
	p.closed = true
	p.mu.Unlock()
	if !first {
		return nil
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(p.cfg.CloseTimeout)
	}
	// A part of the time is kept for ending what did not end by itself.
	rest := time.Until(deadline)
	soft, cancel := context.WithTimeout(ctx, rest-min(rest/5, time.Second))
	defer cancel()
	ended := make(chan struct{})
	go func() {
		p.running.Wait()
		close(ended)
	}()
	var err error
	select {
	case <-ended:
	case <-soft.Done():
		err = fmt.Errorf("rabbitmq: close: %w while messages were published: %w", ErrPublisherClosed, soft.Err())
	}
	p.cancel(ErrPublisherClosed)
	<-ended
	p.mu.Lock()
	o := p.outlet
	p.mu.Unlock()
	if o != nil {
		_ = o.shut(soft) // all that was confirmed is safe
	}
	return err
}
