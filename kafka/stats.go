package kafka

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// remember is for how long Health reports a gap or a reset.
const remember = 10 * time.Minute

// counters are what a source has seen; they only grow.
type counters struct {
	staleAcks, lost, commits, commitErrors, fetchErrors, rebalances atomic.Int64
	gaps, gapOffsets, resets                                        atomic.Int64

	mu    sync.Mutex
	event error // the last gap or reset
	at    time.Time
}

func (c *counters) gapped(e *GapError) {
	c.gaps.Add(1)
	c.gapOffsets.Add(e.Count())
	c.noteEvent(e)
}

func (c *counters) resetAt(e *ResetError) {
	c.resets.Add(1)
	c.noteEvent(e)
}

func (c *counters) noteEvent(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.event, c.at = err, time.Now()
}

func (c *counters) recent() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.event == nil || time.Since(c.at) > remember {
		return nil
	}
	return fmt.Errorf("%v ago: %w", time.Since(c.at).Round(time.Second), c.event)
}

// Stats is what a source has done and how it stands.
type Stats struct {
	// Joined tells whether the source is a member of the group and knows its
	// offsets.
	Joined     bool
	Generation int32
	Member     string           // the id that the group gave to this source
	Partitions []PartitionStats // what is assigned

	Rebalances   int64 // generations so far
	StaleAcks    int64 // acks and nacks that came too late and were dropped
	Lost         int64 // deliveries that were not settled when their generation ended
	Commits      int64 // commits that worked
	CommitErrors int64 // commits that did not
	FetchErrors  int64 // failed fetches, and failed attempts to reach a partition's broker
	Gaps         int64 // times that unhandled offsets were gone
	GapOffsets   int64 // how many of them
	Resets       int64 // times that an offset made no sense in its log
}

// PartitionStats is how a partition stands.
type PartitionStats struct {
	Topic     string
	Partition int32
	// Committed is the group's offset as last committed; -1 when unknown.
	Committed int64
	// Position is the offset to fetch from next; -1 before the first fetch.
	Position int64
	// End is the end of the log, as a broker told it at EndAt; -1 when unknown. It
	// comes with every fetch, and is asked for every Config.LagInterval while
	// nothing is fetched. Open transactions are part of the log.
	End   int64
	EndAt time.Time
	// Lag is how many offsets there are up to the end that are not done; -1 when
	// unknown. Holes count, and so does what is in flight.
	Lag int64
	// Oldest is when the first record that is not done was made, as the record
	// says. Zero when there is none, or none was fetched yet.
	Oldest time.Time
	// Waiting records are fetched and not handed out; Bytes is what they take.
	Waiting int
	Bytes   int
	// InFlight deliveries are out.
	InFlight int
	// Paused tells that fetching has been waiting for room for some seconds.
	Paused bool
	// Err is why the partition cannot be fetched at the moment; nil if it can.
	Err error
}

// Stats returns the numbers of this moment.
func (s *Source) Stats() Stats {
	st := Stats{
		Rebalances:   s.counters.rebalances.Load(),
		StaleAcks:    s.counters.staleAcks.Load(),
		Lost:         s.counters.lost.Load(),
		Commits:      s.counters.commits.Load(),
		CommitErrors: s.counters.commitErrors.Load(),
		FetchErrors:  s.counters.fetchErrors.Load(),
		Gaps:         s.counters.gaps.Load(),
		GapOffsets:   s.counters.gapOffsets.Load(),
		Resets:       s.counters.resets.Load(),
	}
	s.mu.Lock()
	se := s.session
	st.Joined = s.joined
	s.mu.Unlock()
	if se != nil {
		st.Generation, st.Member = se.id.generation, se.id.member
		st.Partitions = se.ledger.stats()
	}
	return st
}

func (l *ledger) stats() []PartitionStats {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := make([]PartitionStats, len(l.partitions))
	for i, p := range l.partitions {
		st := PartitionStats{
			Topic: p.topic, Partition: p.id, Committed: p.committed, Position: -1, End: p.end, Lag: -1,
			Waiting: p.waiting, Bytes: p.bytes, InFlight: p.out, Paused: p.paused, Err: p.trouble,
		}
		if p.run != nil {
			st.Position, st.EndAt = p.tracker.next, p.endAt
			if made := p.tracker.oldest(); made != 0 {
				st.Oldest = time.UnixMilli(made)
			}
			if p.end >= 0 {
				st.Lag = max(p.end-p.tracker.committable(), 0)
			}
		}
		all[i] = st
	}
	return all
}

var _ broker.HealthReporter = (*Source)(nil)

// Health returns nil when the source does its work, and else all that is wrong:
// it is closed or cannot go on, it is not in the group, a partition cannot be
// fetched, offsets cannot be committed, or there was a gap or a reset in the
// last ten minutes, whatever the policy. A lag is not an error. It may be called
// concurrently and does not wait for a broker.
func (s *Source) Health() error {
	s.mu.Lock()
	se, joined, err, groupErr, commitErr := s.session, s.joined, s.err, s.groupErr, s.commitErr
	s.mu.Unlock()
	if s.closing.Err() != nil {
		return fmt.Errorf("kafka: %w", broker.ErrClosed)
	}
	errs := []error{err}
	switch {
	case groupErr != nil:
		errs = append(errs, fmt.Errorf("kafka: not in the group: %w", groupErr))
	case !joined:
		errs = append(errs, errors.New("kafka: joining the group"))
	}
	if commitErr != nil {
		errs = append(errs, fmt.Errorf("kafka: offsets were not committed: %w", commitErr))
	}
	if se != nil {
		for _, p := range se.ledger.stats() {
			if p.Err != nil {
				errs = append(errs, fmt.Errorf("kafka: partition %s: %w", topicPartition{p.Topic, p.Partition}, p.Err))
			}
		}
	}
	if e := s.counters.recent(); e != nil && err == nil {
		errs = append(errs, e)
	}
	return errors.Join(errs...)
}
