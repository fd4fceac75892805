package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// An epoch settles the deliveries that came on its channel.
var (
	_ broker.Settler         = (*epoch)(nil)
	_ broker.RefusalObserver = (*epoch)(nil)
)

// Ack implements broker.Settler. It does not wait for the broker: acks are sent in
// the background, together when there are several, and Source.Close waits for them.
// So ctx has no part in it. When the channel ends before that, the message comes
// again, as it does when the broker loses the ack.
func (e *epoch) Ack(_ context.Context, d *broker.Delivery) error {
	en := d.Tag.(*entry)
	if err := e.ledger.ack(en); err != nil {
		e.stale(en) //nolint:contextcheck // hooks get a context of their own
		return fmt.Errorf("rabbitmq: ack %s: %w", d.Message.ID, err)
	}
	return nil
}

// Nack implements broker.Settler. The message waits here for its delay, because the
// broker cannot delay, and is handed out again; but not for longer than half of
// Config.AckTimeout after it was pushed.
func (e *epoch) Nack(_ context.Context, d *broker.Delivery, delay time.Duration) error {
	en := d.Tag.(*entry)
	if err := e.ledger.nack(en, delay); err != nil {
		e.stale(en) //nolint:contextcheck // hooks get a context of their own
		return fmt.Errorf("rabbitmq: nack %s: %w", d.Message.ID, err)
	}
	return nil
}

// Refused implements broker.RefusalObserver.
func (e *epoch) Refused(d *broker.Delivery, err error) {
	if errors.Is(err, broker.ErrLost) {
		e.stale(d.Tag.(*entry))
	}
}

// stale reports a settling that came too late.
func (e *epoch) stale(en *entry) {
	e.counters.staleAcks.Add(1)
	event := StaleAckEvent{Epoch: e.id, ID: en.message.ID}
	e.log.Debug("rabbitmq: an ack came too late and was dropped", "epoch", e.id, "id", event.ID)
	emit(e.cfg.Hooks, func(h OnStaleAck) { h.OnStaleAck(hookContext, event) })
}
