package sqs

import (
	"context"
	"errors"
	"fmt"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

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
// error at once: a wrong argument or Config, ErrMalformed, ErrNoRegion, ErrNoQueue,
// ErrForbidden, ErrLogin. ctx has no part in what happens afterwards. Close the source
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
	s.taking.Go(s.poll)
	s.taking.Go(s.keepLeases)
	for range senders {
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
		case isFinal(err) || errors.Is(err, ErrMalformed):
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
			return explainLook(err)
		}
		s.url = aws.ToString(answer.QueueUrl)
	}
	answer, err := s.client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{
		QueueUrl: &s.url, AttributeNames: []types.QueueAttributeName{types.QueueAttributeNameQueueArn, types.QueueAttributeNameRedrivePolicy},
	})
	if err != nil {
		return explainLook(err)
	}
	policy := answer.Attributes[string(types.QueueAttributeNameRedrivePolicy)]
	if policy == "" {
		s.log.InfoContext(ctx, "sqs: the queue has no dead letter queue")
	} else {
		s.log.InfoContext(ctx, "sqs: SQS itself moves messages to a dead letter queue that were received too often", "redrive_policy", policy)
	}
	return nil
}

// explainLook is explain for the first look at a queue, when a bad address is final.
func explainLook(err error) error {
	var address *types.InvalidAddress
	if errors.As(err, &address) || errorCode(err) == "InvalidAddress" {
		return fmt.Errorf("%w: the server knows no such address: check the URL and the region: %w", ErrMalformed, err)
	}
	return explain(err)
}
