package inbox

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Parked is a message that goes into the parked table, with all that it needs
// to run again.
type Parked struct {
	Key

	// Fingerprint is the message's own. A parked row is unique per key and
	// fingerprint.
	Fingerprint []byte

	// Message is the message itself.
	Message *broker.Message

	// Lane is the ordering domain it came in; empty for none.
	Lane string

	// State is ParkedDead, ParkedRetry for a message that gets more attempts, or
	// ParkedWaiting for one that queues behind a parked one.
	State ParkedState

	// Reason says why it is here.
	Reason Reason

	// Error is the text of the last error; may be empty.
	Error string

	// Failure is the same for failures that look alike: a hash of the reason and
	// of the error without its numbers, ids and quoted parts. Empty for a message
	// that has not failed.
	Failure string

	// Attempts is how many attempts failed, see Retry.MaxAttempts.
	Attempts int

	// After is the time until the next attempt of a ParkedRetry message; zero or
	// negative: it is due at once.
	After time.Duration

	// Lease is set for a message that has a row already, see Batch.Park.
	Lease Lease

	// EventTime is the time of the event, see Config.EventTime; zero when
	// unknown.
	EventTime time.Time

	// Worker names the process that parked it.
	Worker string
}

// ParkedState is the state of a parked row.
type ParkedState string

// The states of a parked row.
const (
	// ParkedRetry: it gets another attempt when its time has come.
	ParkedRetry ParkedState = "retry"
	// ParkedWaiting: it has not failed, it queues behind a parked message of
	// its lane.
	ParkedWaiting ParkedState = "waiting"
	// ParkedDead: a dead letter. It gets no more attempts on its own.
	ParkedDead ParkedState = "dead"
	// ParkedDiscarded: a person gave it up. Its body is gone; a redelivery does
	// not run.
	ParkedDiscarded ParkedState = "discarded"
)

// Reason says why a message was parked. The texts are stored and do not change
// between releases.
type Reason string

// The reasons.
const (
	// ReasonFailed: an attempt failed, another one comes.
	ReasonFailed Reason = "attempt failed"
	// ReasonWaiting: it was not tried: a message of its lane is parked before it.
	ReasonWaiting Reason = "waits for its lane"
	// ReasonAttempts: the last of Retry.MaxAttempts attempts failed.
	ReasonAttempts Reason = "attempts exhausted"
	// ReasonPermanent: the handler returned Permanent.
	ReasonPermanent Reason = "permanent error"
	// ReasonInvalidKey: no key could be derived that can be trusted, or no
	// tenant, fingerprint or event time, or the database refused the key. Tried
	// again by a person, it gets a key by the key function as it is then.
	ReasonInvalidKey Reason = "invalid key"
	// ReasonConflict: the key was handled before with another body.
	ReasonConflict Reason = "conflict"
	// ReasonEffectsUnknown: the handler ended the transaction by itself; what
	// it wrote may or may not be there. A person has to look.
	ReasonEffectsUnknown Reason = "effects unknown"
	// ReasonProcessDied: the process died Retry.MaxCrashes times while it ran the
	// message alone.
	ReasonProcessDied Reason = "process died"
)

// ParkedRecord is a row of the parked table.
type ParkedRecord struct {
	// ID names the row for an operator.
	ID int64
	Parked
	// Duplicates counts later deliveries that were attached to the row.
	Duplicates int
	// NextAttempt is when a ParkedRetry message is due; zero for every other.
	NextAttempt time.Time
	// LeasedUntil is the end of the lease that a process has on it; zero without
	// one. It may be past.
	LeasedUntil time.Time
	// Died is since when it is dead or discarded; zero when it is neither.
	Died time.Time
	// ParkedAt and UpdatedAt are by the database's clock, as all times here.
	ParkedAt  time.Time
	UpdatedAt time.Time
}

// ParkedGroup is parked messages that failed alike.
type ParkedGroup struct {
	Failure  string
	Consumer string
	State    ParkedState
	Reason   Reason
	// Error is the error text of one of them, the newest.
	Error string
	Count int
	// First and Last are when the oldest and the newest of them were parked.
	First, Last time.Time
}

// ParkedFilter selects parked rows. The zero value selects the first 100.
type ParkedFilter struct {
	// Consumer, Tenant: only theirs; empty for all.
	Consumer string
	Tenant   string
	// MessageKey: only this key's; empty for all.
	MessageKey string
	// State and Reason: only those; empty for all.
	State  ParkedState
	Reason Reason
	// Failure: only those that failed alike, see Parked.Failure; empty for all.
	Failure string
	// Error: only those whose error contains this text; empty for all.
	Error string
	// Since and Before: only those that were parked at or after the one, and
	// before the other; zero for all.
	Since, Before time.Time
	// After is the id to continue after; 0 from the start.
	After int64
	// Limit is the highest number of rows; zero or negative: 100.
	Limit int
}

// keylessID returns the stored key of a message whose business key could not
// be derived. It is the same for every redelivery of the message, so that they
// all attach to one parked row, and cannot be told from a business key only by
// its form; a claim is never taken under it.
func keylessID(m *broker.Message) string {
	h := sha256.New()
	var n [8]byte
	for _, part := range [][]byte{[]byte(m.Source), []byte(m.Position.String()), m.Key, m.Body} {
		binary.BigEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	if !m.Position.Known {
		h.Write([]byte(m.ID))
	}
	return "invalid:" + hex.EncodeToString(h.Sum(nil)[:16])
}
