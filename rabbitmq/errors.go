package rabbitmq

import (
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Errors of this package. Test with errors.Is. Open returns them at once. Receive
// returns ErrNoQueue as Config.OnQueueDeleted says, and the others when they last
// for longer than 30 s; OpenPublisher and Publisher.Publish as they say.
var (
	// ErrNoQueue: the queue does not exist.
	ErrNoQueue = errors.New("queue does not exist")

	// ErrNoExchange: the exchange does not exist.
	ErrNoExchange = errors.New("exchange does not exist")

	// ErrNotAMQP: what listens at the address does not speak AMQP 0.9.1; or it wants
	// TLS and the address does not, or the other way round.
	ErrNotAMQP = errors.New("this is no server for AMQP 0.9.1")

	// ErrLogin: the broker refuses the user or the password.
	ErrLogin = errors.New("login is refused")

	// ErrVHost: the virtual host does not exist, or the user may not use it.
	ErrVHost = errors.New("virtual host does not exist or may not be used")

	// ErrForbidden: a permission is missing.
	ErrForbidden = errors.New("permission is missing")

	// ErrLocked: the queue is exclusive to another connection, or another consumer
	// has it for itself.
	ErrLocked = errors.New("queue is in exclusive use by somebody else")

	// ErrMismatch: what Config.Declare describes exists with other properties.
	ErrMismatch = errors.New("it exists with other properties")

	// ErrUnroutable is returned by Publisher.Publish when no queue is bound for the
	// routing key.
	ErrUnroutable = errors.New("no queue takes this message")

	// ErrRefused is wrapped by the error of Publisher.Publish when the broker took a
	// message, time and again, and could not keep it: a queue that is full and
	// rejects, or that has failed.
	ErrRefused = errors.New("the broker refused the message")

	// ErrTooLarge is returned by Publisher.Publish for a message that is larger than
	// PublisherConfig.MaxMessageBytes, whose key or header names are too long, or
	// whose headers do not fit into a frame (128 KiB).
	ErrTooLarge = errors.New("message is too large")

	// ErrPublisherClosed is returned by Publisher.Publish after Publisher.Close, and
	// by both when Close cuts off what runs.
	ErrPublisherClosed = errors.New("publisher is closed")
)

// PublishError is returned by Publisher.Publish when not all messages were confirmed.
type PublishError struct {
	Exchange string
	// Failed are the messages that were not confirmed, by their places in the call,
	// ascending. They may be in queues or not.
	Failed []int
	// Of is how many messages there were in the call.
	Of int
	// Err is why; the first reason when there are several.
	Err error
}

// Error implements error.
func (e *PublishError) Error() string {
	return fmt.Sprintf("rabbitmq: publish to exchange %q: %d of %d messages are not confirmed: %v", e.Exchange, len(e.Failed), e.Of, e.Err)
}

// Unwrap returns the reason.
func (e *PublishError) Unwrap() error { return e.Err }

// errCanceled says that the broker has cancelled the consumer: its queue was
// deleted, or moves to another node.
var errCanceled = errors.New("the broker cancelled the consumer")

// step is what was being done when the broker refused.
type step int

const (
	stepLogin step = iota
	stepDeclare
	stepConsume
	stepExchange // of a publisher
	stepPublish
)

// explain adds to a refusal what it means and what to do. Other errors stay as they
// are: they pass.
func explain(err error, at step) error {
	var refusal *amqp.Error
	if !errors.As(err, &refusal) || !refusal.Server {
		return err
	}
	with := func(what error, advice string) error { return fmt.Errorf("%w: %s: %w", what, advice, err) }
	switch refusal.Code {
	case amqp.NotFound:
		switch {
		case strings.Contains(refusal.Reason, "down or inaccessible"):
			return err // The node that has it will come back.
		case strings.Contains(refusal.Reason, "no exchange") && at >= stepExchange:
			return with(ErrNoExchange, "create it, or let PublisherConfig.ExchangeType do it")
		case strings.Contains(refusal.Reason, "no exchange"):
			return with(ErrNoExchange, "create it, or let Config.Declare do it")
		}
		return with(ErrNoQueue, "create it, or let Config.Declare do it")
	case amqp.AccessRefused:
		switch {
		case at == stepLogin:
			return with(ErrLogin, "check the user and the password; guest may log in from the broker's own machine only")
		case strings.Contains(refusal.Reason, "exclusive use"):
			return with(ErrLocked, "end the other consumer, or let it consume without exclusive")
		}
		return with(ErrForbidden, "give the user the permission that the broker names")
	case amqp.NotAllowed:
		if at != stepLogin || strings.Contains(refusal.Reason, "limit") {
			return err // Too many connections: some will end.
		}
		return with(ErrVHost, "create it, or give the user permissions on it")
	case amqp.ResourceLocked:
		return with(ErrLocked, "the connection that declared it as exclusive has to end, or to declare it without")
	case amqp.PreconditionFailed:
		switch at {
		case stepDeclare:
			return with(ErrMismatch, "make Config.Declare say what is there, or delete it first")
		case stepExchange:
			return with(ErrMismatch, "make PublisherConfig.ExchangeType say what is there, or delete it first")
		}
	}
	return err
}

// isFinal tells whether trying again is of no use.
func isFinal(err error) bool {
	for _, final := range []error{ErrNoQueue, ErrNoExchange, ErrLogin, ErrVHost, ErrForbidden, ErrLocked, ErrMismatch} {
		if errors.Is(err, final) {
			return true
		}
	}
	// The others are about one address.
	var each addressErrors
	if errors.As(err, &each) {
		return len(each) > 0 && !slices.ContainsFunc(each, func(err error) bool { return !isFinalAt(err) })
	}
	return isFinalAt(err)
}

// isFinalAt tells whether trying an address again is of no use.
func isFinalAt(err error) bool {
	var certificate *tls.CertificateVerificationError
	return errors.Is(err, ErrNotAMQP) || errors.As(err, &certificate)
}

// isAckTimeout tells whether the broker closed the channel because a delivery was
// not acked in time.
func isAckTimeout(err error) bool {
	var refusal *amqp.Error
	return errors.As(err, &refusal) && refusal.Server && refusal.Code == amqp.PreconditionFailed &&
		strings.Contains(refusal.Reason, "timed out")
}
