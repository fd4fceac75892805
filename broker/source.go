package broker

import (
	"context"
	"errors"
)

// Source is the receiving end of a broker adapter.
//
// An implementation reconnects by itself, with backoff, for as long as the
// trouble can pass; what it returns from Receive is final.
type Source interface {
	// Receive returns what is there, at least one and at most limit deliveries
	// (limit > 0). It blocks only while there is none. Deliveries of one lane
	// are returned in their order. It is called by one goroutine at a time; an
	// adapter keeps its membership and leases while nobody calls it.
	//
	// When ctx ends it returns ctx's error promptly and loses nothing. After
	// Close it returns ErrClosed. Any other error means that the source cannot
	// go on (topic deleted and the policy says stop, access revoked).
	Receive(ctx context.Context, limit int) ([]*Delivery, error)

	// Close stops receiving, sends the acks that are still buffered, gives
	// unsettled deliveries back, leaves the group and frees everything; all of
	// the source's goroutines have ended when it returns. It returns before ctx
	// ends, or within the adapter's own deadline when ctx has none. Unsettled
	// deliveries are lost from then on. A second Close returns nil.
	// It may be called while Receive runs, which then returns ErrClosed.
	Close(ctx context.Context) error
}

// HealthReporter is an optional interface of a [Source], found by type assertion.
type HealthReporter interface {
	// Health returns nil when the source does its work, and else all that is wrong:
	// it cannot reach its broker, is not in its group, or has lost something. After
	// Close it wraps ErrClosed. That nobody receives, or that messages wait, is not
	// wrong. It asks no broker, does not wait, and may be called concurrently.
	Health() error
}

// Errors of this package. Test with errors.Is.
var (
	// ErrClosed is returned by Source.Receive after Source.Close.
	ErrClosed = errors.New("source is closed")

	// ErrSettled is returned by Delivery.Ack and Delivery.Nack when the delivery
	// was settled before. Nothing was sent to the broker.
	ErrSettled = errors.New("delivery is already settled")

	// ErrLost is returned by Delivery.Ack and Delivery.Nack when the delivery's
	// epoch is over. Nothing was sent to the broker; the message comes again.
	ErrLost = errors.New("delivery is lost: the broker delivers the message again")
)
