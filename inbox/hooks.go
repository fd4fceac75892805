package inbox

import (
	"context"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Hook observes a consumer. It implements one or more of the On... interfaces
// of this package, which are found by type assertion, so that a new event
// breaks nobody. New refuses a hook that implements none. A method with another
// signature counts for nothing: let the compiler check (var _ inbox.OnOutcome =
// metrics{}). Hooks of adapters are types of their own, as some names are the same.
//
// Hooks are called from the loop's goroutines, several at once; they must be
// quick and must not panic. Messages they are given must not be changed.
type Hook any

// HandleEvent is a run of the handler that is about to start.
type HandleEvent struct {
	Consumer string
	// Messages are what the handler gets: one message, or the set of a bulk
	// handler. They belong to the run: nothing may read them after OnHandle has
	// returned.
	Messages []*Message
}

// OnHandle is called before every run of the handler, the first hook of
// Config.Hooks first.
type OnHandle interface {
	// OnHandle returns the context that the run gets, which must be ctx or derived
	// from it (nil: ctx), and what is called once when the run has ended, the last
	// hook's first (nil: nothing).
	//
	// err is nil when the handler did its work or returned Skip; the transaction
	// can still fail, and the message then runs again. Otherwise it is why the
	// run's work is rolled back: the handler's error, a *PanicError,
	// ErrHandlerTimeout, ErrSwallowed, or that Run stopped. Whether it counts as an
	// attempt is for OnRetry and OnOutcome to tell. A handler that was left behind
	// still runs then.
	OnHandle(ctx context.Context, e HandleEvent) (run context.Context, ended func(err error))
}

// OutcomeEvent is a message that is done with: settled, or returned by Process.
type OutcomeEvent struct {
	Consumer   string
	Tenant     string
	MessageKey string
	Message    *broker.Message
	Outcome    Outcome
	// Attempt is the number of the last run of the handler, 0 when it did not
	// run.
	Attempt int
	// Duration is from the start of the message's batch to the settled ack.
	Duration time.Duration
	// TraceID is the W3C trace id of the message; empty when it has none.
	TraceID string
	// Reason is set when this delivery was parked or became a dead letter, which a
	// Conflict can be as well as a Dead; empty for a duplicate that was attached to
	// one, and for every other message.
	Reason Reason
	// Err is the last error of a dead letter, and of a message that failed and was
	// parked; nil otherwise.
	Err error
}

// OnOutcome is called once for every delivery that is done with, and once more for a
// message that was parked when it is done or dead in the end. A parked message that
// fails again is for OnRetry.
type OnOutcome interface {
	OnOutcome(ctx context.Context, e OutcomeEvent)
}

// RetryEvent is a failed attempt that will be followed by another.
type RetryEvent struct {
	Consumer   string
	Tenant     string
	MessageKey string
	Message    *broker.Message
	// Attempt is the number of the attempt that failed.
	Attempt int
	// Delay is the time until the next one, in its lane or from the parked table.
	Delay time.Duration
	// Counted tells whether it used up an attempt; infrastructure trouble does
	// not.
	Counted bool
	Err     error
}

// OnRetry is called for every failed attempt that will be followed by another.
type OnRetry interface {
	OnRetry(ctx context.Context, e RetryEvent)
}

// StaleAckEvent is an ack that was dropped because the delivery was lost. The
// message comes again and will be a replay.
type StaleAckEvent struct {
	Consumer string
	Message  *broker.Message
}

// OnStaleAck is called for every ack that was dropped.
type OnStaleAck interface {
	OnStaleAck(ctx context.Context, e StaleAckEvent)
}

// PauseEvent says that receiving stopped or goes on because of the database.
type PauseEvent struct {
	Consumer string
	// Paused is true when receiving stops, false when it goes on.
	Paused bool
	// Err is why it stops; nil when it goes on.
	Err error
	// For is how long it was paused, when it goes on.
	For time.Duration
}

// OnPause is called when receiving stops and when it goes on.
type OnPause interface {
	OnPause(ctx context.Context, e PauseEvent)
}

// BatchEvent is one transaction, of Run or Process, that has ended or could not
// be begun.
type BatchEvent struct {
	Consumer string
	// Size is the number of messages, Claimed how many of them were new.
	Size, Claimed int
	// Claim, Handlers and Commit are how long each part took.
	Claim, Handlers, Commit time.Duration
	// Err is why the transaction was not committed; nil when it was.
	Err error
}

// OnBatch is called for every transaction.
type OnBatch interface {
	OnBatch(ctx context.Context, e BatchEvent)
}
