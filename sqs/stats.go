package sqs

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// counters are what a source has seen; they only grow.
type counters struct {
	received, acks, nacks, staleAcks, lost, redelivered, refused atomic.Int64
	heartbeats, heartbeatErrors, receiveErrors, lastReceives     atomic.Int64
}

// Stats is what a source has done and how it stands.
type Stats struct {
	Waiting  int           // messages that are here and not handed out
	InFlight int           // deliveries that are out
	Unsent   int           // acks that SQS was not told yet
	Oldest   time.Duration // how long the oldest that is not settled has been here

	Received        int64 // messages that came, each time
	Acks            int64 // acks that SQS took
	Nacks           int64 // messages that were given back
	Returned        int64 // messages that went back without having been handed out
	StaleAcks       int64 // acks and nacks that came too late and were dropped
	Lost            int64 // deliveries whose lease ended before they were settled
	Redelivered     int64 // acks whose message was delivered again before they arrived
	RefusedAcks     int64 // acks that were given up for another reason
	Heartbeats      int64 // leases that were renewed, each time
	HeartbeatErrors int64 // leases that could not be renewed, each time
	ReceiveErrors   int64 // requests for messages that failed
	LastReceives    int64 // messages that the redrive policy does not let come again
}

// Stats returns the numbers of this moment.
func (s *Source) Stats() Stats {
	l := s.ledger.stats()
	st := Stats{
		Waiting: l.waiting, InFlight: l.out, Unsent: l.unsent, Returned: int64(l.returned),
		Received: s.counters.received.Load(), Acks: s.counters.acks.Load(), Nacks: s.counters.nacks.Load(),
		StaleAcks: s.counters.staleAcks.Load(), Lost: s.counters.lost.Load(),
		Redelivered: s.counters.redelivered.Load(), RefusedAcks: s.counters.refused.Load(),
		Heartbeats: s.counters.heartbeats.Load(), HeartbeatErrors: s.counters.heartbeatErrors.Load(),
		ReceiveErrors: s.counters.receiveErrors.Load(), LastReceives: s.counters.lastReceives.Load(),
	}
	if !l.oldest.IsZero() {
		st.Oldest = time.Since(l.oldest)
	}
	return st
}

var _ broker.HealthReporter = (*Source)(nil)

// Health returns nil when the source does its work, and else all that is wrong: it
// is closed or cannot go on, or the last request for messages failed. That nobody
// receives is not an error. It may be called concurrently and does not wait for SQS.
func (s *Source) Health() error {
	if s.closing.Err() != nil {
		return fmt.Errorf("sqs: %w", broker.ErrClosed)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	errs := []error{s.err}
	if s.err == nil && s.down != nil {
		errs = append(errs, fmt.Errorf("sqs: not receiving: %w", s.down))
	}
	return errors.Join(errs...)
}
