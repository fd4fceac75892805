package sqs

import (
	"context"
	"strconv"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/internal/retry"
)

// keepLeases ends leases that are over, and gives back what waits when nobody
// receives for longer than one lasts, until the source is closed. It makes no calls,
// so that nothing holds it up.
func (s *Source) keepLeases() {
	for retry.Sleep(s.closing, s.tick()) {
		s.lost(s.ledger.expire(time.Now()), nil)
		if s.ledger.idle(time.Now()) > s.cfg.VisibilityTimeout {
			if n := s.ledger.giveBack(time.Now()); n > 0 {
				s.log.Info("sqs: nobody receives: messages that waited go back", "messages", n)
			}
		}
	}
}

// renewLeases sends heartbeats until the source is closed.
func (s *Source) renewLeases() {
	for retry.Sleep(s.closing, s.tick()) {
		s.renew(s.ledger.dueBeats(time.Now()))
	}
}

// tick is how often leases are looked at.
func (s *Source) tick() time.Duration {
	every := min(s.cfg.VisibilityTimeout/20, time.Second)
	if s.cfg.Heartbeat > 0 {
		every = min(every, s.cfg.Heartbeat/4)
	}
	return max(every, minTimeout)
}

// renew sends heartbeats, some calls at a time.
func (s *Source) renew(due []lease) {
	var calls sync.WaitGroup
	free := make(chan struct{}, senders)
	for len(due) > 0 {
		free <- struct{}{}
		due = s.ledger.live(due) // that may have taken long
		n := min(batch, len(due))
		some := due[:n]
		due = due[n:]
		if n == 0 {
			break
		}
		calls.Go(func() {
			defer func() { <-free }()
			s.beat(some)
		})
	}
	calls.Wait()
}

// beat sends the heartbeats of one call. They count from its begin.
func (s *Source) beat(leases []lease) {
	ctx, cancel := context.WithTimeout(s.closing, min(s.cfg.RequestTimeout, s.cfg.VisibilityTimeout/2))
	defer cancel()
	in := &awssqs.ChangeMessageVisibilityBatchInput{QueueUrl: &s.url}
	for i, b := range leases {
		in.Entries = append(in.Entries, types.ChangeMessageVisibilityBatchRequestEntry{
			Id: aws.String(strconv.Itoa(i)), ReceiptHandle: aws.String(b.handle), VisibilityTimeout: int32(b.lasts / time.Second), //nolint:gosec // at most 12 h
		})
	}
	from := time.Now()
	answer, err := s.client.ChangeMessageVisibilityBatch(ctx, in)
	results := make([]error, len(leases))
	for i := range results {
		results[i] = errUnanswered
		if err != nil {
			results[i] = explain(err)
		}
	}
	if err == nil {
		for i := range answer.Successful {
			setResult(results, answer.Successful[i].Id, nil)
		}
		for i := range answer.Failed {
			setResult(results, answer.Failed[i].Id, refusalOf(&answer.Failed[i]))
		}
	}
	for i, b := range leases {
		r, refused := results[i].(*refusal) //nolint:errorlint // it is made here
		stale := refused && (staleCode(r.code) || r.code == "InvalidParameterValue")
		lost := s.ledger.beaten(b, from, results[i], stale)
		switch {
		case results[i] == nil:
			s.counters.heartbeats.Add(1)
		case s.closing.Err() == nil:
			s.counters.heartbeatErrors.Add(1)
			s.log.Debug("sqs: a heartbeat failed", "id", b.id, "error", results[i])
		}
		s.lost(lost, results[i])
	}
}

// lost reports deliveries whose leases ended.
func (s *Source) lost(entries []*entry, err error) {
	for _, e := range entries {
		s.counters.lost.Add(1)
		why := err
		if why == nil {
			why = s.ledger.why(e)
		}
		log := s.log.With("id", e.id, "held_for", time.Since(e.received).Round(time.Millisecond))
		if why != nil {
			log = log.With("error", why)
		}
		log.Warn("sqs: the lease of a message ended before it was settled: it comes again")
		emit(s.cfg.Hooks, func(h OnLost) { h.OnLost(hookContext, LostEvent{ID: e.id, Err: why}) })
	}
}
