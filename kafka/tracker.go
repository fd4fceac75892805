package kafka

// tracker knows which records of one partition are done, and so what may be
// committed. Records are added in the order of their offsets, which have
// holes, and are done in any order. It is not safe for concurrent use.
//
// What must stay true: committable is never above the offset of a record that
// is not done, and never decreases.
type tracker struct {
	entries []trackedOffset
	head    int   // the first entry that is not done
	first   int64 // the sequence number of entries[head]
	next    int64 // all offsets below were fetched
}

type trackedOffset struct {
	offset int64
	made   int64 // the record's time in Unix milliseconds; 0: unknown
	done   bool
}

func newTracker(start int64) tracker { return tracker{next: start} }

// add takes a record in and returns its sequence number. An offset that is
// below what was fetched before is refused.
func (t *tracker) add(offset, made int64) (seq int64, ok bool) {
	if offset < t.next {
		return 0, false
	}
	t.entries = append(t.entries, trackedOffset{offset: offset, made: made})
	t.next = offset + 1
	return t.first + int64(len(t.entries)-t.head-1), true
}

// advance says that everything below next was fetched. It never goes back.
func (t *tracker) advance(next int64) { t.next = max(t.next, next) }

// done marks a record; it tells whether that was news.
func (t *tracker) done(seq int64) bool {
	i := seq - t.first
	if i < 0 || i >= int64(t.size()) || t.entries[t.head+int(i)].done {
		return false
	}
	t.entries[t.head+int(i)].done = true
	for t.head < len(t.entries) && t.entries[t.head].done {
		t.head++
		t.first++
	}
	if t.head > len(t.entries)/2 { // amortised: each entry moves at most once per halving
		t.entries = append(t.entries[:0], t.entries[t.head:]...)
		t.head = 0
	}
	return true
}

// committable is the offset that may be committed: the first that is not done,
// or where to fetch from next when all are.
func (t *tracker) committable() int64 {
	if t.size() == 0 {
		return t.next
	}
	return t.entries[t.head].offset
}

// oldest is the time of the first record that is not done, in Unix milliseconds;
// 0 when it is unknown or there is none.
func (t *tracker) oldest() int64 {
	if t.size() == 0 {
		return 0
	}
	return t.entries[t.head].made
}

// size is how many records there are from the first that is not done on.
func (t *tracker) size() int { return len(t.entries) - t.head }

// ahead is how many records lie between the first that is not done and seq.
func (t *tracker) ahead(seq int64) int64 { return seq - t.first }
