package kafka

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/internal/retry"
)

// session is one generation of the group: what was assigned, and the goroutines
// that fetch, commit and watch. It is over before the group is joined again.
type session struct {
	*Source
	id        epoch
	ledger    *ledger
	committer *committer
	commits   retry.Trouble // of the goroutine that commits
	fetchers  []*fetcher
	share     int            // of Config.BufferBytes, for each partition
	shared    map[string]int // partitions by topic that this member, as the leader, has shared out; nil when it was not
	over      once           // the broker says that the generation is over
	rejoin    once           // the group has to be joined again
	recreated []string       // topics that were created anew since the last generation
}

// once is a signal that is given at most once.
type once struct {
	do sync.Once
	c  chan struct{}
}

func (o *once) signal() { o.do.Do(func() { close(o.c) }) }

// given tells whether the signal was given.
func (o *once) given() bool {
	select {
	case <-o.c:
		return true
	default:
		return false
	}
}

// assignment returns the partitions of a generation, in order.
func assignment(gen *kafkago.Generation) []topicPartition {
	var tps []topicPartition
	for topic, ps := range gen.Assignments {
		for _, p := range ps {
			tps = append(tps, topicPartition{topic, int32(p.ID)}) //nolint:gosec // it was one on the wire
		}
	}
	slices.SortFunc(tps, func(a, b topicPartition) int {
		if a.topic != b.topic {
			return strings.Compare(a.topic, b.topic)
		}
		return int(a.id - b.id)
	})
	return tps
}

func newSession(s *Source, gen *kafkago.Generation, tps []topicPartition) *session {
	se := &session{
		Source: s, id: epoch{gen.ID, gen.MemberID},
		over: once{c: make(chan struct{})}, rejoin: once{c: make(chan struct{})},
		share:   max(s.cfg.BufferBytes/max(len(tps), 1), 1),
		commits: newTrouble(s.log, "commit offsets"),
	}
	se.committer = &committer{
		interval: s.cfg.CommitInterval, backoff: retry.Backoff{Most: s.cfg.MaxBackoff}, kicked: make(chan struct{}, 1),
		send: func(ctx context.Context, items []commitItem) error {
			return s.coordinator.commit(ctx, se.id, items)
		},
		failed: se.commitFailed,
		done:   se.commitWorked,
	}
	se.ledger = newLedger(s.cfg, s.wake, se.committer.kick, s.staleAck)
	se.committer.ledger = se.ledger
	for _, tp := range tps {
		se.ledger.assign(tp)
	}
	return se
}

// run works until ctx ends because the source closes, revoked ends, or the
// generation turns out to be over; then it settles what can be settled. When it
// returns, nothing of it runs any more and everything that is out of it is lost.
//
// The library sends no heartbeats once the generation is revoked, so they are
// sent from here until what is done is committed: the coordinator waits for a
// member for as long as RebalanceTimeout, but only while it hears of it.
func (se *session) run(ctx, revoked context.Context) { //nolint:contextcheck // what is done is committed after ctx has ended
	work, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(revoked, stop)()

	var wg sync.WaitGroup
	wg.Go(func() { se.work(work) })
	commits, stopCommits := context.WithCancel(se.ctx)
	defer stopCommits()
	wg.Go(func() {
		if err := se.committer.run(commits, se.ctx); err != nil {
			se.log.WarnContext(commits, "kafka: the group's generation is over", "generation", se.id.generation, "error", err)
			se.over.signal()
		}
	})
	select {
	case <-ctx.Done():
	case <-revoked.Done():
	case <-se.over.c:
	case <-se.rejoin.c:
	}
	stop()
	began := time.Now()
	drained := se.ledger.drain()
	stopBeats := make(chan struct{})
	var beats sync.WaitGroup
	beats.Go(func() { se.keepAlive(stopBeats) })
	se.waitDrained(ctx, drained)
	// From here on an ack is refused, so that each one that was taken is in what
	// is committed now.
	lost := se.ledger.end()
	drain := time.Since(began)
	stopCommits()
	wg.Wait()
	err := se.lastCommit(began) //nolint:contextcheck // ctx has ended
	close(stopBeats)
	beats.Wait()
	se.revoked(ctx, lost, drain, err)
}

// keepAlive sends heartbeats until stop, or until the member has lost its place.
// One that is under way is not cut off, which would cost the connection.
func (se *session) keepAlive(stop <-chan struct{}) {
	t := time.NewTicker(se.cfg.HeartbeatInterval)
	defer t.Stop()
	bad := newTrouble(se.log, "heartbeat")
	for {
		select {
		case <-stop:
			return
		case <-se.over.c:
			return
		case <-se.ctx.Done():
			return
		case <-t.C:
		}
		err := se.coordinator.heartbeat(se.ctx, se.id)
		switch {
		case err == nil:
			bad.Over(se.ctx)
		case isOver(err):
			se.log.WarnContext(se.ctx, "kafka: the group has given this member up", "generation", se.id.generation, "error", err)
			se.over.signal()
		case se.ctx.Err() == nil:
			bad.Note(se.ctx, err)
		}
	}
}

// work starts the partitions and watches the topics, until ctx ends.
func (se *session) work(ctx context.Context) {
	starts, partitions, err := se.prepare(ctx)
	if err != nil {
		return // ctx has ended, or the source has failed
	}
	se.assigned(ctx)
	var wg sync.WaitGroup
	for i, p := range se.ledger.partitions {
		se.fetchers = append(se.fetchers, newFetcher(se, p, starts[i]))
	}
	for _, f := range se.fetchers {
		wg.Go(func() { f.run(ctx) })
	}
	if se.cfg.LagInterval > 0 {
		wg.Go(func() { newLagMeter(se).run(ctx) })
	}
	if se.cfg.WatchInterval > 0 {
		// A partition that was created since they were shared out has no owner yet.
		if se.shared != nil {
			partitions = se.shared
		}
		w := &watcher{session: se, partitions: partitions, unknown: make(map[string]int)}
		if w.run(ctx) {
			se.rejoin.signal()
		}
	}
	wg.Wait()
}

// prepare finds out where the partitions begin, and how many each topic has. It
// tries until it knows or ctx ends.
func (se *session) prepare(ctx context.Context) ([]start, map[string]int, error) {
	tps := make([]topicPartition, len(se.ledger.partitions))
	for i, p := range se.ledger.partitions {
		tps[i] = p.topicPartition
	}
	wait := retry.Backoff{Most: se.cfg.MaxBackoff}
	bad := newTrouble(se.log, "read the group's offsets")
	var foreign []time.Time // looks in a row at which offsets belonged to other topics
	for {
		starts, partitions, err := se.lookUp(ctx, tps)
		if err == nil && slices.ContainsFunc(starts, func(s start) bool { return s.foreign }) {
			// A broker that lags behind may tell an old id.
			foreign = append(foreign, time.Now())
			if len(foreign) < endLooks || time.Since(foreign[0]) < endConfirm {
				err = errors.New("offsets belong to a topic that was created anew, to be confirmed")
			}
		}
		if err == nil {
			bad.Over(ctx)
			return starts, partitions, se.resetForeign(ctx, tps, starts)
		}
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		bad.Note(ctx, err)
		se.setGroupError(err)
		if bad.Lasts() > accessGrace {
			if denied := se.forbidden(ctx, err); denied != nil {
				se.fail(denied)
			}
		}
		if !wait.Sleep(ctx) {
			return nil, nil, ctx.Err()
		}
	}
}

func (se *session) lookUp(ctx context.Context, tps []topicPartition) ([]start, map[string]int, error) {
	m, err := se.cluster.metadata(ctx, time.Now())
	if err != nil {
		return nil, nil, err
	}
	partitions := make(map[string]int)
	for _, name := range se.topics {
		topic := m.Topics[name]
		partitions[name] = len(topic.Leaders)
		if topic.Err == nil && se.ids.see(name, topic.ID) {
			se.recreated = append(se.recreated, name)
		}
	}
	if len(tps) == 0 {
		return nil, partitions, nil
	}
	committed, err := se.coordinator.committed(ctx, tps)
	if err != nil {
		return nil, nil, err
	}
	starts := make([]start, len(tps))
	for i, tp := range tps {
		c := committed[tp]
		starts[i] = start{committed: c.offset, epoch: c.epoch}
		switch se.ids.owner(tp.topic, c.note) {
		case ours:
			starts[i].ours = true
		case theirs:
			starts[i].foreign = c.offset >= 0
		case unknown:
			starts[i].foreign = slices.Contains(se.recreated, tp.topic)
		}
	}
	return starts, partitions, nil
}

// resetForeign reports the offsets that belong to topics that are gone.
func (se *session) resetForeign(ctx context.Context, tps []topicPartition, starts []start) error {
	for i, s := range starts {
		if !s.foreign {
			continue
		}
		e := ResetError{Topic: tps[i].topic, Partition: tps[i].id, Reason: ResetRecreated, Offset: s.committed, End: -1}
		if !se.reset(ctx, e) {
			return errStopped
		}
	}
	return nil
}

// restart makes the partitions of a topic begin anew.
func (se *session) restart(topic string) {
	for _, f := range se.fetchers {
		if f.part.topic == topic {
			f.askRestart()
		}
	}
}

// waitDrained waits for what is out, for a bounded time.
func (se *session) waitDrained(ctx context.Context, drained <-chan struct{}) {
	t := time.NewTimer(se.cfg.DrainTimeout)
	defer t.Stop()
	select {
	case <-drained:
	case <-t.C:
	case <-se.over.c:
	case <-ctx.Done():
	}
}

// lastCommit commits what is done, before the generation ends. began is when the
// drain did, at most a HeartbeatInterval after the rebalance. It has half of the
// time that RebalanceTimeout leaves, for the member has to join yet.
func (se *session) lastCommit(began time.Time) error {
	if se.over.given() { // nobody takes it any more
		if len(se.ledger.uncommitted()) > 0 {
			return errGenerationOver
		}
		return nil
	}
	left := time.Until(began.Add(se.cfg.RebalanceTimeout - se.cfg.HeartbeatInterval))
	ctx, cancel := context.WithTimeout(se.ctx, max(min(left/2, se.cfg.RequestTimeout), minTimeout))
	defer cancel()
	se.committer.backoff.Reset()
	if err := se.committer.flush(ctx, ctx); err != nil {
		return fmt.Errorf("commit offsets: %w", err)
	}
	return nil
}

// commitLate commits what lastCommit could not, now that the coordinator is
// there again: if it still knows the generation, nothing has to come again.
func (se *session) commitLate(ctx context.Context) {
	se.mu.Lock()
	err := se.flushErr
	se.mu.Unlock()
	if err == nil || isOver(err) || errors.Is(err, errGenerationOver) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, se.cfg.RequestTimeout)
	defer cancel()
	if se.committer.flush(ctx, ctx) == nil {
		se.mu.Lock()
		se.flushErr = nil
		se.mu.Unlock()
	}
}

// errGenerationOver tells that acks were taken that nobody takes from here.
var errGenerationOver = errors.New("commit offsets: the group's generation is over")
