package rabbitmq

import (
	"context"
	"time"
)

// Hook observes a source. It implements one or more of the On... interfaces of
// this package, which are found by type assertion, so that a new event breaks
// nobody. Open refuses a hook that implements none. A method with another signature
// counts for nothing: let the compiler check (var _ rabbitmq.OnEnded = metrics{}).
//
// Hooks are called from the source's goroutines, and from those that settle
// deliveries, several at once; they must be quick, must not panic, and must not
// close the source. Their contexts carry nothing and do not end.
type Hook any

// ConsumingEvent says that the source consumes from its queue.
type ConsumingEvent struct {
	// Epoch counts the channels of this source, from 1.
	Epoch int64
	// Host is the broker's address, "host:port".
	Host string
	// Prefetch is how many messages are asked for at a time.
	Prefetch int
}

// OnConsuming is called at the begin of every epoch, when a pause ends, and when
// Prefetch changes.
type OnConsuming interface {
	OnConsuming(ctx context.Context, e ConsumingEvent)
}

// EndedEvent says that an epoch is over: its channel is closed.
type EndedEvent struct {
	Epoch int64
	// Lost is the number of deliveries that were out and not settled. They come
	// again, here or elsewhere.
	Lost int
	// Unsent is the number of acks that the broker was not told. These messages come
	// again, too.
	Unsent int
	// AckTimeout tells that the broker closed the channel because a delivery was not
	// acked for longer than its consumer_timeout.
	AckTimeout bool
	// Err is why; nil when the source closed it itself.
	Err error
}

// OnEnded is called at the end of every epoch.
type OnEnded interface {
	OnEnded(ctx context.Context, e EndedEvent)
}

// StaleAckEvent is an ack or nack that was dropped because its delivery was lost.
// The message comes again.
type StaleAckEvent struct {
	Epoch int64
	// ID is the message's.
	ID string
}

// OnStaleAck is called for every ack and nack that was dropped.
type OnStaleAck interface {
	OnStaleAck(ctx context.Context, e StaleAckEvent)
}

// RecallEvent says that messages have been here for half of Config.AckTimeout.
type RecallEvent struct {
	// Recalled deliveries are out and were asked back.
	Recalled int
	// Returned messages were given back: they were waiting here, or had been asked
	// back before and were not started.
	Returned int
}

// OnRecall is called when messages were given or asked back because of their age.
type OnRecall interface {
	OnRecall(ctx context.Context, e RecallEvent)
}

// PauseEvent says that the source has stopped to consume because nobody receives,
// or that it consumes again.
type PauseEvent struct {
	// Paused is true when it stops, false when it goes on.
	Paused bool
	// For is how long it did not consume.
	For time.Duration
}

// OnPause is called when a source stops to consume, and when it goes on.
type OnPause interface {
	OnPause(ctx context.Context, e PauseEvent)
}

// ReconnectEvent is a failed attempt to consume.
type ReconnectEvent struct {
	// Attempt counts the failures in a row, from 1.
	Attempt int
	Err     error
}

// OnReconnect is called for every failed attempt to consume. There will be another
// one, unless Receive returns the error.
type OnReconnect interface {
	OnReconnect(ctx context.Context, e ReconnectEvent)
}

// QueueDeletedEvent says that the queue does not exist any more.
type QueueDeletedEvent struct {
	Queue string
	Err   error
}

// OnQueueDeleted is called when the queue is gone, whatever the policy.
type OnQueueDeleted interface {
	OnQueueDeleted(ctx context.Context, e QueueDeletedEvent)
}

// BlockedEvent says that the broker takes nothing from a connection because of an
// alarm (memory, disk), or that it does again. RabbitMQ tells only connections that
// publish, so it is a Publisher that hears of it. It is about publishing: consuming
// goes on.
type BlockedEvent struct {
	Blocked bool
	Reason  string
}

// OnBlocked is called when the broker blocks a connection, and when it ends that.
type OnBlocked interface {
	OnBlocked(ctx context.Context, e BlockedEvent)
}

func isHook(h Hook) bool {
	switch h.(type) {
	case OnConsuming, OnEnded, OnStaleAck, OnRecall, OnPause, OnReconnect, OnQueueDeleted, OnBlocked:
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
