package kafka

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// Source receives from topics as a member of a consumer group; it is a
// broker.Source. Make it with Open. Receive is for one goroutine at a time; all
// other methods may be called concurrently.
type Source struct {
	brokers []string
	name    string // of the group
	topics  []string
	cfg     *Config
	log     *slog.Logger

	dialer      *wire.Dialer // for everything but the membership
	groupDialer *wire.Dialer
	cluster     *cluster
	coordinator *coordinator
	ids         *topicIDs
	counters    counters
	late        lateAcks

	ctx     context.Context // ends when nothing may run any more
	cancel  context.CancelFunc
	closing context.Context // ends when Close is called
	stop    context.CancelFunc
	running sync.WaitGroup
	members *group
	woken   chan struct{} // holds a token when there may be something to receive

	mu        sync.Mutex
	session   *session // nil between generations
	joined    bool     // the session knows its offsets
	err       error    // final
	groupErr  error    // why there is no generation
	commitErr error    // of the last commit; nil when it worked
	flushErr  error    // of the commit that ended the last generation; nil when it worked
	closeOnce sync.Once
}

var _ broker.Source = (*Source)(nil)

// Receive returns what is there, at least one and at most limit deliveries; see
// broker.Source. Lanes are named by topic, partition and key; keys appear
// escaped, or hashed when they are long.
//
// After Close it returns broker.ErrClosed. Every other error is final:
// *GapError and *ResetError if the policies say so, ErrForbidden when a
// permission is refused for longer than 30 s. A limit below 1 is an error that
// is not final.
func (s *Source) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	if limit < 1 {
		return nil, fmt.Errorf("kafka: receive: limit is %d, must be at least 1", limit)
	}
	for {
		if err := s.receivable(ctx); err != nil {
			return nil, err
		}
		deliveries, due := s.take(limit)
		if len(deliveries) > 0 {
			return deliveries, nil
		}
		s.wait(ctx, due)
	}
}

// wait waits until there may be something to receive: at once when woken, at
// the time due unless that is zero.
func (s *Source) wait(ctx context.Context, due time.Time) {
	var timer <-chan time.Time
	if !due.IsZero() {
		t := time.NewTimer(time.Until(due))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-s.woken:
	case <-timer:
	case <-ctx.Done():
	case <-s.closing.Done():
	}
}

// receivable tells why nothing can be received.
func (s *Source) receivable(ctx context.Context) error {
	if s.closing.Err() != nil {
		return fmt.Errorf("kafka: receive: %w", broker.ErrClosed)
	}
	s.mu.Lock()
	err := s.err
	s.mu.Unlock()
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("kafka: receive: %w", err)
	}
	return nil
}

func (s *Source) take(limit int) ([]*broker.Delivery, time.Time) {
	s.mu.Lock()
	se := s.session
	s.mu.Unlock()
	if se == nil {
		return nil, time.Time{}
	}
	return se.ledger.take(limit)
}

// wake makes Receive look again. It does not block.
func (s *Source) wake() {
	select {
	case s.woken <- struct{}{}:
	default:
	}
}

// fail makes the source end with an error; the first one counts. What is out
// can still be settled.
func (s *Source) fail(err error) {
	s.mu.Lock()
	first := s.err == nil
	if first {
		s.err = err
	}
	s.mu.Unlock()
	if first {
		s.log.Error("kafka: the source cannot go on", "error", err)
	}
	s.wake()
}

// Close stops receiving, commits what was acked, leaves the group, and returns
// when everything has ended. Deliveries that are not settled are lost; it does
// not wait for them. It returns before ctx ends, or within Config.CloseTimeout
// when ctx has no deadline.
//
// The error says what could not be done in that time: then acked messages may
// come again. A second Close returns nil.
func (s *Source) Close(ctx context.Context) error {
	var err error
	s.closeOnce.Do(func() { err = s.close(ctx) })
	return err
}

func (s *Source) close(ctx context.Context) error {
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(s.cfg.CloseTimeout)
	}
	// A part of the time is kept for ending what did not end by itself.
	rest := time.Until(deadline)
	hard, cancel := context.WithTimeout(ctx, rest-min(rest/5, time.Second))
	defer cancel()
	defer context.AfterFunc(hard, s.cancel)()

	s.stop()
	leaveErr := s.members.close(hard)
	s.running.Wait()
	s.cancel()
	if leaveErr != nil && s.members.member != "" {
		last, cancel := context.WithTimeout(ctx, time.Until(deadline)/2)
		defer cancel()
		if s.coordinator.leave(last, s.members.member) == nil {
			leaveErr = nil
		}
	}
	s.groupDialer.Shut()
	s.dialer.Shut()

	s.mu.Lock()
	err := errors.Join(s.flushErr, leaveErr)
	s.mu.Unlock()
	if err != nil {
		return fmt.Errorf("kafka: close: %w", err)
	}
	return nil
}

// enter makes a session the current one.
func (s *Source) enter(se *session) {
	s.mu.Lock()
	s.session, s.joined, s.groupErr = se, false, nil
	s.mu.Unlock()
	s.counters.rebalances.Add(1)
}

// leave ends being the current one.
func (s *Source) leave() {
	s.mu.Lock()
	s.session, s.joined = nil, false
	s.mu.Unlock()
}

func (s *Source) setGroupError(err error) {
	s.mu.Lock()
	s.groupErr = err
	s.mu.Unlock()
}

// assigned reports a session that has its offsets.
func (se *session) assigned(ctx context.Context) {
	se.mu.Lock()
	se.joined, se.groupErr, se.commitErr = true, nil, nil
	se.mu.Unlock()
	e := AssignedEvent{Generation: se.id.generation, Member: se.id.member, Partitions: se.names()}
	se.log.InfoContext(ctx, "kafka: partitions assigned", "generation", e.Generation, "partitions", partitionNames(e.Partitions))
	emit(se.cfg.Hooks, func(h OnAssigned) { h.OnAssigned(hookContext(ctx), e) })
}

// revoked reports a session that has ended.
func (se *session) revoked(ctx context.Context, lost int, drain time.Duration, err error) {
	se.mu.Lock()
	se.flushErr = err
	se.mu.Unlock()
	se.counters.lost.Add(int64(lost))
	e := RevokedEvent{Generation: se.id.generation, Partitions: se.names(), Lost: lost, Drain: drain, Err: err}
	level := slog.LevelInfo
	args := []any{"generation", e.Generation, "partitions", partitionNames(e.Partitions), "lost", lost, "drain", drain.Round(time.Millisecond)}
	if err != nil {
		level = slog.LevelWarn
		args = append(args, "error", err)
	}
	se.log.Log(ctx, level, "kafka: partitions revoked", args...)
	emit(se.cfg.Hooks, func(h OnRevoked) { h.OnRevoked(hookContext(ctx), e) })
}

func (se *session) names() []TopicPartition {
	names := make([]TopicPartition, len(se.ledger.partitions))
	for i, p := range se.ledger.partitions {
		names[i] = TopicPartition{Topic: p.topic, Partition: p.id}
	}
	return names
}

func partitionNames(tps []TopicPartition) []string {
	names := make([]string, len(tps))
	for i, tp := range tps {
		names[i] = topicPartition{tp.Topic, tp.Partition}.String()
	}
	return names
}

// reset reports an offset that makes no sense. It tells whether to begin anew;
// else the source has failed.
func (s *Source) reset(ctx context.Context, e ResetError) bool {
	s.counters.resetAt(&e)
	s.log.ErrorContext(ctx, "kafka: an offset makes no sense any more", "reason", e.Reason, "topic", e.Topic, "partition", e.Partition, "offset", e.Offset, "end", e.End)
	emit(s.cfg.Hooks, func(h OnReset) { h.OnReset(hookContext(ctx), e) })
	if s.cfg.OnReset == ResetStop {
		s.fail(&e)
		return false
	}
	return true
}

// staleAck reports a settling that came too late.
func (s *Source) staleAck(r *record) {
	s.counters.staleAcks.Add(1)
	e := StaleAckEvent{Topic: r.part.topic, Partition: r.part.id, Offset: r.message.Position.Offset}
	if n := s.late.note(time.Now()); n > 0 {
		s.log.Info("kafka: acks came too late and were dropped, their messages come again",
			"count", n, "partition", r.part.topicPartition.String(), "offset", e.Offset)
	}
	emit(s.cfg.Hooks, func(h OnStaleAck) { h.OnStaleAck(context.Background(), e) })
}

// reconnected reports that something works again.
func (s *Source) reconnected(ctx context.Context, t *retry.Trouble, what string) {
	e := ReconnectedEvent{What: what, Attempts: t.Tries(), After: t.Lasts()}
	t.Over(ctx)
	emit(s.cfg.Hooks, func(h OnReconnected) { h.OnReconnected(hookContext(ctx), e) })
}

// commitFailed reports a failed commit.
func (se *session) commitFailed(attempt int, err error) {
	se.mu.Lock()
	se.commitErr = err
	se.mu.Unlock()
	se.counters.commitErrors.Add(1)
	se.commits.Note(context.Background(), err)
	emit(se.cfg.Hooks, func(h OnCommitError) {
		h.OnCommitError(context.Background(), CommitErrorEvent{Attempt: attempt, Err: err})
	})
}

// commitWorked notes a commit that was taken.
func (se *session) commitWorked() {
	se.counters.commits.Add(1)
	se.commits.Over(context.Background())
	se.mu.Lock()
	se.commitErr = nil
	se.mu.Unlock()
}
