// Package lanes keeps received items until they are done, and hands them to
// workers so that items of one lane are worked on one at a time and in order.
package lanes

import (
	"context"
	"slices"
	"sync"
	"time"
)

// Limits bound what a Queue holds, waiting or taken. Zero: no bound.
type Limits struct {
	Items int
	Bytes int64
}

// Queue holds items in lanes. A lane is ready when it has items, none of them
// is taken, and it does not wait out a delay. All methods may be called
// concurrently.
type Queue[T any] struct {
	limits  Limits
	workers int
	end     func(T) context.Context

	mu      sync.Mutex
	changed *sync.Cond // ready, held, bytes or closed changed
	lanes   map[string]*lane[T]
	ready   []*lane[T] // in the order in which they became ready
	delayed map[*lane[T]]struct{}
	waiting int // items in ready lanes
	held    int
	bytes   int64
	first   *Item[T] // of all items, in the order in which they were put
	last    *Item[T]
	largest int64 // of the items seen lately
	closed  bool
}

type lane[T any] struct {
	name  string
	items []*Item[T] // not taken
	busy  bool
	timer *time.Timer // set while the lane waits out a delay
	watch func() bool // stops watching the head's end, while timer is set
}

// Item is a value in the queue. What is to become of a taken item is said by
// Keep and Delay before it is given to Finish.
type Item[T any] struct {
	Value T

	// Keep puts the item back at the front of its lane.
	Keep bool
	// Delay is how long its lane waits before the item is handed out again.
	Delay time.Duration
	// Alone hands a kept item out by itself the next time.
	Alone bool

	lane *lane[T]
	size int64

	since          time.Time
	before, behind *Item[T]
}

// New returns an empty queue for a number of workers. An item whose end has come
// need not wait out its lane's delay, because it is going to be dropped.
func New[T any](workers int, limits Limits, end func(T) context.Context) *Queue[T] {
	q := &Queue[T]{limits: limits, workers: max(workers, 1), end: end,
		lanes: map[string]*lane[T]{}, delayed: map[*lane[T]]struct{}{}}
	q.changed = sync.NewCond(&q.mu)
	return q
}

// Put appends v to a lane; "" is a lane of its own. It does not block: callers
// ask Room first. After Close it reports false and takes nothing.
func (q *Queue[T]) Put(name string, v T, size int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return false
	}
	l := q.lanes[name]
	if l == nil || name == "" {
		l = &lane[T]{name: name}
		if name != "" {
			q.lanes[name] = l
		}
	}
	it := &Item[T]{Value: v, lane: l, size: int64(size), since: time.Now()}
	l.items = append(l.items, it)
	q.hold(it)
	q.largest = max(q.largest-q.largest/64, int64(size)) // It fades: one giant does not count for ever.
	switch {
	case l.busy, l.timer != nil:
	case len(l.items) == 1:
		q.setReady(l)
	default:
		q.waiting++
	}
	q.changed.Broadcast()
	return true
}

// Room waits until there is room and returns for how many items. It returns
// false when ctx ended or the queue is closed.
func (q *Queue[T]) Room(ctx context.Context) (int, bool) {
	defer context.AfterFunc(ctx, q.broadcast)()
	q.mu.Lock()
	defer q.mu.Unlock()
	for {
		if ctx.Err() != nil || q.closed {
			return 0, false
		}
		const unbounded = 1 << 20
		room := unbounded
		if q.limits.Items > 0 {
			room = q.limits.Items - q.held
		}
		if q.limits.Bytes > 0 {
			room = min(room, q.roomByBytes())
		}
		if room > 0 {
			return room, true
		}
		q.changed.Wait()
	}
}

// roomByBytes is for how many items there is room if all are as large as the
// largest one seen; at least one while there is any room.
func (q *Queue[T]) roomByBytes() int {
	left := q.limits.Bytes - q.bytes
	switch {
	case left <= 0:
		return 0
	case q.largest == 0:
		return 1 // Nothing is known yet.
	}
	return int(max(left/q.largest, 1))
}

// Take waits for ready lanes and takes items from their fronts: at most limit,
// an item marked Alone by itself, and no more than this worker's share of what is ready, so that one worker
// does not take what others could work on now. It returns nil when ctx ended or
// the queue is closed. The items must be given back with Finish.
func (q *Queue[T]) Take(ctx context.Context, limit int) []*Item[T] {
	defer context.AfterFunc(ctx, q.broadcast)()
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(q.ready) == 0 {
		if ctx.Err() != nil || q.closed {
			return nil
		}
		q.changed.Wait()
	}
	if ctx.Err() != nil || q.closed {
		return nil
	}
	sharers := min(q.workers, len(q.ready)) // A lane is never worked on by two.
	share := (q.waiting + sharers - 1) / sharers
	limit = max(1, min(limit, share))
	taken := make([]*Item[T], 0, limit)
	var later []*lane[T] // ready, but not to be mixed with what is taken
	for len(taken) < limit && len(q.ready) > 0 {
		l := q.ready[0]
		q.ready = q.ready[1:]
		alone := l.items[0].Alone
		if alone && len(taken) > 0 {
			later = append(later, l)
			continue
		}
		q.waiting -= len(l.items)
		n := min(limit-len(taken), len(l.items))
		if alone {
			n, limit = 1, 1
			l.items[0].Alone = false
		}
		taken = append(taken, l.items[:n]...)
		clear(l.items[:n])
		l.items = l.items[n:]
		l.busy = true
	}
	if len(later) > 0 {
		q.ready = append(later, q.ready...)
	}
	return taken
}

// Finish gives taken items back: those with Keep to the front of their lanes,
// the others are gone. All items of a lane that one Take returned must come in
// one Finish, in their order; then the lane is free.
func (q *Queue[T]) Finish(items []*Item[T]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for len(items) > 0 {
		l := items[0].lane
		n := 1
		for n < len(items) && items[n].lane == l {
			n++
		}
		q.finishLane(l, items[:n])
		items = items[n:]
	}
	q.changed.Broadcast()
}

func (q *Queue[T]) finishLane(l *lane[T], items []*Item[T]) {
	var kept []*Item[T]
	for _, it := range items {
		if it.Keep && !q.closed {
			kept = append(kept, it)
			continue
		}
		q.release(it)
	}
	l.busy = false
	if len(kept) > 0 {
		l.items = append(kept, l.items...)
	}
	if q.closed {
		return
	}
	delay := time.Duration(0)
	for i, it := range kept {
		if i == 0 {
			delay = it.Delay
		}
		it.Keep, it.Delay = false, 0
	}
	if delay <= 0 {
		q.setReady(l)
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(delay, func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if l.timer == timer {
			q.wake(l)
		}
	})
	l.timer = timer
	q.delayed[l] = struct{}{}
	l.watch = context.AfterFunc(q.end(kept[0].Value), func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		if l.timer == timer {
			q.wake(l)
		}
	})
}

// wake ends a lane's delay.
func (q *Queue[T]) wake(l *lane[T]) {
	l.stopWaiting()
	delete(q.delayed, l)
	if !q.closed {
		q.setReady(l)
		q.changed.Broadcast()
	}
}

// stopWaiting ends a lane's timer and what watches over it.
func (l *lane[T]) stopWaiting() {
	l.timer.Stop()
	l.watch()
	l.timer, l.watch = nil, nil
}

// setReady makes a free lane ready, or forgets it when it is empty.
func (q *Queue[T]) setReady(l *lane[T]) {
	if len(l.items) == 0 {
		if l.name != "" {
			delete(q.lanes, l.name)
		}
		return
	}
	q.ready = append(q.ready, l)
	q.waiting += len(l.items)
}

// Remove takes out the items that are not taken and for which match is true, and
// returns them, those of a lane in their order. match must not call the queue.
func (q *Queue[T]) Remove(match func(T) bool) []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	var removed []T
	remove := func(l *lane[T]) {
		l.items = slices.DeleteFunc(l.items, func(it *Item[T]) bool {
			if !match(it.Value) {
				return false
			}
			removed = append(removed, it.Value)
			q.release(it)
			return true
		})
	}
	ready := q.ready
	q.ready, q.waiting = nil, 0
	for _, l := range ready {
		remove(l)
		q.setReady(l)
	}
	for l := range q.delayed {
		head := l.items[0]
		if remove(l); len(l.items) == 0 || l.items[0] != head {
			q.wake(l) // The delay was for an item that is gone.
		}
	}
	for _, l := range q.lanes {
		if l.busy {
			remove(l)
		}
	}
	q.changed.Broadcast()
	return removed
}

// Close ends the queue and returns the items that are not taken. Take and Room
// return from then on, and Finish keeps nothing. A second Close returns nil.
func (q *Queue[T]) Close() []T {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil
	}
	q.closed = true
	var rest []T
	collect := func(l *lane[T]) {
		for _, it := range l.items {
			rest = append(rest, it.Value)
			q.release(it)
		}
		l.items = nil
	}
	for l := range q.delayed {
		l.stopWaiting()
		collect(l)
	}
	for _, l := range q.ready {
		collect(l)
	}
	for _, l := range q.lanes {
		collect(l)
	}
	q.ready, q.waiting = nil, 0
	clear(q.lanes)
	clear(q.delayed)
	q.changed.Broadcast()
	return rest
}

// Held returns how many items and bytes the queue holds, taken ones included.
func (q *Queue[T]) Held() (int, int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.held, q.bytes
}

// Oldest returns when the oldest item was put, of all that the queue holds, taken
// ones included; false when it holds none.
func (q *Queue[T]) Oldest() (time.Time, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.first == nil {
		return time.Time{}, false
	}
	return q.first.since, true
}

// hold counts a new item.
func (q *Queue[T]) hold(it *Item[T]) {
	q.held++
	q.bytes += it.size
	it.before = q.last
	if q.last == nil {
		q.first = it
	} else {
		q.last.behind = it
	}
	q.last = it
}

// release forgets an item that is gone.
func (q *Queue[T]) release(it *Item[T]) {
	q.held--
	q.bytes -= it.size
	if it.before == nil {
		q.first = it.behind
	} else {
		it.before.behind = it.behind
	}
	if it.behind == nil {
		q.last = it.before
	} else {
		it.behind.before = it.before
	}
	it.before, it.behind = nil, nil
}

func (q *Queue[T]) broadcast() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.changed.Broadcast()
}
