package rabbitmq

import (
	"slices"
)

// tracker knows which of a growing series of numbers are done: the delivery tags
// of a channel, the offsets of a stream. Numbers are added in their order and are
// done in any order. It is not safe for concurrent use.
//
// What must stay true: upTo is never at or above a number that is not done, and
// never decreases.
type tracker struct {
	entries []tracked
	head    int    // the first that is not done
	left    int    // done ones behind it
	upTo    uint64 // it and all before it are done; 0: none
}

type tracked struct {
	number  uint64
	through uint64 // what was between it and this one is done, and left out
	entry   *entry // nil: nobody knows it, and it is never done
	done    bool
}

// add takes a number in; it tells whether it is beyond all others.
func (t *tracker) add(number uint64, e *entry) bool {
	if number <= t.last() {
		return false
	}
	t.entries = append(t.entries, tracked{number: number, through: number, entry: e})
	return true
}

// last is the highest number that was added.
func (t *tracker) last() uint64 {
	if len(t.entries) == t.head {
		return t.upTo
	}
	return t.entries[len(t.entries)-1].through
}

// done marks a number; it tells whether that was news.
func (t *tracker) done(number uint64) bool {
	open := t.open()
	i, found := slices.BinarySearchFunc(open, number, func(e tracked, n uint64) int {
		switch {
		case e.number < n:
			return -1
		case e.number > n:
			return 1
		}
		return 0
	})
	if !found || open[i].done {
		return false
	}
	open[i].done, open[i].entry = true, nil
	t.left++
	for t.head < len(t.entries) && t.entries[t.head].done {
		t.upTo = t.entries[t.head].through
		t.head++
		t.left--
	}
	if t.head > len(t.entries)/2 { // amortised: each entry moves at most once per halving
		t.entries = append(t.entries[:0], t.entries[t.head:]...)
		t.head = 0
	}
	if t.left > max(len(t.open())/2, fewDone) { // amortised likewise
		t.compact()
	}
	return true
}

// fewDone are not worth to be left out.
const fewDone = 64

// compact leaves out what is done, so that one number that is open for long does not
// keep all that come after it.
func (t *tracker) compact() {
	open := t.open()
	kept := 1 // The first one is not done.
	for _, e := range open[1:] {
		if e.done {
			open[kept-1].through = e.through
			continue
		}
		open[kept] = e
		kept++
	}
	clear(open[kept:])
	t.entries, t.left = t.entries[:t.head+kept], 0
}

// open are the numbers from the first that is not done on.
func (t *tracker) open() []tracked { return t.entries[t.head:] }
