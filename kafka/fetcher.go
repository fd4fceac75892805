package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol/listoffsets"

	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

const (
	// pauseNotice is how long a partition waits for room before that is an event.
	pauseNotice = 5 * time.Second
	// idleConn is how long a connection is kept that nothing is fetched over.
	idleConn = time.Minute
	// accessGrace is how long a refused permission is retried: they come and go
	// while somebody edits them.
	accessGrace = 30 * time.Second
	// endConfirm and endLooks are for how long, and how often at least, an offset
	// must be beyond the end of the log: a broker that just became the leader may
	// know less than the one before.
	endConfirm = 5 * time.Second
	endLooks   = 3
)

// errStopped ends a fetcher because a policy says so; the source knows why.
var errStopped = errors.New("stopped by policy")

// fetcher fetches one partition into the ledger, over a connection of its own.
type fetcher struct {
	*session
	part     *partition
	start    start
	started  bool
	ours     bool          // what was fetched belongs to the topic of the current id
	epoch    int32         // of the leader that wrote what was fetched last; -1 when unknown
	checked  bool          // the leader's log has what was fetched
	restarts chan struct{} // holds a token when the topic was created anew

	size    fetchSize
	conn    *wire.Conn
	stale   time.Time // what is known about the leader must be newer
	backoff retry.Backoff
	trouble retry.Trouble
	beyond  []time.Time // when the offset was beyond the end, in a row

	pauseAt     time.Time // when the last pause was logged
	pauseLogged bool      // the one that lasts
}

// start says where a partition begins.
type start struct {
	committed int64 // -1 for none
	epoch     int32 // of the leader that wrote what is before it; -1 when unknown
	ours      bool  // the offset belongs to the topic that is read
	foreign   bool  // the offset belongs to a topic that is gone
	cut       bool  // the log was cut back to where it agrees with what was fetched
	agrees    int64 // up to there, if cut
}

func newFetcher(s *session, p *partition, at start) *fetcher {
	return &fetcher{
		session: s, part: p, start: at, epoch: -1, restarts: make(chan struct{}, 1),
		size:    fetchSize{most: s.cfg.FetchBytes, share: s.share, expand: guessExpand},
		backoff: retry.Backoff{Most: s.cfg.MaxBackoff},
		trouble: newTrouble(s.log.With("partition", p.topicPartition.String()), "fetch"),
	}
}

// askRestart makes the partition begin anew, at the earliest offset. It does not
// block.
func (f *fetcher) askRestart() {
	select {
	case f.restarts <- struct{}{}:
	default:
	}
}

// run fetches until ctx ends.
func (f *fetcher) run(ctx context.Context) {
	defer f.disconnect()
	for ctx.Err() == nil {
		err := f.step(ctx)
		switch {
		case ctx.Err() != nil || errors.Is(err, errStopped):
			return
		case err == nil:
			f.recovered(ctx)
		default:
			f.failed(ctx, err)
			f.backoff.Sleep(ctx)
		}
	}
}

// step does the next thing there is to do.
func (f *fetcher) step(ctx context.Context) error {
	select {
	case <-f.restarts:
		f.start = start{committed: f.start.committed, epoch: -1, foreign: true}
		f.started = false
	default:
	}
	if !f.started {
		return f.begin(ctx)
	}
	size, memory := f.size.ask()
	next, free, ok := f.waitRoom(ctx, memory)
	if !ok {
		return nil
	}
	conn, err := f.connect(ctx)
	if err != nil {
		return err
	}
	if !f.checked {
		if err := f.checkCut(ctx, conn, next); err != nil || !f.started {
			return err
		}
		f.checked = true
	}
	res, err := conn.Fetch(ctx, &wire.FetchRequest{
		Topic: f.part.topic, Partition: f.part.id, Offset: next,
		MaxBytes:  int32(size), //nolint:gosec // at most maxFetchBytes
		MaxMemory: free, MaxWait: f.cfg.FetchWait,
		Committed: f.cfg.Isolation == ReadCommitted,
	})
	if err != nil {
		return err
	}
	if errors.Is(res.Err, kafkago.OffsetOutOfRange) {
		return f.outOfRange(ctx, conn, next)
	}
	if res.Err != nil {
		return res.Err
	}
	records := make([]*record, len(res.Records))
	for i := range res.Records {
		f.cfg.Framing.strip(&res.Records[i])
		records[i] = f.part.newRecord(&res.Records[i])
	}
	f.size.learn(res.Wire, res.Memory)
	f.beyond = nil
	if res.Epoch >= 0 && res.Epoch != f.epoch {
		f.epoch = res.Epoch
		f.ledger.setEpoch(f.part, res.Epoch)
	}
	f.ledger.add(f.part, records, res.Next, res.HighWatermark)
	return nil
}

// begin finds out where to begin and does.
func (f *fetcher) begin(ctx context.Context) error {
	note := f.ids.note(f.part.topic)
	offset, committed := f.start.committed, f.start.committed
	f.epoch, f.ours = f.start.epoch, true
	switch {
	case f.start.cut:
		offset, committed, f.epoch = f.start.agrees, -1, -1
	case offset < 0 || f.start.foreign:
		conn, err := f.connect(ctx)
		if err != nil {
			return err
		}
		var when int64 = earliest
		if f.cfg.Start == StartLatest && !f.start.foreign && !f.ids.added(f.part.topicPartition) {
			when = latest
		}
		if offset, err = f.listOffset(ctx, conn, when, f.cfg.Isolation); err != nil {
			return err
		}
		committed, f.epoch = -1, -1
	default:
		f.ours = f.start.ours
	}
	f.ledger.begin(f.part, offset, committed, note)
	f.ledger.setEpoch(f.part, f.epoch)
	if !f.ours {
		f.ledger.renote(f.part) // so that a re-creation shows, even if nothing is ever done here
	}
	f.started, f.checked = true, f.epoch < 0
	return nil
}

// checkCut asks a leader that was not asked before whether its log still has what
// was fetched. One that was elected uncleanly, or has lost its disk, may not; new
// records then take the places of those that are gone, and the offsets alone do
// not show it.
func (f *fetcher) checkCut(ctx context.Context, conn *wire.Conn, next int64) error {
	end, err := conn.EpochEnd(ctx, f.part.topic, f.part.id, f.epoch)
	if err != nil || end < 0 || end >= next {
		return err
	}
	// A topic that was created anew is no log that was cut back: nothing of it was
	// read, and nothing of it may be skipped.
	m, err := f.cluster.metadata(ctx, time.Now())
	if err != nil {
		return err
	}
	topic := m.Topics[f.part.topic]
	if topic.Err != nil {
		return topic.Err
	}
	current := f.ids.current(f.part.topic)
	reset := ResetError{Topic: f.part.topic, Partition: f.part.id, Reason: ResetCut, Offset: next, End: end}
	again := start{committed: f.start.committed, epoch: -1, foreign: true}
	switch {
	case topic.ID != current && f.cfg.WatchInterval > 0:
		return errors.New("the topic may have been created anew, to be confirmed") // by the watcher
	case topic.ID != current:
		reset.Reason, reset.End = ResetRecreated, -1
	case f.ours && current != (wire.TopicID{}):
		again = start{committed: f.start.committed, epoch: -1, cut: true, agrees: end}
	}
	if !f.reset(ctx, reset) {
		return errStopped
	}
	f.start = again
	f.started = false
	return nil
}

// outOfRange finds out why an offset is not in the log.
func (f *fetcher) outOfRange(ctx context.Context, conn *wire.Conn, offset int64) error {
	first, err := f.listOffset(ctx, conn, earliest, ReadUncommitted)
	if err != nil {
		return err
	}
	last, err := f.listOffset(ctx, conn, latest, ReadUncommitted)
	if err != nil {
		return err
	}
	switch {
	case offset < first:
		f.beyond = nil
		return f.gap(ctx, GapError{Topic: f.part.topic, Partition: f.part.id, From: offset, To: first})
	case offset > last:
		return f.beyondEnd(ctx, offset, last)
	}
	return kafkago.OffsetOutOfRange // in range again: the log moved meanwhile
}

func (f *fetcher) gap(ctx context.Context, gap GapError) error {
	f.counters.gapped(&gap)
	f.log.ErrorContext(ctx, "kafka: messages are gone before they were handled",
		"partition", f.part.topicPartition.String(), "from", gap.From, "to", gap.To, "count", gap.Count())
	emit(f.cfg.Hooks, func(h OnGap) { h.OnGap(hookContext(ctx), gap) })
	if f.cfg.OnGap == GapStop {
		f.fail(&gap)
		return errStopped
	}
	f.ledger.skip(f.part, gap.To)
	return nil
}

// beyondEnd acts when the offset has been beyond the end for long enough.
func (f *fetcher) beyondEnd(ctx context.Context, offset, last int64) error {
	f.beyond = append(f.beyond, time.Now())
	if len(f.beyond) < endLooks || time.Since(f.beyond[0]) < endConfirm {
		return fmt.Errorf("offset %d is beyond the end of the log, %d: %w", offset, last, kafkago.OffsetOutOfRange)
	}
	f.beyond = nil
	reset := ResetError{Topic: f.part.topic, Partition: f.part.id, Reason: ResetBeyondEnd, Offset: offset, End: last}
	if !f.reset(ctx, reset) {
		return errStopped
	}
	f.start = start{committed: offset, epoch: -1, foreign: true}
	f.started = false
	return nil
}

// The times that stand for the ends of a log.
const (
	earliest = -2
	latest   = -1
)

func (f *fetcher) listOffset(ctx context.Context, conn *wire.Conn, when int64, isolation Isolation) (int64, error) {
	offsets, err := listOffsets(ctx, conn, []topicPartition{f.part.topicPartition}, when, isolation)
	return offsets[f.part.topicPartition], err
}

// listOffsets returns where the logs begin or end of which conn's broker is the
// leader. With an error the others are there all the same.
func listOffsets(ctx context.Context, conn *wire.Conn, tps []topicPartition, when int64, isolation Isolation) (map[topicPartition]int64, error) {
	req := &listoffsets.Request{ReplicaID: -1}
	if isolation == ReadCommitted {
		req.IsolationLevel = 1
	}
	for topic, ids := range byTopic(tps) {
		t := listoffsets.RequestTopic{Topic: topic}
		for _, id := range ids {
			t.Partitions = append(t.Partitions, listoffsets.RequestPartition{Partition: id, CurrentLeaderEpoch: -1, Timestamp: when})
		}
		req.Topics = append(req.Topics, t)
	}
	res, err := conn.RoundTrip(ctx, req)
	if err != nil {
		return nil, err
	}
	offsets := make(map[topicPartition]int64, len(tps))
	for _, t := range res.(*listoffsets.Response).Topics {
		for _, p := range t.Partitions {
			tp := topicPartition{t.Topic, p.Partition}
			if p.ErrorCode != 0 {
				err = fmt.Errorf("find the ends of the log of %s: %w", tp, kafkago.Error(p.ErrorCode))
				continue
			}
			offsets[tp] = p.Offset
		}
	}
	for _, tp := range tps {
		if _, ok := offsets[tp]; !ok && err == nil {
			err = fmt.Errorf("find the ends of the log: the answer lacks %s", tp)
		}
	}
	return offsets, err
}

// waitRoom waits until there is room for what a fetch will bring, and returns
// the offset to fetch from and how much room there is. It returns false when
// there is something else to do.
func (f *fetcher) waitRoom(ctx context.Context, memory int) (next int64, free int, ok bool) {
	if next, free, ok = f.ledger.position(f.part, f.share, memory); ok {
		return next, free, true
	}
	began := time.Now()
	notice := time.NewTimer(pauseNotice)
	defer notice.Stop()
	idle := time.NewTimer(idleConn)
	defer idle.Stop()
	paused := false
	for !ok {
		select {
		case <-ctx.Done():
			return 0, 0, false
		case <-f.restarts:
			f.askRestart() // for step
			return 0, 0, false
		case <-f.part.room:
		case <-notice.C:
			paused = true
			f.notePause(ctx, PauseEvent{Topic: f.part.topic, Partition: f.part.id, Paused: true, For: time.Since(began)})
		case <-idle.C:
			f.disconnect() // the broker would, without telling
		}
		next, free, ok = f.ledger.position(f.part, f.share, memory)
	}
	if paused {
		f.notePause(ctx, PauseEvent{Topic: f.part.topic, Partition: f.part.id, For: time.Since(began)})
	}
	return next, free, true
}

func (f *fetcher) notePause(ctx context.Context, e PauseEvent) {
	f.ledger.note(f.part, nil, e.Paused)
	f.logPause(ctx, e)
	emit(f.cfg.Hooks, func(h OnPause) { h.OnPause(hookContext(ctx), e) })
}

// logPause logs a pause, and that it is over. A partition whose work goes slowly
// pauses again and again; that is logged every now and then.
func (f *fetcher) logPause(ctx context.Context, e PauseEvent) {
	name := f.part.topicPartition.String()
	switch {
	case e.Paused && time.Since(f.pauseAt) >= retry.RemindEvery:
		f.pauseAt, f.pauseLogged = time.Now(), true
		f.log.InfoContext(ctx, "kafka: fetching is paused, there is no room for more", "partition", name)
	case !e.Paused && f.pauseLogged:
		f.pauseLogged = false
		f.log.InfoContext(ctx, "kafka: fetching goes on", "partition", name, "after", e.For.Round(time.Millisecond))
	}
}

// connect returns the connection to the partition's leader.
func (f *fetcher) connect(ctx context.Context) (*wire.Conn, error) {
	if f.conn != nil {
		return f.conn, nil
	}
	address, err := f.cluster.leader(ctx, f.part.topicPartition, f.stale)
	if err != nil {
		return nil, err
	}
	f.conn, err = f.cluster.dialer.Connect(ctx, address)
	return f.conn, err
}

func (f *fetcher) disconnect() {
	if f.conn != nil {
		f.conn.Close()
		f.conn = nil
	}
	f.checked = f.epoch < 0
}

func (f *fetcher) recovered(ctx context.Context) {
	f.backoff.Reset()
	if f.trouble.Tries() > 0 {
		f.ledger.note(f.part, nil, false)
		f.reconnected(ctx, &f.trouble, f.part.topicPartition.String())
	}
}

// failed makes the next step find the leader again.
func (f *fetcher) failed(ctx context.Context, err error) {
	f.disconnect()
	f.stale = time.Now()
	f.counters.fetchErrors.Add(1)
	f.ledger.note(f.part, err, false)
	n := f.trouble.Note(ctx, err)
	emit(f.cfg.Hooks, func(h OnReconnect) {
		h.OnReconnect(hookContext(ctx), ReconnectEvent{What: f.part.topicPartition.String(), Attempt: n, Err: err})
	})
	if errors.Is(err, kafkago.TopicAuthorizationFailed) && f.trouble.Lasts() > accessGrace {
		f.fail(fmt.Errorf("kafka: topic %q: %w to read: %w", f.part.topic, ErrForbidden, err))
	}
}
