package inboxotel

import (
	"context"
	"strings"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// OnHandle starts the span of a run of the handler, and ends and times it with the
// run. The context of the handler carries it.
func (t *Telemetry) OnHandle(ctx context.Context, e inbox.HandleEvent) (context.Context, func(err error)) {
	from, partition := t.common(e.Messages)
	name := process
	if from.destination != "" {
		name += " " + from.destination
	}
	ctx, links := t.remote(ctx, e.Messages)
	options := []trace.SpanStartOption{
		trace.WithSpanKind(trace.SpanKindConsumer),
		trace.WithAttributes(t.attributes(e, from, partition)...),
		trace.WithLinks(links...),
	}
	if t.cfg.LinkOnly {
		options = append(options, trace.WithNewRoot())
	}
	start := time.Now()
	ctx, span := t.tracer.Start(ctx, name, options...)
	return ctx, func(err error) {
		failed := errorType(err)
		if err != nil {
			text := ""
			if t.cfg.ErrorTexts {
				text = err.Error()
			}
			span.SetAttributes(attrErrorType.String(failed))
			span.SetStatus(codes.Error, text)
		}
		t.events.processDuration.Record(ctx, time.Since(start).Seconds(), t.labels.of(set{consumer: e.Consumer, place: from, kind: ofRun, a: failed}))
		span.End()
	}
}

// common is where all messages came from, as far as they agree.
func (t *Telemetry) common(ms []*inbox.Message) (from place, partition string) {
	from, partition = t.place(ms[0].Source)
	for _, m := range ms[1:] {
		if m.Source == ms[0].Source {
			continue
		}
		p, n := t.place(m.Source)
		if p.destination != from.destination {
			from.destination = ""
		}
		if p.system != from.system {
			from.system = other
		}
		if n != partition {
			partition = ""
		}
	}
	return from, partition
}

func (t *Telemetry) attributes(e inbox.HandleEvent, from place, partition string) []attribute.KeyValue {
	m := e.Messages[0]
	attrs := make([]attribute.KeyValue, 0, 12)
	attrs = append(attrs,
		attrSystem.String(from.system), attrOperation.String(process), attrType.String(process),
		attrConsumer.String(e.Consumer), attrAttempt.Int(m.Attempt))
	if from.destination != "" {
		attrs = append(attrs, attrDestination.String(from.destination))
	}
	if partition != "" {
		attrs = append(attrs, attrPartition.String(partition))
	}
	if len(e.Messages) > 1 {
		return append(attrs, attrBatchCount.Int(len(e.Messages)))
	}
	return append(attrs, t.ofMessage(m, from)...)
}

// ofMessage are the attributes of one message, on its span or its link.
func (t *Telemetry) ofMessage(m *inbox.Message, from place) []attribute.KeyValue {
	var attrs []attribute.KeyValue
	if m.ID != "" {
		attrs = append(attrs, attrMessageID.String(m.ID))
	}
	if from.system == "kafka" && m.Position.Known {
		attrs = append(attrs, attrKafkaOffset.Int64(m.Position.Offset))
	}
	if t.cfg.MessageKeys {
		attrs = append(attrs, attrKey.String(m.MessageKey))
		if m.Tenant != "" {
			attrs = append(attrs, attrTenant.String(m.Tenant))
		}
	}
	return attrs
}

// remote returns the context in which a span starts, and the links to the contexts
// in which its messages were made. The context of a single message becomes the
// parent, with its baggage, when there is no span around.
func (t *Telemetry) remote(ctx context.Context, ms []*inbox.Message) (context.Context, []trace.Link) {
	propagator := t.propagator()
	around := trace.SpanContextFromContext(ctx).IsValid()
	links := make([]trace.Link, 0, len(ms))
	for _, m := range ms {
		made := propagator.Extract(trace.ContextWithSpanContext(ctx, trace.SpanContext{}), carrier{m.Headers})
		sc := trace.SpanContextFromContext(made)
		if !sc.IsValid() {
			continue
		}
		link := trace.Link{SpanContext: sc}
		if len(ms) > 1 {
			p, _ := placeOf(m.Source)
			link.Attributes = t.ofMessage(m, p)
		}
		links = append(links, link)
		if len(ms) == 1 && !around {
			ctx = made
		}
	}
	return ctx, links
}

// carrier lets a propagator read headers. A message is never written to.
type carrier struct{ headers broker.Headers }

// Get returns the first header with the name; one in the same letters is preferred,
// as brokers keep them.
func (c carrier) Get(name string) string {
	if v, ok := c.headers.Get(name); ok {
		return string(v)
	}
	for _, h := range c.headers {
		if strings.EqualFold(h.Name, name) {
			return string(h.Value)
		}
	}
	return ""
}

// Set does nothing.
func (carrier) Set(string, string) {}

// Keys returns the names of the headers.
func (c carrier) Keys() []string {
	names := make([]string, len(c.headers))
	for i, h := range c.headers {
		names[i] = h.Name
	}
	return names
}

// Values returns all headers with the name: baggage may come in several.
func (c carrier) Values(name string) []string {
	var all []string
	for _, h := range c.headers {
		if strings.EqualFold(h.Name, name) {
			all = append(all, string(h.Value))
		}
	}
	return all
}
