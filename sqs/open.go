package sqs

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"

	"github.com/ackafter/ackafter/internal/retry"
)

// Open begins to receive from a queue, which is given by its name, its URL or its
// ARN. A name means a queue of the caller's account and region. Queues whose names
// end in ".fifo" are FIFO queues: their message groups are the lanes. Standard queues
// have no lanes.
//
// Before it returns, Open makes sure that the queue exists and may be looked at.
// While SQS cannot be reached it tries again, logging why, until ctx ends; the error
// then wraps ctx's error and the last reason. What only a person can mend is an
// error at once: a wrong argument or Config, ErrMalformed, ErrNoRegion, ErrNotSQS,
// ErrNoQueue, ErrForbidden, ErrLogin. ctx has no part in what happens afterwards. Close the source
// when done.
func Open(ctx context.Context, queue string, cfg *Config) (*Source, error) {
	a, err := parseQueue(queue)
	if err != nil {
		return nil, errorf("sqs: open", err)
	}
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if cfg.Client == nil && cfg.Region != "" && a.region != "" && cfg.Region != a.region {
		return nil, fmt.Errorf("sqs: open: %w: the queue is in %s and Config.Region is %s", ErrMalformed, a.region, cfg.Region)
	}
	client, release, err := newClient(ctx, cfg, a)
	if err != nil {
		return nil, errorf("sqs: open", err)
	}
	s := &Source{
		queue: a, url: a.url, name: "sqs:" + a.name, fifo: a.fifo(), cfg: cfg, log: cfg.Logger.With("queue", a.name), client: client, release: release,
		woken: make(chan struct{}, 1), wanted: make(chan struct{}, 1), finalAfter: finalAfter,
	}
	s.ledger = newLedger(settler{s}, cfg, func() { token(s.woken) })
	if err := s.begin(ctx); err != nil {
		release()
		return nil, err
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.closing, s.stop = context.WithCancel(s.ctx)
	s.asking, s.breakOff = context.WithCancel(s.ctx)
	s.taking.Go(s.poll)
	s.taking.Go(s.keepLeases)
	if cfg.Heartbeat > 0 {
		s.taking.Go(s.renewLeases)
	}
	for range max(senders, cfg.Pollers) {
		s.telling.Go(s.send)
	}
	return s, nil
}

// begin makes sure that the queue is there. It waits for an SQS that cannot be
// reached.
func (s *Source) begin(ctx context.Context) error {
	wait := retry.Backoff{Most: s.cfg.MaxBackoff}
	bad := newTrouble(s.log, "open")
	var last error
	for {
		err := s.look(ctx)
		switch {
		case err == nil:
			bad.Over(ctx)
			return nil
		case isFinalAtOpen(err):
			return errorf("sqs: open", err)
		case last == nil || ctx.Err() == nil:
			last = err // an attempt that the end of ctx broke off tells nothing
		}
		if ctx.Err() == nil {
			bad.Note(ctx, err)
		}
		if !wait.Sleep(ctx) {
			return fmt.Errorf("sqs: open: %w; last: %w", ctx.Err(), last)
		}
	}
}

// look finds the queue's URL and looks at the queue.
func (s *Source) look(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.RequestTimeout)
	defer cancel()
	if s.url == "" {
		in := &awssqs.GetQueueUrlInput{QueueName: &s.queue.name}
		if s.queue.account != "" {
			in.QueueOwnerAWSAccountId = &s.queue.account
		}
		answer, err := s.client.GetQueueUrl(ctx, in)
		if err != nil {
			return s.adviseName(ctx, explainLook(err), in)
		}
		if s.url = aws.ToString(answer.QueueUrl); s.url == "" {
			return fmt.Errorf("%w: it answers without the URL of the queue: %s", ErrNotSQS, adviceEndpoint)
		}
	}
	answer, err := s.client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{
		QueueUrl: &s.url, AttributeNames: lookedAt,
	})
	if err != nil {
		return explainLook(err)
	}
	s.redrive = readRedrive(answer.Attributes)
	s.redrive.tell(ctx, s.log, s.cfg.Heartbeat > 0)
	return nil
}

// adviseName adds to ErrNoQueue that there is a queue of the same name that is, or is
// not, a FIFO queue.
func (s *Source) adviseName(ctx context.Context, err error, in *awssqs.GetQueueUrlInput) error {
	if !errors.Is(err, ErrNoQueue) {
		return err
	}
	other, isFIFO := strings.CutSuffix(s.queue.name, fifoSuffix)
	kind := "a standard queue"
	if !isFIFO {
		other, kind = s.queue.name+fifoSuffix, "a FIFO queue"
	}
	twin := *in
	twin.QueueName = &other
	if _, bad := s.client.GetQueueUrl(ctx, &twin); bad != nil {
		return err
	}
	return fmt.Errorf("there is %s %q, did you mean that?: %w", kind, other, err)
}
