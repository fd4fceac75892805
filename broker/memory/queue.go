// Package memory is a broker inside the process: for a first look without any
// server, and for tests of message handlers.
//
// A [Queue] keeps every message that was published, like a log, and hands out
// those that are not acked, like a queue. [Queue.Source] opens a receiving end;
// several compete for the messages. What real brokers do to a consumer can be
// done to a source on purpose: [Source.Recall] asks for its deliveries as the
// begin of a rebalance does, [Source.Revoke] takes them away as its end or a cut
// connection does, closing it gives them back as the end of
// a process does, and [Queue.Rewind] delivers everything again with new broker
// ids as a replay does. [Queue.Stats] tells what happened and [Queue.Drained]
// waits for the end.
//
// Nothing here starts a goroutine and time is only taken from package time, so
// a queue made inside a testing/synctest bubble keeps to the bubble's clock.
// Nothing survives the process, and acked messages stay in memory for Rewind
// until the queue itself is garbage.
package memory

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Config holds the optional settings of a [Queue]. A nil *Config is the same
// as an empty one.
type Config struct {
	// Lane names the ordering domain of a message. Messages with the same name
	// are handed out in the order in which they were published, to one source at
	// a time. A message that is given back goes out again before the later ones
	// of its lane: those that are not out wait for it, and it waits until those
	// that are out are settled or lost. "" means no order towards any other
	// message. The function sees the message as it was passed to Publish, must
	// depend on it alone, and may be called concurrently.
	//
	// Default (nil): ByKey. Others: Unordered, OneLane.
	Lane func(m *broker.Message) string
}

// ByKey is the default of Config.Lane: a lane for every message key. Messages
// without a key, or with an empty one, have no lane.
func ByKey(m *broker.Message) string { return string(m.Key) }

// Unordered is a Config.Lane for a queue without any order: each message is
// handed out when it is due.
func Unordered(*broker.Message) string { return "" }

// OneLane is a Config.Lane that keeps the whole queue in order.
func OneLane(*broker.Message) string { return "all" }

// Queue is an in-process queue that remembers everything. Make it with [New].
// All methods may be called concurrently.
type Queue struct {
	name   string
	laneOf func(*broker.Message) string

	mu       sync.Mutex
	log      []record // every published message, in order
	ids      int64    // broker ids given out, over all passes
	position int64    // the next free position
	sources  map[*Source]struct{}
	lanes    map[string]*lane // the named lanes that hold anything
	ready    heap[*lane]      // lanes whose first pending message can go out, by its place in the log
	delayed  heap[*lane]      // lanes whose first pending message is not due yet, by due time
	stats    Stats
	changed  chan struct{} // closed when something changed; nil while nobody waits
}

// record is a message as it was published, and its lane.
type record struct {
	message *broker.Message
	lane    string
}

// Stats counts what happened to a [Queue]. Ready and InFlight are a state, the
// others only grow.
type Stats struct {
	Published int // messages taken by Publish
	Ready     int // not handed out: nobody asked yet, not due yet, or held up by their lane
	InFlight  int // handed out, not settled and not lost
	Delivered int // hand-overs, first ones and repeated ones
	Acked     int // acks that took effect
	Nacked    int // nacks that took effect
	Lost      int // deliveries lost: source closed or revoked, queue rewound
	Refused   int // acks and nacks that came too late (broker.ErrLost) or twice (broker.ErrSettled) and had no effect
	Rewinds   int // calls of Rewind
}

// New returns an empty queue. The name appears in the messages' ID and Source
// ("memory:NAME"); it should not be empty, and queues that are used together
// should have different names. A nil config means the defaults.
func New(name string, config *Config) *Queue {
	q := &Queue{
		name:    name,
		laneOf:  ByKey,
		sources: make(map[*Source]struct{}),
		lanes:   make(map[string]*lane),
		ready:   newHeap(func(a, b *lane) bool { return a.head().place < b.head().place }),
		delayed: newHeap(func(a, b *lane) bool { return a.head().due.Before(b.head().due) }),
	}
	if config != nil && config.Lane != nil {
		q.laneOf = config.Lane
	}
	return q
}

// Publish appends copies of the messages to the queue, in order and without
// anything between them. It fills in what is absent: ID, Source
// ("memory:NAME"), Position (counting from 0, or on from the highest that was
// given) and Time (now). The caller keeps its messages, unchanged. A nil
// message counts as an empty one.
func (q *Queue) Publish(messages ...*broker.Message) {
	records := make([]record, len(messages))
	for i, m := range messages {
		if m == nil {
			m = &broker.Message{}
		}
		c := clone(m)
		records[i] = record{message: c, lane: q.laneOf(c)}
	}
	now := time.Now()

	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range records {
		q.fill(r.message, now)
		q.log = append(q.log, r)
		q.enqueue(len(q.log)-1, r, now)
	}
	q.stats.Published += len(records)
	q.wake()
}

// Rewind delivers everything again from the beginning, as setting a consumer
// group's offsets back does. Each message keeps its Position, Key, Headers,
// Body and Time, but comes with a new ID and with its Attempt starting again
// at 1. Deliveries that are out are lost.
func (q *Queue) Rewind() {
	now := time.Now()

	q.mu.Lock()
	defer q.mu.Unlock()
	for s := range q.sources {
		s.lose()
	}
	clear(q.lanes)
	q.ready.clear()
	q.delayed.clear()
	q.stats.Ready = 0
	q.stats.Rewinds++
	for i, r := range q.log {
		m := *r.message
		m.ID = q.newID()
		r.message = &m
		q.enqueue(i, r, now)
	}
	q.wake()
}

// Source opens a receiving end. Sources of one queue compete: every message
// goes to one of them, and a lane to one at a time. Close it when done.
func (q *Queue) Source() *Source {
	s := &Source{queue: q}

	q.mu.Lock()
	defer q.mu.Unlock()
	s.hold = newHold()
	q.sources[s] = struct{}{}
	return s
}

// Stats returns the counts of this moment.
func (q *Queue) Stats() Stats {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.stats
}

// Drained waits until every message is acked: nothing is ready and nothing is
// in flight. It returns nil then, at once for an empty queue. When ctx ends
// first, the error wraps ctx's error and says what is left.
func (q *Queue) Drained(ctx context.Context) error {
	for {
		q.mu.Lock()
		stats, changed := q.stats, q.change()
		q.mu.Unlock()

		if stats.Ready == 0 && stats.InFlight == 0 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("memory: wait for %q to drain: %d ready, %d in flight: %w", q.name, stats.Ready, stats.InFlight, ctx.Err())
		}
	}
}

// fill completes a message that is being published.
func (q *Queue) fill(m *broker.Message, now time.Time) {
	if m.ID == "" {
		m.ID = q.newID()
	}
	if m.Source == "" {
		m.Source = "memory:" + q.name
	}
	if !m.Position.Known {
		m.Position = broker.At(q.position)
	}
	q.position = max(q.position, m.Position.Offset+1)
	if m.Time.IsZero() {
		m.Time = now
	}
}

// newID counts over all passes, so that a replayed message has another id.
func (q *Queue) newID() string {
	q.ids++
	return fmt.Sprintf("%s#%d", q.name, q.ids)
}

// enqueue makes the message at a place of the log ready.
func (q *Queue) enqueue(place int, r record, now time.Time) {
	l := q.lanes[r.lane]
	if l == nil {
		l = newLane(r.lane)
		if r.lane != "" { // without a name every message is a lane of its own
			q.lanes[r.lane] = l
		}
	}
	l.pending.push(&entry{message: r.message, place: place, lane: l})
	q.stats.Ready++
	q.place(l, now)
}

// place puts a lane where it belongs after anything about it changed.
func (q *Queue) place(l *lane, now time.Time) {
	q.ready.remove(l)
	q.delayed.remove(l)
	switch {
	case l.empty():
		delete(q.lanes, l.name)
	case !l.open():
	case l.head().due.After(now):
		q.delayed.push(l)
	default:
		q.ready.push(l)
	}
}

// take hands out up to limit messages to s, the oldest first.
func (q *Queue) take(s *Source, limit int, now time.Time) []*broker.Delivery {
	for q.delayed.len() > 0 && !q.delayed.top().head().due.After(now) {
		q.place(q.delayed.top(), now)
	}
	var deliveries []*broker.Delivery
	var foreign []*lane // lanes that another source is working on
	for len(deliveries) < limit && q.ready.len() > 0 {
		l := q.ready.top()
		if l.heldByOther(s.hold) {
			q.ready.remove(l)
			foreign = append(foreign, l)
			continue
		}
		e := l.handOut(s.hold)
		q.stats.Ready--
		q.stats.InFlight++
		q.stats.Delivered++
		q.place(l, now)
		deliveries = append(deliveries, q.delivery(e, s.hold))
	}
	for _, l := range foreign {
		q.ready.push(l)
	}
	return deliveries
}

func (q *Queue) delivery(e *entry, h *hold) *broker.Delivery {
	lane := ""
	if e.lane.name != "" {
		lane = q.name + "/" + e.lane.name
	}
	d := broker.NewDelivery(h.ctx, e.message, lane, &settler{queue: q, entry: e, hold: h})
	d.Attempt, d.Recall = e.attempt, h.recall
	return d
}

// giveBack makes a message that was out ready again.
func (q *Queue) giveBack(e *entry, due, now time.Time) {
	e.lane.takeBack(e, due)
	q.stats.InFlight--
	q.stats.Ready++
	q.place(e.lane, now)
}

// due returns when the first delayed message is due.
func (q *Queue) due() (time.Time, bool) {
	if q.delayed.len() == 0 {
		return time.Time{}, false
	}
	return q.delayed.top().head().due, true
}

// change returns a channel that is closed at the next change.
func (q *Queue) change() <-chan struct{} {
	if q.changed == nil {
		q.changed = make(chan struct{})
	}
	return q.changed
}

func (q *Queue) wake() {
	if q.changed != nil {
		close(q.changed)
		q.changed = nil
	}
}

// clone copies everything that a caller could change later. It keeps the
// difference between nil and empty.
func clone(m *broker.Message) *broker.Message {
	c := *m
	c.Key = bytes.Clone(m.Key)
	c.Body = bytes.Clone(m.Body)
	c.Headers = slices.Clone(m.Headers)
	for i := range c.Headers {
		c.Headers[i].Value = bytes.Clone(c.Headers[i].Value)
	}
	return &c
}
