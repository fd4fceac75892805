package rabbitmq

import (
	"container/heap"
	"slices"
	"strings"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/internal/lanename"
)

// LaneBy says what the lanes of deliveries are: what is worked on in order. It is
// one of the constants, or made by LaneByHeader.
//
// A queue with several consumers has no order, whatever the lanes: who needs it
// lets one consumer at a time have the queue (Declare.SingleActiveConsumer), or
// gives each key a queue of its own. With lanes, messages that have to go back to
// the broker go back together, see Config.AckTimeout. A quorum queue keeps the order
// of what goes back only while all its consumers have the same Prefetch.
type LaneBy string

// The lanes.
const (
	// LaneNone puts every message into a lane of its own: there is no order.
	LaneNone LaneBy = ""
	// LaneQueue makes one lane of the whole queue.
	LaneQueue LaneBy = "queue"
	// LaneByRoutingKey makes a lane of each routing key.
	LaneByRoutingKey LaneBy = "routing-key"
)

const laneByHeader = "header:"

// LaneByHeader makes a lane of each value of a header of the table. Messages
// without that header have no order: each is a lane of its own.
func LaneByHeader(name string) LaneBy { return LaneBy(laneByHeader + name) }

func (l LaneBy) valid() bool {
	name, byHeader := strings.CutPrefix(string(l), laneByHeader)
	return l == LaneNone || l == LaneQueue || l == LaneByRoutingKey || byHeader && name != ""
}

// laneOf names the lane of a delivery; empty for one of its own. Lanes are
// "QUEUE", "QUEUE/ROUTING-KEY" or "QUEUE/VALUE".
func (l LaneBy) laneOf(queue string, d *amqp.Delivery) string {
	switch l {
	case LaneNone:
		return ""
	case LaneQueue:
		return queue
	case LaneByRoutingKey:
		return lanename.Of(queue, []byte(d.RoutingKey))
	}
	value, ok := d.Headers[strings.TrimPrefix(string(l), laneByHeader)]
	if !ok || value == nil {
		return ""
	}
	return lanename.Of(queue, text(value))
}

// lane is an ordering domain while anything of it is out or was given back.
//
// What must stay true: an entry is handed out only while no later one of its lane
// is out, so that whoever holds several works on them in order.
type lane struct {
	name string   // empty: of one entry
	out  []*entry // handed out and not settled, by tag
	held []*entry // given back, or behind one that was, by tag
	at   int      // index in laneHeap; -1 when it is not there
}

func (l *lane) empty() bool { return len(l.out) == 0 && len(l.held) == 0 }

// open tells whether the first held entry may go out, apart from its due time.
func (l *lane) open() bool {
	if len(l.held) == 0 {
		return false
	}
	return len(l.out) == 0 || l.out[len(l.out)-1].tag < l.held[0].tag
}

// due is when the first held entry may go out.
func (l *lane) due() time.Time { return l.held[0].due }

func byTag(e *entry, tag uint64) int {
	switch {
	case e.tag < tag:
		return -1
	case e.tag > tag:
		return 1
	}
	return 0
}

func insertByTag(entries []*entry, e *entry) []*entry {
	i, _ := slices.BinarySearchFunc(entries, e.tag, byTag)
	return slices.Insert(entries, i, e)
}

func removeByTag(entries []*entry, e *entry) []*entry {
	i, found := slices.BinarySearchFunc(entries, e.tag, byTag)
	if !found {
		return entries
	}
	return slices.Delete(entries, i, i+1)
}

// laneHeap holds the open lanes, the one that is due first on top; the earlier
// entry first among equals.
type laneHeap []*lane

func (h laneHeap) Len() int { return len(h) }

func (h laneHeap) Less(i, j int) bool {
	if order := h[i].due().Compare(h[j].due()); order != 0 {
		return order < 0
	}
	return h[i].held[0].tag < h[j].held[0].tag
}

func (h laneHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].at, h[j].at = i, j
}

// Push implements heap.Interface.
func (h *laneHeap) Push(x any) {
	l := x.(*lane)
	l.at = len(*h)
	*h = append(*h, l)
}

// Pop implements heap.Interface.
func (h *laneHeap) Pop() any {
	last := len(*h) - 1
	l := (*h)[last]
	(*h)[last] = nil
	*h = (*h)[:last]
	l.at = -1
	return l
}

func (h *laneHeap) add(l *lane) { heap.Push(h, l) }

func (h *laneHeap) remove(l *lane) {
	if l.at >= 0 {
		heap.Remove(h, l.at)
	}
}
