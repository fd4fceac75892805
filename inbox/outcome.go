package inbox

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Outcome says what became of a message. The texts are used in logs, metrics
// and SQL and do not change between releases.
type Outcome string

// The outcomes.
const (
	// FirstAttempt: the key was new and the handler's work was committed.
	FirstAttempt Outcome = "first_attempt"

	// Replay: the key was handled before with the same fingerprint. The handler
	// did not run; the stored result is given back.
	Replay Outcome = "replay"

	// Conflict: the key was handled before with another fingerprint. The handler
	// did not run; Config.OnConflict decides what becomes of the message.
	Conflict Outcome = "conflict"

	// InFlight: another transaction holds the key and did not end within
	// Config.LockTimeout. Nothing was done; the message must come again.
	InFlight Outcome = "in_flight"

	// OutsideWindow: the message is behind the horizon: a purge may have
	// forgotten its key.
	OutsideWindow Outcome = "outside_window"

	// WasParked: the message waits in the parked table, now or since an earlier
	// delivery, for its next attempt or for an earlier message of its lane.
	WasParked Outcome = "parked"

	// Dead: the message is a dead letter, now or since an earlier delivery. It
	// gets no more attempts on its own.
	Dead Outcome = "dead"
)

// Result tells what Process did with a message.
type Result struct {
	// Outcome is what became of the message; empty when Process returns an
	// error that is not ErrConflict or ErrInFlight.
	Outcome Outcome

	// Key is the full business key; its MessageKey is empty when no key could
	// be derived.
	Key Key

	// Value is the result that the handler stored with SetResult, of this run
	// for FirstAttempt and of the first run for Replay and Conflict. Nil when
	// none was stored.
	Value []byte

	// First is the row of the run that took the key first, for Replay and
	// Conflict; nil otherwise.
	First *Record

	// Skipped is the reason the handler gave with Skip; empty when it did not.
	Skipped string
}

// Decode decodes Value, which SetResult encoded as JSON, into v. It returns an
// error when no result was stored or when it does not fit v.
func (r Result) Decode(v any) error { return decodeResult(r.Key, r.Value, v) }

func decodeResult(key Key, value []byte, v any) error {
	if value == nil {
		return fmt.Errorf("inbox: decode result of consumer %q: no result is stored with the key", key.Consumer)
	}
	if err := json.Unmarshal(value, v); err != nil {
		return fmt.Errorf("inbox: decode result of consumer %q: %w", key.Consumer, err)
	}
	return nil
}

// Record is a row of the inbox: who handled a key first, when, from where and
// with what result.
type Record struct {
	Key

	// Status is StatusDone, or StatusProcessing for a leased claim whose work
	// has not been finished.
	Status Status

	// Fingerprint is the hash of the first message's body, or of what
	// Config.Fingerprint selected.
	Fingerprint []byte

	// MessageID, Source and Position are the broker's, of the delivery that was
	// handled. They are for people; nothing is decided by them.
	MessageID string
	Source    string
	Position  broker.Position

	// EventTime is when the event happened, see Config.EventTime; zero when
	// unknown.
	EventTime time.Time

	// Worker names the process that handled it, see Config.Worker.
	Worker string

	// TraceID is the W3C trace id of the message that was handled; empty when
	// it had none.
	TraceID string

	// Attempts is how many runs of the handler it took, from 1.
	Attempts int

	// Result is what the handler stored with SetResult; nil when nothing.
	Result []byte

	// ProcessedAt is when the key was taken, by the database's clock.
	ProcessedAt time.Time

	// ExpiresAt is the end of the key's window, by the database's clock; zero
	// when it is kept for ever. From then on the key counts as new.
	ExpiresAt time.Time
}

// Decode decodes the stored result into v, see Result.Decode.
func (r *Record) Decode(v any) error { return decodeResult(r.Key, r.Result, v) }

// Status is the state of an inbox row.
type Status string

// The states of an inbox row.
const (
	StatusDone       Status = "done"
	StatusProcessing Status = "processing"
)

// Key is the scope and the text under which a message is handled once.
type Key struct {
	// Tenant is the optional second scope; empty in a product without tenants.
	Tenant string
	// Consumer is the name of the subscriber.
	Consumer string
	// MessageKey is the business key.
	MessageKey string
}
