package inbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox/internal/column"
	"github.com/ackafter/ackafter/keyfunc"
)

const (
	// maxFed is how many leased rows a feeder has out, waiting or in work.
	maxFed = 20
	// feedTimeout bounds each question of the feeder.
	feedTimeout = 10 * time.Second
	// feedPause is the time between two questions that need not come at once.
	feedPause = 100 * time.Millisecond
	// purgeEvery is the time between two purges of dead letters, purgeLimit how many
	// one call deletes, and purgePause the time between two calls while there are more.
	purgeEvery = 5 * time.Minute
	purgeLimit = 1000
	purgePause = time.Second
	// fedLane begins the names of the lanes of fed messages in this process, which no
	// source's lane has.
	fedLane = "\x00parked\x00"
)

// feeder feeds parked messages back into the lanes of one Run when their time has
// come. They do not ask for room: a full queue of messages that wait behind a parked
// one could never drain otherwise. It settles its deliveries itself: their rows are
// dealt with in the transaction, so an ack says nothing, and a nack gives the lease
// back.
//
// A nil feeder feeds nothing.
type feeder[Tx any] struct {
	r     *runner[Tx]
	order Order
	log   *slog.Logger
	wake  chan struct{} // has a value when there may be something to do

	mu    sync.Mutex
	due   time.Time      // of the next question
	out   int            // leased rows that are waiting or in work
	lanes map[string]int // of them
	back  []Lease        // to be given back

	// Of the feeder's own goroutine.
	asked     time.Time
	tripped   bool  // it has shut the gate
	successes int64 // of the run when it did
	trouble   bool  // it was told that questions fail
	purgeAt   time.Time
}

func newFeeder[Tx any](r *runner[Tx]) *feeder[Tx] {
	f := &feeder[Tx]{r: r, order: r.c.order(), log: r.c.cfg.Logger.With(slog.String("consumer", r.c.name)), wake: make(chan struct{}, 1), lanes: map[string]int{}}
	// Processes that were started together need not purge together.
	f.purgeAt = time.Now().Add(rand.N(time.Minute)) //nolint:gosec // G404: no secret.
	return f
}

// order is what holds a lane back.
func (c *Consumer[Tx]) order() Order {
	p := &c.cfg.Parking
	if c.parker == nil || p.Unordered {
		return Order{}
	}
	return Order{Keep: true, BlockedByDead: p.OnDead == DeadBlock, MaxWaiting: p.MaxWaiting, MaxWaitingBytes: p.MaxWaitingBytes}
}

// run feeds until the stop.
func (f *feeder[Tx]) run() {
	for f.r.gate.wait(f.r.soft) && f.wait() {
		f.giveBack(f.r.soft, feedTimeout)
		if f.now() {
			f.feed()
		}
		f.purge()
	}
}

// wait waits until there is something to do; false at the stop.
func (f *feeder[Tx]) wait() bool {
	for f.r.soft.Err() == nil {
		d := f.delay()
		if d <= 0 {
			return true
		}
		if !sleep(f.r.soft, f.wake, d) {
			return false
		}
	}
	return false
}

// delay is the time until there is something to do.
func (f *feeder[Tx]) delay() time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	const forever = time.Hour // It is woken.
	switch {
	case len(f.back) > 0:
		return 0
	case f.out >= maxFed:
		return forever
	}
	d := time.Until(f.due)
	if f.out > maxFed/2 {
		// Not for each row that is done.
		d = max(d, time.Until(f.asked.Add(feedPause)))
	}
	return d
}

// now tells whether it is time to ask.
func (f *feeder[Tx]) now() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.out < maxFed && time.Until(f.due) <= 0
}

// ask makes sure that the next question comes in d at the latest.
func (f *feeder[Tx]) ask(d time.Duration) {
	if f == nil {
		return
	}
	f.mu.Lock()
	if at := time.Now().Add(d); at.Before(f.due) {
		f.due = at
	}
	f.mu.Unlock()
	f.signal()
}

func (f *feeder[Tx]) signal() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// feed leases what is due, and puts it into the lanes.
func (f *feeder[Tx]) feed() {
	f.asked = time.Now()
	late := f.r.queue.Remove(func(w *work) bool { return w.fed() && !f.asked.Before(w.until) })
	f.mu.Lock()
	f.due = f.asked.Add(f.r.c.cfg.Parking.Poll)
	for _, w := range late {
		f.leave(w)
	}
	limit := maxFed - f.out
	f.mu.Unlock()
	if len(late) > 0 {
		return // The workers did not come to them in time: others shall have them.
	}
	ctx, cancel := context.WithTimeout(f.r.soft, feedTimeout)
	defer cancel()
	leased, err := f.r.c.parker.Lease(ctx, LeaseRequest{
		Consumer: f.r.c.name, Limit: limit, For: f.r.c.cfg.Parking.Lease, Worker: f.r.c.cfg.Worker, Order: f.order,
	})
	if err != nil {
		f.failed(err, ctx.Err() != nil)
		return
	}
	f.succeeded()
	for i := range leased.Rows {
		f.put(&leased.Rows[i], f.asked.Add(f.r.c.cfg.Parking.Lease))
	}
	if next := leased.Next; next >= 0 {
		if len(leased.Rows) < limit {
			next = max(next, feedPause)
		}
		f.ask(next)
	}
}

// put makes a delivery of a row that is leased until then.
func (f *feeder[Tx]) put(row *ParkedRecord, until time.Time) {
	lane := ""
	if f.order.Keep && row.Lane != "" {
		lane = fedLane + row.Lane
	}
	// It is never lost: what became of its lease is found out under the claim.
	d := broker.NewDelivery(context.WithoutCancel(f.r.hard), row.Message, lane, f)
	d.Tag = row.Lease
	w := f.r.c.newFed(row, d)
	w.until = until
	f.mu.Lock()
	f.out++
	if lane != "" {
		f.lanes[lane]++
	}
	f.mu.Unlock()
	f.r.queue.Put(lane, w, row.Message.Size())
}

// errShortKey is what becomes of a parked message whose long key is stored in a short
// form, when the key function does not give that key any more.
var errShortKey = errors.New("inbox: the message's key is stored in a short form, and the key function gives another one now")

// newFed derives what a message needs that was parked before. It keeps the key and
// the fingerprint that it was parked under, as the key function may have changed; one
// that was parked without a key gets one now.
func (c *Consumer[Tx]) newFed(row *ParkedRecord, d *broker.Delivery) *work {
	m := row.Message
	w := &work{message: m, delivery: d, failed: row.Attempts}
	if row.Reason == ReasonInvalidKey || row.MessageKey == keylessID(m) {
		w.claim, w.keyErr = c.derive(m)
	} else {
		w.claim = Claim{
			Key: row.Key, Fingerprint: row.Fingerprint, MessageID: m.ID, Source: m.Source, Position: m.Position,
			EventTime: row.EventTime, Worker: c.cfg.Worker, TraceID: traceID(m.Headers), Retention: c.cfg.Retention,
		}
		if column.Key(row.MessageKey) != row.MessageKey {
			switch full, err := keyfunc.Derive(c.key, m); {
			case err != nil:
				w.keyErr = fmt.Errorf("inbox: derive key: %w", err)
			case full != row.MessageKey && column.Stored(full) != row.MessageKey:
				// Also one that looks like a short form itself: the store would take it for one.
				w.keyErr = errShortKey
			default:
				w.claim.MessageKey = full // Handlers get the same key on every attempt.
			}
		}
	}
	w.claim.Lane, w.claim.Parked = row.Lane, row.Lease
	return w
}

// left takes note of fed messages that leave the queue.
func (f *feeder[Tx]) left(items []*item) {
	if f == nil {
		return
	}
	f.mu.Lock()
	before := f.out
	for _, it := range items {
		w := it.Value
		if !w.fed() || it.Keep {
			continue
		}
		last := f.leave(w)
		switch {
		case w.fate.kind == fateHeld:
			f.back = append(f.back, w.claim.Parked)
		case last && w.fate.kind == fateDone && w.fate.outcome != WasParked && (w.fate.outcome != Dead || !f.order.BlockedByDead):
			f.due = time.Now() // Its lane may go on.
		}
	}
	left := f.out < before
	f.mu.Unlock()
	if left {
		f.signal()
	}
}

// leave counts a message that is no longer out, and reports whether it was the last
// one of its lane. f.mu is held.
func (f *feeder[Tx]) leave(w *work) bool {
	f.out--
	lane := w.lane()
	if lane == "" {
		return false
	}
	f.lanes[lane]--
	if f.lanes[lane] > 0 {
		return false
	}
	delete(f.lanes, lane)
	return true
}

// Ack does nothing.
func (f *feeder[Tx]) Ack(context.Context, *broker.Delivery) error { return nil }

// Nack gives the lease back, at the next opportunity and together with others.
func (f *feeder[Tx]) Nack(_ context.Context, d *broker.Delivery, _ time.Duration) error {
	if lease, ok := d.Tag.(Lease); ok {
		f.mu.Lock()
		f.back = append(f.back, lease)
		f.mu.Unlock()
		f.signal()
	}
	return nil
}

// close gives back what is left at the stop.
func (f *feeder[Tx]) close() {
	if f != nil {
		f.giveBack(context.WithoutCancel(f.r.hard), f.r.c.cfg.AckTimeout)
	}
}

// giveBack ends the leases of messages that were not worked on.
func (f *feeder[Tx]) giveBack(ctx context.Context, timeout time.Duration) {
	f.mu.Lock()
	back := f.back
	f.back = nil
	f.mu.Unlock()
	if len(back) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	err := f.r.c.parker.Release(ctx, back)
	switch {
	case err == nil:
	case errors.Is(ctx.Err(), context.Canceled):
		// The stop came in between.
		f.mu.Lock()
		f.back = append(f.back, back...)
		f.mu.Unlock()
	default:
		f.log.LogAttrs(ctx, slog.LevelWarn, "inbox: give back parked messages failed: they come again when their leases have run out",
			slog.Int("messages", len(back)), slog.Any("error", err))
	}
}

// failed decides about a question that failed. The database's trouble pauses the loop
// as it does when a claim meets it, unless claims succeed all the same.
func (f *feeder[Tx]) failed(err error, late bool) {
	if f.r.soft.Err() != nil {
		return
	}
	if isSetup(err) {
		f.r.fail(fmt.Errorf("inbox: consumer %q: feed parked messages: %w", f.r.c.name, err))
		return
	}
	successes := f.r.successes.Load()
	down := f.r.c.store.Classify(err) == ClassUnavailable || (late && !f.r.answers())
	if down && (!f.tripped || successes == f.successes) {
		f.tripped, f.successes = true, successes
		f.ask(0) // When the gate opens.
		f.r.gate.trip(err)
		return
	}
	if !f.trouble && f.r.c.store.Classify(err) != ClassContention {
		f.trouble = true
		f.log.LogAttrs(f.r.hard, slog.LevelWarn, "inbox: parked messages cannot be fed back", slog.Any("error", err))
	}
}

func (f *feeder[Tx]) succeeded() {
	if f.tripped {
		f.tripped = false
		f.r.gate.pass()
	}
	if f.trouble {
		f.trouble = false
		f.log.LogAttrs(f.r.hard, slog.LevelInfo, "inbox: parked messages are fed back again")
	}
}

// purge deletes dead letters past their retention, now and then.
func (f *feeder[Tx]) purge() {
	age := f.r.c.cfg.Parking.DeadRetention
	if age <= 0 || time.Now().Before(f.purgeAt) || f.r.soft.Err() != nil {
		return
	}
	ctx, cancel := context.WithTimeout(f.r.soft, statementTimeout)
	defer cancel()
	n, err := f.r.c.parker.PurgeDead(ctx, f.r.c.name, age, f.order.BlockedByDead, purgeLimit)
	f.purgeAt = time.Now().Add(purgeEvery)
	switch {
	case err != nil && f.r.soft.Err() == nil:
		f.log.LogAttrs(f.r.hard, slog.LevelWarn, "inbox: purge of dead letters failed", slog.Any("error", err))
	case n > 0:
		f.log.LogAttrs(f.r.hard, slog.LevelInfo, "inbox: dead letters purged", slog.Int("messages", n), slog.Duration("older_than", age))
	}
	if n >= purgeLimit {
		f.purgeAt = time.Now().Add(purgePause)
	}
	f.ask(time.Until(f.purgeAt))
}
