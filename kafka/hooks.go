package kafka

import (
	"context"
	"time"
)

// Hook observes a source. It implements one or more of the On... interfaces of
// this package, which are found by type assertion, so that a new event breaks
// nobody. Open refuses a hook that implements none. A method with another signature
// counts for nothing: let the compiler check (var _ kafka.OnGap = metrics{}).
//
// Hooks are called from the source's goroutines, and from those that settle
// deliveries, several at once; they must be quick, must not panic, and must not
// close the source. Their contexts carry nothing and do not end.
type Hook any

// TopicPartition names a partition.
type TopicPartition struct {
	Topic     string
	Partition int32
}

// AssignedEvent says that the group has given partitions to this member.
type AssignedEvent struct {
	Generation int32
	Member     string
	// Partitions is empty when the group has more members than partitions.
	Partitions []TopicPartition
}

// OnAssigned is called at the begin of every generation.
type OnAssigned interface {
	OnAssigned(ctx context.Context, e AssignedEvent)
}

// RevokedEvent says that a generation is over: its partitions may go to others.
type RevokedEvent struct {
	Generation int32
	Partitions []TopicPartition
	// Lost is the number of deliveries that were out and not settled in time.
	Lost int
	// Drain is how long was waited for those that were out.
	Drain time.Duration
	// Err is set when what was done could not be committed in time; it may come
	// again.
	Err error
}

// OnRevoked is called at the end of every generation.
type OnRevoked interface {
	OnRevoked(ctx context.Context, e RevokedEvent)
}

// OnGap is called when offsets that were not handled are gone from the log,
// whatever the policy.
type OnGap interface {
	OnGap(ctx context.Context, e GapError)
}

// OnReset is called when the offset of a partition makes no sense in its log,
// whatever the policy.
type OnReset interface {
	OnReset(ctx context.Context, e ResetError)
}

// StaleAckEvent is an ack or nack that was dropped because its delivery was
// lost. The message comes again.
type StaleAckEvent struct {
	Topic     string
	Partition int32
	Offset    int64
}

// OnStaleAck is called for every ack and nack that was dropped.
type OnStaleAck interface {
	OnStaleAck(ctx context.Context, e StaleAckEvent)
}

// CommitErrorEvent is a commit of offsets that failed.
type CommitErrorEvent struct {
	// Attempt counts the failures since the last success, from 1.
	Attempt int
	Err     error
}

// OnCommitError is called for every commit that failed. It is tried again as
// long as the generation lasts.
type OnCommitError interface {
	OnCommitError(ctx context.Context, e CommitErrorEvent)
}

// PauseEvent says that fetching a partition has been waiting for room for some
// seconds, or goes on.
type PauseEvent struct {
	Topic     string
	Partition int32
	// Paused is true when it waits, false when it goes on.
	Paused bool
	// For is how long it has waited.
	For time.Duration
}

// OnPause is called when a partition is paused, because nobody receives or a
// record that takes very long holds up too many others, and when it goes on. A
// pause ends with its generation, too, of which only OnRevoked tells.
type OnPause interface {
	OnPause(ctx context.Context, e PauseEvent)
}

// LagEvent is how far a partition is behind. The numbers are those of
// Source.Stats.
type LagEvent struct {
	Topic     string
	Partition int32
	// Lag is how many offsets there are up to the end of the log that are not
	// done; -1 when unknown. Holes count, and so does what is in flight.
	Lag int64
	// Committed is the group's offset as last committed; -1 when unknown.
	Committed int64
	// End is the end of the log, as a broker told it at EndAt; -1 when unknown.
	// EndAt is older than Config.LagInterval only while no broker can be asked.
	End   int64
	EndAt time.Time
	// Oldest is when the first record that is not done was made, as the record
	// says: how old the work is that waits. Zero when there is none, or none was
	// fetched yet.
	Oldest time.Time
}

// OnLag is called for every assigned partition every Config.LagInterval.
type OnLag interface {
	OnLag(ctx context.Context, e LagEvent)
}

// ReconnectEvent is a failed attempt to reach the brokers, or what they refuse
// for now.
type ReconnectEvent struct {
	// What is what cannot be done meanwhile: "group", or a partition
	// ("orders/3").
	What string
	// Attempt counts the failures in a row, from 1.
	Attempt int
	Err     error
}

// OnReconnect is called for every failed attempt to reach the brokers. There
// will be another one.
type OnReconnect interface {
	OnReconnect(ctx context.Context, e ReconnectEvent)
}

// ReconnectedEvent says that something works again after failed attempts.
type ReconnectedEvent struct {
	// What is as in ReconnectEvent.
	What string
	// Attempts is how many failed in a row.
	Attempts int
	// After is how long it took since the first of them.
	After time.Duration
}

// OnReconnected is called once when something works again of which OnReconnect
// told that it does not, unless its partition was revoked meanwhile.
type OnReconnected interface {
	OnReconnected(ctx context.Context, e ReconnectedEvent)
}

func isHook(h Hook) bool {
	switch h.(type) {
	case OnAssigned, OnRevoked, OnGap, OnReset, OnStaleAck, OnCommitError, OnPause, OnLag, OnReconnect, OnReconnected:
		return true
	}
	return false
}

// hookContext is the context hooks get: it does not end.
func hookContext(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// emit calls the hooks of one kind. It must not be called with a mutex held.
func emit[H any](hooks []Hook, call func(h H)) {
	for _, h := range hooks {
		if h, ok := h.(H); ok {
			call(h)
		}
	}
}
