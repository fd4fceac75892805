package inbox

import (
	"crypto/sha256"
	"fmt"
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

	failed int   // counted failed attempts
	last   error // of the last failed attempt
	alone  int   // failures like infrastructure's while it ran alone
	doomed *doom // to be parked as soon as its claim is held

	fate  fate
	start time.Time
}

// doom is why a message becomes a dead letter.
type doom struct {
	reason Reason
	err    error
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
	reason  Reason
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
	// fateLost: the delivery is lost; the message comes again by itself.
	fateLost
)

func (w *work) lane() string {
	if w.delivery == nil {
		return ""
	}
	return w.delivery.Lane
}

func (w *work) lost() bool { return w.delivery != nil && w.delivery.Context().Err() != nil }

// item is a work in the lanes.
type item = lanes.Item[*work]

// newWork derives everything that the claim needs. A key that cannot be trusted
// is kept as keyErr.
func (c *Consumer[Tx]) newWork(m *broker.Message, d *broker.Delivery) *work {
	w := &work{message: m, delivery: d}
	w.claim, w.keyErr = c.derive(m)
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
	err := guard("tenant", func() (err error) {
		if c.cfg.Tenant == nil {
			return nil
		}
		tenant, err := c.cfg.Tenant(m)
		if err == nil {
			err = validateTenant(tenant)
		}
		if err == nil {
			cl.Tenant = tenant
		}
		return err
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
			if cl.EventTime, err = c.cfg.EventTime(m); err != nil {
				return fmt.Errorf("inbox: event time: %w", err)
			}
		}
		if c.cfg.Fingerprint == nil {
			sum := sha256.Sum256(m.Body)
			cl.Fingerprint = sum[:]
			return nil
		}
		if cl.Fingerprint, err = c.cfg.Fingerprint(m); err != nil {
			return fmt.Errorf("inbox: fingerprint: %w", err)
		}
		return nil
	})
}

// guard turns a panic of a user's function into its error, so that one message
// cannot end the process.
func guard(what string, fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("inbox: derive %s: %w", what, &PanicError{Value: p})
		}
	}()
	return fn()
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

// parked returns the message as a dead letter.
func (w *work) parked(reason Reason, attempts int, err error) Parked {
	p := Parked{
		Key:         w.claim.Key,
		Fingerprint: w.claim.Fingerprint,
		Message:     w.message,
		Lane:        w.lane(),
		State:       ParkedDead,
		Reason:      reason,
		Attempts:    attempts,
		EventTime:   w.claim.EventTime,
		Worker:      w.claim.Worker,
	}
	if w.keyErr != nil {
		p.MessageKey = keylessID(w.message)
	}
	if err != nil {
		p.Error = err.Error()
	}
	return p
}
