package kafka

import (
	"container/heap"
	"slices"
	"strconv"
	"time"

	"github.com/ackafter/ackafter/internal/lanename"
)

// partitionLane names the lane of records without a key: "orders/3".
func partitionLane(topic string, partition int32) string {
	return topic + "/" + strconv.Itoa(int(partition))
}

// keyLane names the lane of a key: "orders/3/A1", see lanename.Of. A nil key goes to
// the partition's lane, an empty one does not.
func keyLane(partitionLane string, key []byte) string {
	if key == nil {
		return partitionLane
	}
	return lanename.Of(partitionLane, key)
}

// lane is an ordering domain of one partition while anything of it is out or
// was given back.
//
// What must stay true: a record is handed out only while no later one of its
// lane is out, so that whoever holds several works on them in order.
type lane struct {
	name string
	part *partition
	out  []*record // handed out and not settled, by offset
	held []*record // given back, or behind one that was, by offset
	at   int       // index in laneHeap; -1 when it is not there
}

func (l *lane) empty() bool { return len(l.out) == 0 && len(l.held) == 0 }

// open tells whether the first held record may go out, apart from its due time.
func (l *lane) open() bool {
	if len(l.held) == 0 {
		return false
	}
	return len(l.out) == 0 || l.out[len(l.out)-1].seq < l.held[0].seq
}

// due is when the first held record may go out.
func (l *lane) due() time.Time { return l.held[0].due }

func bySeq(r *record, seq int64) int {
	switch {
	case r.seq < seq:
		return -1
	case r.seq > seq:
		return 1
	}
	return 0
}

func insertBySeq(records []*record, r *record) []*record {
	i, _ := slices.BinarySearchFunc(records, r.seq, bySeq)
	return slices.Insert(records, i, r)
}

func removeBySeq(records []*record, r *record) []*record {
	i, found := slices.BinarySearchFunc(records, r.seq, bySeq)
	if !found {
		return records
	}
	return slices.Delete(records, i, i+1)
}

// laneHeap holds the open lanes, the one that is due first on top.
type laneHeap []*lane

func (h laneHeap) Len() int           { return len(h) }
func (h laneHeap) Less(i, j int) bool { return h[i].due().Before(h[j].due()) }

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
