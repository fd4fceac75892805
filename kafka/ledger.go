package kafka

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// ledger holds what one generation of the group has been given: its
// partitions, the records that wait, those that are out, and what is done. It
// does no input or output. Its methods may be called concurrently.
//
// A generation's ledger is open, then draining (nothing more is handed out, what
// is out can be settled), then over (everything that is out is lost).
type ledger struct {
	maxAhead    int64 // 0: no bound
	commitCount int   // 0: never kick
	lanes       LaneBy

	wake  func()        // there may be something to take
	kick  func()        // there is something to commit, now
	stale func(*record) // a settling came too late

	mu         sync.Mutex
	state      ledgerState
	partitions []*partition
	turn       int           // the partition that is served first next time
	waiting    laneHeap      // open lanes with records that were given back
	out        int           // deliveries that are out
	acked      int           // since the last commit
	recall     chan struct{} // closed when draining begins
	drained    chan struct{}
	isDrained  bool
}

type ledgerState int

const (
	open ledgerState = iota
	draining
	over
)

// topicPartition names a partition.
type topicPartition struct {
	topic string
	id    int32
}

func (tp topicPartition) String() string { return tp.topic + "/" + strconv.Itoa(int(tp.id)) }

// partition is an assigned partition; guarded by the ledger's mutex.
type partition struct {
	topicPartition
	name   string // of its lane
	source string // Message.Source
	ledger *ledger

	run       *run // nil until it is known where to begin
	tracker   tracker
	queue     []*record // fetched, not handed out, by offset
	lanes     map[string]*lane
	bytes     int           // what queue and lanes hold back
	waiting   int           // records that queue and lanes hold back
	out       int           // deliveries that are out
	committed int64         // the last committed offset; -1 when unknown
	epoch     int32         // of the leader that wrote what was fetched last; -1 when unknown
	end       int64         // the broker's high watermark; -1 when unknown
	endAt     time.Time     // when the broker told it
	room      chan struct{} // gets a token when fetching may go on
	trouble   error         // what keeps it from being fetched
	paused    bool
	gone      bool // its topic was deleted: nobody takes its offsets
	unnoted   bool // the committed offset lacks the run's note
}

// run is a stretch of a partition in which offsets only grow. It ends with the
// generation, or when the partition begins again at the earliest offset.
type run struct {
	ctx    context.Context
	cancel context.CancelFunc
	note   string // what is kept beside its committed offsets
	over   bool   // guarded by the ledger's mutex
}

func newRun(note string) *run {
	r := &run{note: note}
	r.ctx, r.cancel = context.WithCancel(context.Background())
	return r
}

// record is a fetched record.
type record struct {
	message *broker.Message
	lane    string
	size    int
	part    *partition
	run     *run
	seq     int64
	due     time.Time // not handed out before; zero: at once
}

// newLedger returns an open ledger.
func newLedger(cfg *Config, wake, kick func(), stale func(*record)) *ledger {
	return &ledger{
		maxAhead: int64(cfg.MaxAhead), commitCount: cfg.CommitCount, lanes: cfg.Lanes,
		wake: wake, kick: kick, stale: stale,
		recall: make(chan struct{}), drained: make(chan struct{}),
	}
}

// assign adds a partition. It is called before anything else.
func (l *ledger) assign(tp topicPartition) *partition {
	name := partitionLane(tp.topic, tp.id)
	p := &partition{
		topicPartition: tp, name: name, source: "kafka:" + name, ledger: l,
		lanes: make(map[string]*lane), committed: -1, epoch: -1, end: -1, room: make(chan struct{}, 1),
	}
	l.partitions = append(l.partitions, p)
	return p
}

// begin starts a partition at an offset; what was out of it before is lost.
// committed is what the group has for it, -1 for nothing: then the offset is
// committed even if there is never a record. note is kept beside the offsets.
func (l *ledger) begin(p *partition, offset, committed int64, note string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.drop(p)
	l.lose(p)
	if l.state == over {
		return
	}
	p.run = newRun(note)
	p.tracker = newTracker(offset)
	p.committed, p.unnoted = committed, false
	p.epoch, p.end, p.endAt = -1, -1, time.Time{}
	if committed != offset {
		l.kick()
	}
}

// setEpoch notes the epoch of the leader that wrote what was fetched last. It goes
// with every commit: a leader that does not know it, or for which it ended
// before, shows that its log was cut back.
func (l *ledger) setEpoch(p *partition, epoch int32) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.epoch = epoch
}

// renote commits the partition's offset once more, with the run's note: it was set
// by somebody else, who has left none.
func (l *ledger) renote(p *partition) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.run != nil && p.run.note != "" {
		p.unnoted = true
		l.kick()
	}
}

// add takes in what was fetched; next is where to fetch from next.
func (l *ledger) add(p *partition, records []*record, next, end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != open || p.run == nil {
		return
	}
	for _, r := range records {
		seq, ok := p.tracker.add(r.message.Position.Offset, unixMilli(r.message.Time))
		if !ok {
			continue
		}
		r.part, r.run, r.seq = p, p.run, seq
		p.queue = append(p.queue, r)
		p.bytes += r.size
		p.waiting++
	}
	before := p.tracker.committable()
	p.tracker.advance(next)
	p.end, p.endAt = max(end, p.tracker.next), time.Now()
	if len(records) > 0 {
		l.wake()
	} else if p.tracker.committable() != before {
		l.kick() // only marks and holes came: the end of the lag
	}
}

// unixMilli returns 0 for no time.
func unixMilli(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}

// staleEnds returns the partitions that have begun and whose end is not known
// since the given time.
func (l *ledger) staleEnds(since time.Time) []*partition {
	l.mu.Lock()
	defer l.mu.Unlock()
	var stale []*partition
	for _, p := range l.partitions {
		if p.run != nil && p.endAt.Before(since) {
			stale = append(stale, p)
		}
	}
	return stale
}

// setEnd notes where a partition's log ends, for one that is not fetched.
func (l *ledger) setEnd(p *partition, end int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p.run != nil {
		p.end, p.endAt = max(end, p.tracker.next), time.Now()
	}
}

// take hands out up to limit records: first those that were given back and are
// due, then by turns from every partition. With nothing to hand out it returns
// when something will be due; zero: nothing is waiting for its time.
func (l *ledger) take(limit int) ([]*broker.Delivery, time.Time) {
	now := time.Now()
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != open {
		return nil, time.Time{}
	}
	var deliveries []*broker.Delivery
	for len(deliveries) < limit && len(l.waiting) > 0 && !l.waiting[0].due().After(now) {
		ln := l.waiting[0]
		r := ln.held[0]
		ln.held[0] = nil
		ln.held = ln.held[1:]
		deliveries = append(deliveries, l.handOut(ln, r))
	}
	for idle := 0; len(deliveries) < limit && idle < len(l.partitions); l.turn++ {
		p := l.partitions[l.turn%len(l.partitions)]
		if ln, r := l.fresh(p); r != nil {
			deliveries = append(deliveries, l.handOut(ln, r))
			idle = 0
		} else {
			idle++
		}
	}
	if len(deliveries) == 0 && len(l.waiting) > 0 {
		return nil, l.waiting[0].due()
	}
	return deliveries, time.Time{}
}

// fresh returns the next record of the queue that may go out, and its lane.
func (l *ledger) fresh(p *partition) (*lane, *record) {
	for len(p.queue) > 0 {
		r := p.queue[0]
		if l.tooFarAhead(p) {
			return nil, nil
		}
		p.queue[0] = nil
		p.queue = p.queue[1:]
		ln := p.lanes[r.lane]
		if ln == nil {
			ln = &lane{name: r.lane, part: p, at: -1}
			p.lanes[r.lane] = ln
		}
		if len(ln.held) == 0 {
			return ln, r
		}
		ln.held = append(ln.held, r) // behind one that was given back
	}
	return nil, nil
}

// tooFarAhead tells whether the next record of the queue must wait for the first
// one that is not done.
func (l *ledger) tooFarAhead(p *partition) bool {
	return l.maxAhead > 0 && len(p.queue) > 0 && p.tracker.ahead(p.queue[0].seq) >= l.maxAhead
}

// handOut makes a delivery of a record that waits no more.
func (l *ledger) handOut(ln *lane, r *record) *broker.Delivery {
	p := r.part
	ln.out = append(ln.out, r)
	l.place(ln)
	p.bytes -= r.size
	p.waiting--
	p.out++
	l.out++
	p.makeRoom()
	d := broker.NewDelivery(r.run.ctx, r.message, r.lane, p)
	d.Recall, d.Tag = l.recall, r
	return d
}

// place puts a lane where it belongs after anything about it changed.
func (l *ledger) place(ln *lane) {
	l.waiting.remove(ln)
	switch {
	case ln.empty():
		delete(ln.part.lanes, ln.name)
	case ln.open():
		l.waiting.add(ln)
	}
}

// ack marks a record as done.
func (l *ledger) ack(r *record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.settle(r); err != nil {
		return err
	}
	held := l.tooFarAhead(r.part)
	r.part.tracker.done(r.seq)
	r.part.makeRoom()
	if held && !l.tooFarAhead(r.part) {
		l.wake() // nothing else may come that would
	}
	l.acked++
	if l.commitCount > 0 && l.acked >= l.commitCount {
		l.acked = 0
		l.kick()
	}
	return nil
}

// nack gives a record back to the front of its lane.
func (l *ledger) nack(r *record, delay time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.settle(r); err != nil {
		return err
	}
	if l.state != open {
		return nil // its offset is not committed: it comes again
	}
	r.due = time.Time{}
	if delay > 0 {
		r.due = time.Now().Add(delay)
	}
	p := r.part
	ln := p.lanes[r.lane]
	if ln == nil {
		ln = &lane{name: r.lane, part: p, at: -1}
		p.lanes[r.lane] = ln
	}
	l.waiting.remove(ln) // its due time may change
	ln.held = insertBySeq(ln.held, r)
	l.place(ln)
	p.bytes += r.size
	p.waiting++
	l.wake()
	return nil
}

// settle takes a record off those that are out.
func (l *ledger) settle(r *record) error {
	if r.run.over {
		return broker.ErrLost
	}
	p := r.part
	p.out--
	l.out--
	l.noteDrained()
	if ln := p.lanes[r.lane]; ln != nil {
		ln.out = removeBySeq(ln.out, r)
		held := len(ln.held) > 0
		l.place(ln)
		if held {
			l.wake() // the lane may have opened
		}
	}
	return nil
}

// makeRoom tells the fetcher to look again; the ledger's mutex is held.
func (p *partition) makeRoom() {
	select {
	case p.room <- struct{}{}:
	default:
	}
}

// position returns where to fetch from next, how much room is free of share,
// and whether that is enough for size bytes more. There is always room for
// something when the partition holds nothing.
func (l *ledger) position(p *partition, share, size int) (next int64, free int, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next, free = p.tracker.next, max(share-p.bytes, 1)
	if l.maxAhead > 0 && int64(p.tracker.size()) >= l.maxAhead {
		return next, free, false
	}
	return next, free, p.bytes == 0 || p.bytes+size <= share
}

// skip moves a partition to where its log begins now.
func (l *ledger) skip(p *partition, to int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.tracker.advance(to)
	l.kick()
}

// drain stops handing out and asks for what is out. The returned channel is
// closed when nothing is out any more.
func (l *ledger) drain() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state != open {
		return l.drained
	}
	l.state = draining
	close(l.recall)
	for _, p := range l.partitions {
		l.drop(p)
	}
	l.noteDrained()
	return l.drained
}

// noteDrained closes drained when the last delivery is back.
func (l *ledger) noteDrained() {
	if l.state == draining && l.out == 0 && !l.isDrained {
		l.isDrained = true
		close(l.drained)
	}
}

// end loses what is still out, and returns how much that is.
func (l *ledger) end() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	lost := l.out
	l.state = over
	for _, p := range l.partitions {
		l.drop(p)
		l.lose(p)
	}
	return lost
}

// drop forgets what waits; it is fetched again by whoever gets the partition.
func (l *ledger) drop(p *partition) {
	p.queue = nil
	p.bytes, p.waiting = 0, 0
	for _, ln := range p.lanes {
		ln.held = nil
		l.waiting.remove(ln)
	}
}

// lose ends the partition's run: what is out of it cannot be settled any more.
func (l *ledger) lose(p *partition) {
	if p.run == nil || p.run.over {
		return
	}
	p.run.over = true
	p.run.cancel()
	l.out -= p.out
	p.out = 0
	clear(p.lanes)
	l.noteDrained()
}

// commitItem is an offset that should be committed, or was.
type commitItem struct {
	part   *partition
	run    *run
	offset int64
	epoch  int32 // -1 when unknown
	err    error // the broker's answer for this partition
}

// uncommitted returns the offsets that have moved since they were committed.
func (l *ledger) uncommitted() []commitItem {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acked = 0
	var items []commitItem
	for _, p := range l.partitions {
		if p.run == nil || p.gone {
			continue
		}
		if offset := p.tracker.committable(); offset != p.committed || p.unnoted {
			items = append(items, commitItem{part: p, run: p.run, offset: offset, epoch: p.epoch})
		}
	}
	return items
}

// wasCommitted notes the items that have no error.
func (l *ledger) wasCommitted(items []commitItem) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, it := range items {
		if it.err == nil && it.run == it.part.run {
			it.part.committed, it.part.unnoted = it.offset, false
		}
	}
}

// setGone notes whether a topic was deleted. What is done of it is not committed
// then: it would be refused for ever, and a rebalance and Close wait for commits.
func (l *ledger) setGone(topic string, gone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range l.partitions {
		if p.topic == topic && p.gone != gone {
			p.gone = gone
			l.kick()
		}
	}
}

// note keeps what a fetcher has to say about its partition, for Stats.
func (l *ledger) note(p *partition, trouble error, paused bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p.trouble, p.paused = trouble, paused
}

// newRecord makes a record of what was fetched. The ledger's mutex is not
// needed.
func (p *partition) newRecord(r *wire.Record) *record {
	m := &broker.Message{
		ID:       p.name + "/" + strconv.FormatInt(r.Offset, 10),
		Source:   p.source,
		Position: broker.At(r.Offset),
		Key:      r.Key,
		Headers:  r.Headers,
		Body:     r.Value,
		Time:     r.Time,
	}
	rec := &record{message: m, lane: p.name, size: r.Size()}
	if p.ledger.lanes == LaneByKey {
		rec.lane = keyLane(p.name, r.Key)
	}
	return rec
}
