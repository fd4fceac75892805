package sqs

import (
	"context"
	"crypto/rand"
	"errors"
	"time"

	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/internal/retry"
)

// finalAfter is for how long a refusal must last until Receive returns it.
const finalAfter = 30 * time.Second

// maxEmpty is the most time between requests that come back empty at once.
const maxEmpty = time.Second

// poll is a request for messages that has ended.
type poll struct {
	asked, got int
	early      bool // it came back empty and did not wait as it should
	err        error
}

// poller starts requests for messages: for as many as Receive waits for, and more
// at a time while they come back full.
type poller struct {
	*Source
	ended   chan poll
	active  int
	asked   int // by those under way
	allowed int // to be active
	wait    retry.Backoff
	empty   retry.Backoff // for servers that do not let requests wait
	bad     retry.Trouble
	refused time.Time // since when the refusal lasts; zero: there is none
	gone    bool      // the queue, and that was told
}

func (s *Source) poll() {
	p := &poller{
		Source: s, ended: make(chan poll), allowed: 1, wait: retry.Backoff{Most: s.cfg.MaxBackoff}, empty: retry.Backoff{Most: maxEmpty}, bad: newTrouble(s.log, "receive"),
	}
	var resume <-chan time.Time // after a failure
	for s.closing.Err() == nil {
		if resume == nil {
			p.start()
		}
		select {
		case ended := <-p.ended:
			if pause := p.end(ended); pause > 0 {
				resume = time.After(pause)
			}
		case <-resume:
			resume = nil
		case <-s.wanted:
		case <-s.closing.Done():
		}
	}
	p.finish()
}

// finish waits for the requests that are under way, and breaks them off only when
// Close has no more time. SQS goes on with a request whose connection is closed: it
// would give it the next messages, and nobody would see them until their leases end.
func (p *poller) finish() {
	limit := time.AfterFunc(p.patience(), p.breakOff)
	defer limit.Stop()
	for p.active > 0 {
		<-p.ended
		p.active--
	}
}

// start starts the requests that are wanted.
func (p *poller) start() {
	for p.active < p.allowed {
		n := min(p.ledger.demand()-p.asked, batch)
		if n <= 0 {
			return
		}
		p.active++
		p.asked += n
		go func() { p.ended <- p.request(n) }()
	}
}

// end notes the end of a request and returns for how long to wait before others.
func (p *poller) end(ended poll) time.Duration {
	p.active--
	p.asked -= ended.asked
	switch {
	case p.closing.Err() != nil:
		return 0
	case ended.err != nil:
		return p.failed(ended.err)
	case ended.got == ended.asked:
		p.allowed = min(p.allowed*2, p.cfg.Pollers)
	case ended.got == 0:
		p.allowed = max(p.allowed/2, 1)
	}
	p.bad.Over(hookContext)
	p.wait.Reset()
	p.refused, p.gone = time.Time{}, false
	if ended.early {
		return p.empty.Next()
	}
	p.empty.Reset()
	return 0
}

func (p *poller) failed(err error) time.Duration {
	p.allowed = 1
	p.counters.receiveErrors.Add(1)
	p.setDown(err)
	attempt := p.bad.Note(hookContext, err)
	emit(p.cfg.Hooks, func(h OnReceiveError) {
		h.OnReceiveError(hookContext, ReceiveErrorEvent{Attempt: attempt, Err: err})
	})
	p.noteGone(err)
	switch {
	case !isFinal(err) || errors.Is(err, ErrNoQueue) && p.cfg.OnQueueDeleted == QueueDeletedWait:
		p.refused = time.Time{}
	case p.refused.IsZero():
		p.refused = time.Now()
	case time.Since(p.refused) >= p.lasting():
		p.fail(errorf("sqs: receive", err))
	}
	return p.wait.Next()
}

// noteGone tells when the queue does not exist any more, once each time.
func (p *poller) noteGone(err error) {
	if p.gone || !errors.Is(err, ErrNoQueue) {
		return
	}
	p.gone = true
	e := QueueDeletedEvent{Queue: p.queue.name, Stops: p.cfg.OnQueueDeleted == QueueDeletedStop, Err: err}
	p.log.Error("sqs: the queue does not exist any more", "stops", e.Stops)
	emit(p.cfg.Hooks, func(h OnQueueDeleted) { h.OnQueueDeleted(hookContext, e) })
}

// request makes one request for messages.
func (p *poller) request(n int) poll {
	ctx, cancel := context.WithTimeout(p.asking, p.cfg.WaitTime+p.cfg.RequestTimeout)
	defer cancel()
	in := &awssqs.ReceiveMessageInput{
		QueueUrl: &p.url, MaxNumberOfMessages: int32(n), //nolint:gosec // at most ten
		WaitTimeSeconds:             int32(p.cfg.WaitTime / time.Second),          //nolint:gosec // at most 20 s
		VisibilityTimeout:           int32(p.cfg.VisibilityTimeout / time.Second), //nolint:gosec // at most 12 h
		MessageAttributeNames:       []string{"All"},
		MessageSystemAttributeNames: []types.MessageSystemAttributeName{types.MessageSystemAttributeNameAll},
	}
	if p.fifo {
		id := rand.Text() // When the client repeats the request, it gets the same messages.
		in.ReceiveRequestAttemptId = &id
	}
	began := time.Now()
	answer, err := p.client.ReceiveMessage(ctx, in)
	if err != nil {
		return poll{asked: n, err: explain(err)}
	}
	p.setDown(nil) // before anybody can see the messages
	now := time.Now()
	entries := make([]*entry, 0, len(answer.Messages))
	for i := range answer.Messages {
		entries = append(entries, p.toEntry(&answer.Messages[i], now))
	}
	p.noteLast(entries)
	p.counters.received.Add(int64(len(entries)))
	if len(entries) > 0 {
		p.lost(p.ledger.add(entries, now), errRedelivered)
	}
	return poll{asked: n, got: len(entries), early: len(entries) == 0 && now.Sub(began) < p.cfg.WaitTime/2}
}

// errRedelivered says why a delivery is lost that came again.
var errRedelivered = errors.New("the message was delivered again")

// lasting is for how long a refusal must last to be final.
func (s *Source) lasting() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.finalAfter
}
