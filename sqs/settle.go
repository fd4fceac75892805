package sqs

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// settler settles the deliveries of a source.
type settler struct{ *Source }

var (
	_ broker.Settler         = settler{}
	_ broker.RefusalObserver = settler{}
)

// Ack implements broker.Settler. It does not wait for SQS: deletes are sent in the
// background, ten at a time, and Source.Close waits for them. So ctx has no part
// in it.
func (s settler) Ack(_ context.Context, d *broker.Delivery) error {
	if err := s.ledger.ack(d.Tag.(*entry), time.Now()); err != nil {
		s.stale(d) //nolint:contextcheck // hooks get a context of their own
		return fmt.Errorf("sqs: ack %s: %w", d.Message.ID, err)
	}
	return nil
}

// Nack implements broker.Settler: the message becomes visible after the delay, in
// whole seconds, rounded up. A message of a FIFO queue takes with it what waits of
// its group, and goes when nothing of the group is out. The call is made in the
// background; when it fails, the message comes when its lease ends.
func (s settler) Nack(_ context.Context, d *broker.Delivery, delay time.Duration) error {
	if err := s.ledger.nack(d.Tag.(*entry), delay, time.Now()); err != nil {
		s.stale(d) //nolint:contextcheck // hooks get a context of their own
		return fmt.Errorf("sqs: nack %s: %w", d.Message.ID, err)
	}
	return nil
}

// Refused implements broker.RefusalObserver.
func (s settler) Refused(d *broker.Delivery, err error) {
	if errors.Is(err, broker.ErrLost) {
		s.stale(d)
	}
}

// stale reports a settling that came too late.
func (s settler) stale(d *broker.Delivery) {
	s.counters.staleAcks.Add(1)
	s.log.Debug("sqs: an ack came too late and was dropped", "id", d.Message.ID)
	emit(s.cfg.Hooks, func(h OnStaleAck) { h.OnStaleAck(hookContext, StaleAckEvent{ID: d.Message.ID}) })
}
