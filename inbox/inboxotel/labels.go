package inboxotel

import (
	"context"
	"errors"
	"strings"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/ackafter/ackafter/inbox"
)

// The attributes of metrics and spans. Those that begin with "messaging" and
// "error" are of the semantic conventions.
const (
	attrSystem      = attribute.Key("messaging.system")
	attrDestination = attribute.Key("messaging.destination.name")
	attrPartition   = attribute.Key("messaging.destination.partition.id")
	attrOperation   = attribute.Key("messaging.operation.name")
	attrType        = attribute.Key("messaging.operation.type")
	attrMessageID   = attribute.Key("messaging.message.id")
	attrBatchCount  = attribute.Key("messaging.batch.message_count")
	attrKafkaOffset = attribute.Key("messaging.kafka.offset")
	attrErrorType   = attribute.Key("error.type")

	attrConsumer = attribute.Key("ackafter.consumer")
	attrOutcome  = attribute.Key("ackafter.outcome")
	attrReason   = attribute.Key("ackafter.reason")
	attrCounted  = attribute.Key("ackafter.counted")
	attrPhase    = attribute.Key("ackafter.phase")
	attrState    = attribute.Key("ackafter.state")
	attrAttempt  = attribute.Key("ackafter.attempt")
	attrKey      = attribute.Key("ackafter.message_key")
	attrTenant   = attribute.Key("ackafter.tenant")
)

// other stands for what is beyond a bound, as in the conventions.
const other = "_OTHER"

// process is the operation of a handler.
const process = "process"

// place is where a message came from.
type place struct{ system, destination string }

// placeOf reads a broker.Message.Source: "kafka:orders/3", "rabbitmq:billing",
// "sqs:orders".
func placeOf(source string) (p place, partition string) {
	system, destination, ok := strings.Cut(source, ":")
	if !ok {
		return place{"unknown", source}, ""
	}
	switch system {
	case "sqs":
		system = "aws_sqs"
	case "kafka":
		if i := strings.LastIndexByte(destination, '/'); i >= 0 {
			destination, partition = destination[:i], destination[i+1:]
		}
	}
	return place{system, destination}, partition
}

// set is a combination of labels; a and b are those of one metric.
type set struct {
	consumer string
	place    place
	kind     kind
	a, b     string
}

// kind is which labels a and b are.
type kind int

const (
	ofRun         kind = iota // error type
	ofMessage                 // nothing
	ofOutcome                 // outcome
	ofDuration                // outcome, without a place
	ofRetry                   // error type, counted
	ofDeath                   // reason
	ofPause                   // error type
	ofConsumer                // nothing
	ofTransaction             // phase, error type
)

// labels keeps the combinations that were met, so that a message costs no new ones.
// They are few: every part of a set is bounded.
type labels struct {
	max int // of places; negative: no bound

	mu     sync.RWMutex
	places map[place]bool
	sets   map[set]metric.MeasurementOption
}

// bounded returns the place itself, or the one that stands for all beyond the
// bound.
func (l *labels) bounded(p place) place {
	l.mu.RLock()
	known := l.places[p]
	l.mu.RUnlock()
	if known {
		return p
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.max >= 0 && len(l.places) >= l.max && !l.places[p] {
		return place{other, other}
	}
	if l.places == nil {
		l.places = map[place]bool{}
	}
	l.places[p] = true
	return p
}

// of returns the labels for a measurement.
func (l *labels) of(s set) metric.MeasurementOption {
	l.mu.RLock()
	option := l.sets[s]
	l.mu.RUnlock()
	if option != nil {
		return option
	}
	option = metric.WithAttributeSet(attribute.NewSet(s.attributes()...))
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.sets == nil {
		l.sets = map[set]metric.MeasurementOption{}
	}
	l.sets[s] = option
	return option
}

func (s set) attributes() []attribute.KeyValue {
	attrs := []attribute.KeyValue{attrConsumer.String(s.consumer)}
	add := func(key attribute.Key, value string) {
		if value != "" {
			attrs = append(attrs, key.String(value))
		}
	}
	add(attrSystem, s.place.system)
	add(attrDestination, s.place.destination)
	switch s.kind {
	case ofRun:
		add(attrOperation, process)
		add(attrErrorType, s.a)
	case ofMessage:
		add(attrOperation, process)
	case ofOutcome, ofDuration:
		add(attrOutcome, s.a)
	case ofRetry:
		add(attrErrorType, s.a)
		attrs = append(attrs, attrCounted.Bool(s.b != ""))
	case ofDeath:
		add(attrReason, s.a)
	case ofPause:
		add(attrErrorType, s.a)
	case ofTransaction:
		add(attrPhase, s.a)
		add(attrErrorType, s.b)
	case ofConsumer:
	}
	return attrs
}

// errorType names an error by one of few words, which hold nothing of the message.
func errorType(err error) string {
	var state interface{ SQLState() string }
	switch {
	case err == nil:
		return ""
	case errors.Is(err, inbox.ErrHandlerTimeout):
		return "timeout"
	case errors.Is(err, inbox.ErrPanic):
		return "panic"
	case errors.Is(err, inbox.ErrInFlight):
		return "in_flight"
	case errors.Is(err, inbox.ErrConflict):
		return "conflict"
	case errors.Is(err, inbox.ErrTxEnded), errors.Is(err, inbox.ErrRefused):
		return "transaction_ended"
	case errors.Is(err, inbox.ErrCommitUnknown):
		return "commit_unknown"
	case errors.As(err, &state) && isSQLState(state.SQLState()):
		return state.SQLState()
	case errors.Is(err, inbox.ErrSwallowed):
		return "swallowed"
	case errors.Is(err, inbox.ErrNotCommitted):
		return "not_committed"
	case inbox.IsPermanent(err):
		return "permanent"
	case errors.Is(err, context.DeadlineExceeded):
		return "deadline_exceeded"
	case errors.Is(err, context.Canceled):
		return "canceled"
	}
	return other
}

// isSQLState tells the five letters of the SQL standard from anything else.
func isSQLState(s string) bool {
	if len(s) != 5 {
		return false
	}
	for _, c := range s {
		if (c < '0' || c > '9') && (c < 'A' || c > 'Z') {
			return false
		}
	}
	return true
}
