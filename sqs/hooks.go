package sqs

import "context"

// Hook observes a source. It implements one or more of the On... interfaces of
// this package, which are found by type assertion, so that a new event breaks
// nobody. Open refuses a hook that implements none. A method with another signature
// counts for nothing: let the compiler check (var _ sqs.OnLost = metrics{}).
//
// Hooks are called from the source's goroutines, and from those that settle
// deliveries, several at once; they must be quick, must not panic, and must not
// close the source. Their contexts carry nothing and do not end.
type Hook any

// LostEvent is a delivery whose lease ended before it was settled. The message comes
// again.
type LostEvent struct {
	// ID is the message's.
	ID string
	// Err is why: what SQS said to the last heartbeat. Nil when the time was over and
	// none had failed.
	Err error
}

// OnLost is called for every delivery that is lost while the source is open.
type OnLost interface {
	OnLost(ctx context.Context, e LostEvent)
}

// StaleAckEvent is an ack or nack that was dropped because its delivery was lost.
// The message comes again.
type StaleAckEvent struct {
	// ID is the message's.
	ID string
}

// OnStaleAck is called for every ack and nack that was dropped.
type OnStaleAck interface {
	OnStaleAck(ctx context.Context, e StaleAckEvent)
}

// RefusedAckEvent is an ack that SQS did not take.
type RefusedAckEvent struct {
	// ID is the message's.
	ID string
	// Redelivered tells that the receipt handle is not valid any more: the message was
	// delivered again before the delete arrived, or is gone.
	Redelivered bool
	Err         error
}

// OnRefusedAck is called for every ack that is given up. The message comes again,
// unless it is gone.
type OnRefusedAck interface {
	OnRefusedAck(ctx context.Context, e RefusedAckEvent)
}

// ReceiveErrorEvent is a request for messages that failed.
type ReceiveErrorEvent struct {
	// Attempt counts the failures in a row, from 1.
	Attempt int
	Err     error
}

// OnReceiveError is called for every request for messages that failed. There will be
// another one, unless Receive returns the error.
type OnReceiveError interface {
	OnReceiveError(ctx context.Context, e ReceiveErrorEvent)
}

// QueueDeletedEvent says that the queue does not exist any more.
type QueueDeletedEvent struct {
	// Queue is its name.
	Queue string
	// Stops tells that Receive ends with ErrNoQueue unless the queue is there again
	// within 30 s.
	Stops bool
	Err   error
}

// OnQueueDeleted is called when the queue is gone, once each time, whatever the
// policy.
type OnQueueDeleted interface {
	OnQueueDeleted(ctx context.Context, e QueueDeletedEvent)
}

// LastReceiveEvent is a message that was received as often as the queue's redrive
// policy allows: unless this delivery is acked, SQS moves the message to the dead
// letter queue instead of delivering it again.
type LastReceiveEvent struct {
	// ID is the message's.
	ID string
	// Receives is how often it was received, about.
	Receives int
	// DeadLetterQueue is the ARN of the queue that it would be moved to.
	DeadLetterQueue string
}

// OnLastReceive is called for every message that was received for the last time.
type OnLastReceive interface {
	OnLastReceive(ctx context.Context, e LastReceiveEvent)
}

func isHook(h Hook) bool {
	switch h.(type) {
	case OnLost, OnStaleAck, OnRefusedAck, OnReceiveError, OnQueueDeleted, OnLastReceive:
		return true
	}
	return false
}

// hookContext is what hooks get: it carries nothing and does not end.
var hookContext = context.Background()

// emit calls the hooks of one kind. It must not be called with a mutex held.
func emit[H any](hooks []Hook, call func(h H)) {
	for _, h := range hooks {
		if h, ok := h.(H); ok {
			call(h)
		}
	}
}
