package inboxotel

import (
	"errors"
	"fmt"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"

	"github.com/ackafter/ackafter/inbox"
)

// scope is the name of the instrumentation.
const scope = "github.com/ackafter/ackafter/inbox/inboxotel"

// defaultMaxDestinations is the default of Config.MaxDestinations.
const defaultMaxDestinations = 100

// Config configures a Telemetry. A nil *Config means all defaults.
type Config struct {
	// MeterProvider makes the instruments. Nil: the global one.
	MeterProvider metric.MeterProvider

	// TracerProvider makes the spans. Nil: the global one.
	TracerProvider trace.TracerProvider

	// Propagator reads the trace context from a message's headers. Names of headers
	// are compared without regard to case. Nil: the global one, at the time of the
	// message; W3C Trace Context when that reads nothing, as before
	// otel.SetTextMapPropagator was called.
	Propagator propagation.TextMapPropagator

	// LinkOnly gives every run of a handler a trace of its own, with a link to its
	// message's. Default: the run of a single message continues the message's trace,
	// unless the context has a span already. Sets of a bulk handler are always
	// linked.
	LinkOnly bool

	// MessageKeys adds the business key and the tenant to spans. They may be
	// personal data. Default: neither is in any span. They are in no metric in any
	// case.
	MessageKeys bool

	// ErrorTexts adds the texts of handlers' errors to spans. They may quote what
	// was in the message. Default: only the type of an error is told.
	ErrorTexts bool

	// MaxDestinations bounds the topics and queues that labels and names of spans
	// tell apart; what comes later is "_OTHER". Default 100. Negative: no bound.
	MaxDestinations int
}

// Telemetry is a hook of one or several consumers. Its methods may be called
// concurrently.
type Telemetry struct {
	cfg    Config
	tracer trace.Tracer
	meter  metric.Meter
	events instruments
	states states
	labels labels
}

var _ interface {
	inbox.OnHandle
	inbox.OnOutcome
	inbox.OnRetry
	inbox.OnStaleAck
	inbox.OnPause
	inbox.OnBatch
} = (*Telemetry)(nil)

// New returns a hook for inbox.Config.Hooks. The error names the instrument that
// the meter provider refused.
func New(cfg *Config) (*Telemetry, error) {
	t := &Telemetry{}
	if cfg != nil {
		t.cfg = *cfg
	}
	if t.cfg.MeterProvider == nil {
		t.cfg.MeterProvider = otel.GetMeterProvider()
	}
	if t.cfg.TracerProvider == nil {
		t.cfg.TracerProvider = otel.GetTracerProvider()
	}
	if t.cfg.MaxDestinations == 0 {
		t.cfg.MaxDestinations = defaultMaxDestinations
	}
	t.labels.max = t.cfg.MaxDestinations
	t.tracer = t.cfg.TracerProvider.Tracer(scope)
	t.meter = t.cfg.MeterProvider.Meter(scope)
	if err := errors.Join(t.events.create(t.meter), t.states.create(t.meter)); err != nil {
		return nil, fmt.Errorf("inboxotel: %w", err)
	}
	return t, nil
}

// propagator returns what reads headers.
func (t *Telemetry) propagator() propagation.TextMapPropagator {
	if t.cfg.Propagator != nil {
		return t.cfg.Propagator
	}
	if global := otel.GetTextMapPropagator(); len(global.Fields()) > 0 {
		return global
	}
	return propagation.TraceContext{}
}
