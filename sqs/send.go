package sqs

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/internal/retry"
)

// maxFaults is how often an ack is sent that SQS refuses as our fault.
const maxFaults = 4

// refusal is what SQS says about one entry of a batch.
type refusal struct {
	code, text string
	sender     bool
}

// Error implements error.
func (r *refusal) Error() string { return r.code + ": " + r.text }

func refusalOf(f *types.BatchResultErrorEntry) *refusal {
	return &refusal{code: plainCode(aws.ToString(f.Code)), text: aws.ToString(f.Message), sender: f.SenderFault}
}

// send tells SQS what was settled, until the ledger is closed and empty.
func (s *Source) send() {
	for {
		w, look, signal, over := s.ledger.pick(time.Now())
		switch {
		case over || s.ctx.Err() != nil:
			return
		case w.give != nil:
			s.giveBack(w.give)
			s.ledger.sent()
		case len(w.acks) > 0:
			s.delete(w.acks)
			s.ledger.sent()
			token(s.wanted) // Too much may have been unsent.
		default:
			s.await(look, signal)
		}
	}
}

// await waits until then, unless that is zero, or for the signal.
func (s *Source) await(then time.Time, signal <-chan struct{}) {
	var timer <-chan time.Time
	if !then.IsZero() {
		t := time.NewTimer(time.Until(then))
		defer t.Stop()
		timer = t.C
	}
	select {
	case <-timer:
	case <-signal:
	case <-s.ctx.Done():
	}
}

// call returns the context of a request.
func (s *Source) call() (context.Context, context.CancelFunc) {
	return context.WithTimeout(s.ctx, s.cfg.RequestTimeout)
}

// delete deletes messages: one alone, several in one call.
func (s *Source) delete(acks []ackWork) {
	ctx, cancel := s.call()
	defer cancel()
	wait := retry.After(acks[0].tries, s.cfg.MaxBackoff) // one for all: they go together again
	if len(acks) == 1 {
		_, err := s.client.DeleteMessage(ctx, &awssqs.DeleteMessageInput{QueueUrl: &s.url, ReceiptHandle: &acks[0].handle})
		s.deleted(acks[0], explain(err), wait)
		return
	}
	in := &awssqs.DeleteMessageBatchInput{QueueUrl: &s.url}
	for i, a := range acks {
		in.Entries = append(in.Entries, types.DeleteMessageBatchRequestEntry{Id: aws.String(strconv.Itoa(i)), ReceiptHandle: aws.String(a.handle)})
	}
	answer, err := s.client.DeleteMessageBatch(ctx, in)
	if err != nil {
		err = explain(err)
		for _, a := range acks {
			s.deleted(a, err, wait)
		}
		return
	}
	results := make([]error, len(acks))
	for i := range results {
		results[i] = errUnanswered
	}
	for i := range answer.Successful {
		setResult(results, answer.Successful[i].Id, nil)
	}
	for i := range answer.Failed {
		setResult(results, answer.Failed[i].Id, refusalOf(&answer.Failed[i]))
	}
	for i, a := range acks {
		s.deleted(a, results[i], wait)
	}
}

// errUnanswered says that the answer to a batch does not speak of an entry.
var errUnanswered = errors.New("the answer says nothing about this message")

// setResult notes the result of the entry with an id.
func setResult(results []error, id *string, err error) {
	if i, bad := strconv.Atoi(aws.ToString(id)); bad == nil && i >= 0 && i < len(results) {
		results[i] = err
	}
}

// deleted notes how a delete ended; one that failed is sent again after wait: alone
// when the reason may lie in it.
func (s *Source) deleted(a ackWork, err error, wait time.Duration) {
	var r *refusal
	batched := errors.As(err, &r)
	switch {
	case err == nil:
		if s.ledger.acked(a) {
			s.counters.acks.Add(1)
		}
	case batched && staleCode(r.code) || !batched && isStale(err):
		s.refused(a, true, err)
	case (batched && r.sender || isFinal(err) && !isPassing(err)) && a.tries+1 >= maxFaults:
		s.refused(a, false, err)
	default:
		s.log.Debug("sqs: a delete failed and is tried again", "id", a.id, "error", err, "attempt", a.tries+1)
		s.ledger.again(a, time.Now().Add(wait), batched || !isPassing(err))
	}
}

// refused gives an ack up.
func (s *Source) refused(a ackWork, redelivered bool, err error) {
	if !s.ledger.acked(a) {
		return // There is a newer handle.
	}
	if redelivered {
		s.counters.redelivered.Add(1)
		s.log.Info("sqs: a message was already redelivered when its delete arrived", "id", a.id)
	} else {
		s.counters.refused.Add(1)
		s.log.Warn("sqs: SQS does not delete a message, which comes again", "id", a.id, "error", err)
		s.noteFlush(fmt.Errorf("delete %s: %w", a.id, err))
	}
	emit(s.cfg.Hooks, func(h OnRefusedAck) {
		h.OnRefusedAck(hookContext, RefusedAckEvent{ID: a.id, Redelivered: redelivered, Err: err})
	})
}

// giveBack makes messages visible again, one by one and in order.
func (s *Source) giveBack(g *give) {
	for len(g.entries) > 0 {
		e := g.entries[0]
		if time.Now().After(e.until) {
			g.entries = g.entries[1:]
			continue // It is visible, or will be soon.
		}
		ctx, cancel := s.call()
		_, err := s.client.ChangeMessageVisibility(ctx, &awssqs.ChangeMessageVisibilityInput{
			QueueUrl: &s.url, ReceiptHandle: &e.handle, VisibilityTimeout: seconds(e, time.Now()),
		})
		cancel()
		err = explain(err)
		switch {
		case err == nil:
			s.counters.nacks.Add(1)
		case isStale(err):
		case isFinal(err) && g.tries+1 >= maxFaults:
			s.log.Warn("sqs: a message could not be given back, and comes again when its lease ends", "id", e.id, "error", err)
		default:
			s.ledger.giveAgain(g, time.Now().Add(retry.After(g.tries, s.cfg.MaxBackoff)))
			return
		}
		g.entries = g.entries[1:]
	}
}

// seconds is for how long an entry has to be hidden until it is due: never less, but
// SQS ends every lease 12 h after the receive.
func seconds(e *entry, now time.Time) int32 {
	wait := e.due.Sub(now)
	if wait <= 0 {
		return 0
	}
	// A second is left for the call.
	most := max(maxVisibility-now.Sub(e.received)-time.Second, 0) / time.Second
	return int32(min((wait+time.Second-1)/time.Second, most)) //nolint:gosec // at most 12 h
}
