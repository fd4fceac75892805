package kafka

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// A partition settles the deliveries that came from it.
var (
	_ broker.Settler         = (*partition)(nil)
	_ broker.RefusalObserver = (*partition)(nil)
)

// Ack implements broker.Settler. It sends nothing: the offset travels with the
// next commit, at the latest with the one that ends the generation or that
// Source.Close waits for. So ctx has no part in it.
func (p *partition) Ack(_ context.Context, d *broker.Delivery) error {
	r := d.Tag.(*record)
	if err := p.ledger.ack(r); err != nil {
		p.ledger.stale(r)
		return fmt.Errorf("kafka: ack %s: %w", d.Message.ID, err)
	}
	return nil
}

// Nack implements broker.Settler.
func (p *partition) Nack(_ context.Context, d *broker.Delivery, delay time.Duration) error {
	r := d.Tag.(*record)
	if err := p.ledger.nack(r, delay); err != nil {
		p.ledger.stale(r)
		return fmt.Errorf("kafka: nack %s: %w", d.Message.ID, err)
	}
	return nil
}

// Refused implements broker.RefusalObserver.
func (p *partition) Refused(d *broker.Delivery, err error) {
	if errors.Is(err, broker.ErrLost) {
		p.ledger.stale(d.Tag.(*record))
	}
}
