package inbox

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"runtime/debug"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox/internal/lanes"
	"github.com/ackafter/ackafter/keyfunc"
)

// work is a message on its way through the loop: what was derived from it, what
// happened so far, and what the current attempt decided.
type work struct {
	message  *broker.Message
	delivery *broker.Delivery // nil in Process

	claim  Claim
	keyErr error // the key cannot be trusted

	failed  int  // counted failed attempts
	waits   int  // for its key, which others hold
	full    int  // times that it found no room to wait in the parked table
	alone   bool // to be run alone next
	suspect suspicion
	verdict *verdict  // to be parked as soon as its claim is held
	until   time.Time // the end of the lease of one that was fed

	deaths   int // of processes that ran it with care, see caution
	unmarked int // marks that could not be taken back

	fate  fate
	start time.Time
}

// verdict says how a message is parked. It stands, also when the transaction is
// lost in which it was to be parked.
type verdict struct {
	state  ParkedState
	reason Reason
	err    error
	after  time.Duration // until the next attempt, for ParkedRetry
}

// dead is the verdict of a message that gets no more attempts.
func dead(reason Reason, err error) *verdict {
	return &verdict{state: ParkedDead, reason: reason, err: err}
}

// suspicion is what speaks for it that failures which look like infrastructure's
// are the message's own.
type suspicion struct {
	alone     int       // failures of that kind while it ran alone
	successes int64     // of the run's other messages, at the last of them
	lonely    int       // of them, with nobody else succeeding in between
	since     time.Time // of the first lonely one
}

// effectsUnknown tells that its handler ended a transaction by itself.
func (w *work) effectsUnknown() bool {
	return w.verdict != nil && w.verdict.reason == ReasonEffectsUnknown
}

// fate is what one attempt decided for one message. It counts only when the
// attempt's transaction was committed.
type fate struct {
	kind    fateKind
	outcome Outcome // for fateDone
	ran     bool    // the handler ran
	first   *Record
	value   []byte
	skipped string
	reason  Reason        // why it was parked
	after   time.Duration // until the next attempt of one that was parked for it
	err     error
}

type fateKind int

const (
	// fateOpen: not reached, or held back behind a failed one of its lane.
	fateOpen fateKind = iota
	// fateDone: to be acked after the commit.
	fateDone
	// fateFailed: a counted failed attempt.
	fateFailed
	// fateLost: the delivery is lost; the message comes again by itself. Or
	// somebody else has the parked row.
	fateLost
	// fateFull: an earlier message of its lane is parked, and so many wait behind
	// that one that this one cannot.
	fateFull
	// fateHeld: a parked message that has to wait for an earlier one of its lane;
	// its lease is to be given back.
	fateHeld
)

// lane is its lane in this process. A message that was fed back has another one
// than the live ones that queue behind it in the table, see feeder.
func (w *work) lane() string {
	if w.delivery == nil {
		return ""
	}
	return w.delivery.Lane
}

// fed tells that it comes from the parked table.
func (w *work) fed() bool { return w.claim.Parked.ID != 0 }

func (w *work) lost() bool { return w.delivery != nil && w.delivery.Context().Err() != nil }

// end is the context that ends when the delivery is lost.
func (w *work) end() context.Context { return w.delivery.Context() }

// item is a work in the lanes.
type item = lanes.Item[*work]

// maxFingerprint is the longest fingerprint that is stored as it is, in bytes.
const maxFingerprint = 256

// newWork derives everything that the claim needs. A key that cannot be trusted
// is kept as keyErr.
func (c *Consumer[Tx]) newWork(m *broker.Message, d *broker.Delivery) *work {
	w := &work{message: m, delivery: d}
	w.claim, w.keyErr = c.derive(m)
	w.claim.Lane = w.lane()
	return w
}

func (c *Consumer[Tx]) derive(m *broker.Message) (Claim, error) {
	cl := Claim{
		Key:       Key{Consumer: c.name},
		MessageID: m.ID,
		Source:    m.Source,
		Position:  m.Position,
		EventTime: m.Time,
		Worker:    c.cfg.Worker,
		TraceID:   traceID(m.Headers),
		Retention: c.cfg.Retention,
	}
	if !storable(cl.EventTime) {
		cl.EventTime = time.Time{} // A broker's clock may say anything.
	}
	err := guard("tenant", func() error {
		if c.cfg.Tenant == nil {
			return nil
		}
		tenant, err := c.cfg.Tenant(m)
		if err != nil {
			return fmt.Errorf("inbox: tenant: %w", err)
		}
		if err := validateTenant(tenant); err != nil {
			return err
		}
		cl.Tenant = tenant
		return nil
	})
	if err != nil {
		return cl, err
	}
	if cl.MessageKey, err = keyfunc.Derive(c.key, m); err != nil {
		cl.MessageKey = ""
		return cl, fmt.Errorf("inbox: derive key: %w", err)
	}
	return cl, guard("fingerprint or event time", func() (err error) {
		if c.cfg.EventTime != nil {
			at, err := c.cfg.EventTime(m)
			if err == nil && !storable(at) {
				err = errors.New("is not between the years 1 and 9999")
			}
			if err != nil {
				return fmt.Errorf("inbox: event time: %w", err)
			}
			cl.EventTime = at
		}
		if c.cfg.Fingerprint == nil {
			sum := sha256.Sum256(m.Body)
			cl.Fingerprint = sum[:]
			return nil
		}
		if cl.Fingerprint, err = c.cfg.Fingerprint(m); err != nil {
			return fmt.Errorf("inbox: fingerprint: %w", err)
		}
		if len(cl.Fingerprint) > maxFingerprint {
			sum := sha256.Sum256(cl.Fingerprint)
			cl.Fingerprint = sum[:]
		}
		return nil
	})
}

// storable tells that a database can store a time.
func storable(t time.Time) bool {
	const first, last = 1, 9999
	return t.UTC().Year() >= first && t.UTC().Year() <= last
}

// guard turns a panic of a user's function into its error, so that one message
// cannot end the process.
func guard(what string, fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("inbox: derive %s: %w", what, &PanicError{Value: p, Stack: debug.Stack()})
		}
	}()
	return fn()
}

// storedKey is the key under which the message is found: its business key, or
// the name of its parked row when it has none.
func (w *work) storedKey() string {
	if w.keyErr != nil {
		return keylessID(w.message)
	}
	return w.claim.MessageKey
}

// newMessage returns the message for one run of the handler.
func (w *work) newMessage() *Message {
	return &Message{
		Message:    *w.message,
		Consumer:   w.claim.Consumer,
		Tenant:     w.claim.Tenant,
		MessageKey: w.claim.MessageKey,
		Attempt:    w.failed + 1,
		EventTime:  w.claim.EventTime,
	}
}

// parked returns the message as v wants it parked.
func (w *work) parked(v *verdict) Parked {
	p := Parked{
		Key:         w.claim.Key,
		Fingerprint: w.claim.Fingerprint,
		Message:     w.message,
		Lane:        w.claim.Lane,
		State:       v.state,
		Reason:      v.reason,
		Attempts:    w.failed,
		After:       v.after,
		Lease:       w.claim.Parked,
		EventTime:   w.claim.EventTime,
		Worker:      w.claim.Worker,
	}
	p.MessageKey = w.storedKey()
	if v.state == ParkedWaiting {
		return p // It has not failed.
	}
	p.Failure = failureOf(v.reason, v.err)
	if v.err != nil {
		p.Error = v.err.Error()
	}
	var panicked *PanicError
	if errors.As(v.err, &panicked) {
		p.Error += "\n" + string(panicked.Stack)
	}
	return p
}
