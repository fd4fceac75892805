package inboxotel_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/baggage"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/propagation"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxotel"
	"github.com/ackafter/ackafter/keyfunc"
)

const (
	producerTrace = "4bf92f3577b34da6a3ce929d0e0e4736"
	producerSpan  = "00f067aa0ba902b7"
	traceparent   = "00-" + producerTrace + "-" + producerSpan + "-01"
)

// traced is a message of Kafka whose producer was traced.
func traced(headers ...broker.Header) *inbox.Message {
	m := &inbox.Message{MessageKey: "A1|paid", Tenant: "acme", Attempt: 2, Consumer: "billing"}
	m.ID, m.Source, m.Position, m.Headers = "orders/3/4711", "kafka:orders/3", broker.At(4711), headers
	return m
}

func header(name, value string) broker.Header { return broker.Header{Name: name, Value: []byte(value)} }

// run handles messages within a span and returns it; inside is the handler's
// context.
func (r *rig) run(t testing.TB, ctx context.Context, err error, ms ...*inbox.Message) (span tracetest.SpanStub, inside context.Context) { //nolint:revive // The context is what the test is about.
	t.Helper()
	inside, end := r.OnHandle(ctx, inbox.HandleEvent{Consumer: "billing", Messages: ms})
	end(err)
	spans := r.spans.GetSpans()
	return spans[len(spans)-1], inside
}

func TestSpanOfOneMessage(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	span, inside := r.run(t, t.Context(), nil, traced(header("traceparent", traceparent)))
	if span.Name != "process orders" || span.SpanKind != trace.SpanKindConsumer || span.Status.Code != codes.Unset {
		t.Errorf("span %q of kind %v, status %v", span.Name, span.SpanKind, span.Status)
	}
	want := "attempt=2,consumer=billing,destination.name=orders,destination.partition.id=3,kafka.offset=4711,message.id=orders/3/4711,operation.name=process,operation.type=process,system=kafka"
	if got := attributes(span.Attributes); got != want {
		t.Errorf("attributes\n%s, want\n%s", got, want)
	}
	if span.SpanContext.TraceID().String() != producerTrace || span.Parent.SpanID().String() != producerSpan || !span.Parent.IsRemote() {
		t.Errorf("span of trace %v, parent %v", span.SpanContext.TraceID(), span.Parent.SpanID())
	}
	if len(span.Links) != 1 || span.Links[0].SpanContext.SpanID().String() != producerSpan {
		t.Errorf("links %+v, want one to the message's context", span.Links)
	}
	if got := trace.SpanContextFromContext(inside); !got.Equal(span.SpanContext) {
		t.Errorf("the handler's context has the span %v, want %v", got, span.SpanContext)
	}
	r.want(t, "messaging.process.duration", map[string]float64{"consumer=billing,destination.name=orders,operation.name=process,system=kafka": 1})
}

// With a span around (a webhook's request) that one is the parent, and the
// message's is linked; with LinkOnly the run has a trace of its own.
func TestSpanIsParentedOrLinked(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name             string
		linkOnly, around bool
		headers          broker.Headers
		parent           string // "" none, "message", "around"
		links            int
	}{
		{"message", false, false, broker.Headers{header("traceparent", traceparent)}, "message", 1},
		{"no trace", false, false, nil, "", 0},
		{"malformed", false, false, broker.Headers{header("traceparent", "00-zz-1-01")}, "", 0},
		{"around", false, true, broker.Headers{header("traceparent", traceparent)}, "around", 1},
		{"around alone", false, true, nil, "around", 0},
		{"link only", true, false, broker.Headers{header("traceparent", traceparent)}, "", 1},
		{"link only, around", true, true, broker.Headers{header("traceparent", traceparent)}, "", 1},
	} {
		r := newRig(t, inboxotel.Config{LinkOnly: row.linkOnly})
		ctx, around := t.Context(), trace.Span(nil)
		if row.around {
			ctx, around = r.tracer.Tracer("test").Start(ctx, "around")
		}
		span, _ := r.run(t, ctx, nil, traced(row.headers...))
		want := ""
		switch row.parent {
		case "message":
			want = producerSpan
		case "around":
			want = around.SpanContext().SpanID().String()
		}
		got := ""
		if span.Parent.IsValid() {
			got = span.Parent.SpanID().String()
		}
		if got != want || len(span.Links) != row.links {
			t.Errorf("%s: parent %q and %d links, want %q and %d", row.name, got, len(span.Links), want, row.links)
		}
	}
}

// The set of a bulk handler has one span that belongs to no message's trace, with a
// link to each of them.
func TestSpanOfBulkSet(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	second := strings.Replace(traceparent, producerSpan, "00f067aa0ba902b8", 1)
	two, three := traced(header("traceparent", second)), traced()
	two.ID, two.Source, two.Position = "orders/4/9", "kafka:orders/4", broker.At(9)
	span, _ := r.run(t, t.Context(), nil, traced(header("traceparent", traceparent)), two, three)
	want := "attempt=2,batch.message_count=3,consumer=billing,destination.name=orders,operation.name=process,operation.type=process,system=kafka"
	if got := attributes(span.Attributes); got != want || span.Name != "process orders" || span.Parent.IsValid() {
		t.Errorf("span %q, parent %v, attributes\n%s, want\n%s", span.Name, span.Parent.IsValid(), got, want)
	}
	if len(span.Links) != 2 || span.Links[0].SpanContext.SpanID().String() != producerSpan || attributes(span.Links[1].Attributes) != "kafka.offset=9,message.id=orders/4/9" {
		t.Errorf("links %+v", span.Links)
	}
	three.Source = "rabbitmq:billing"
	if span, _ := r.run(t, t.Context(), nil, two, three); span.Name != "process" || !strings.Contains(attributes(span.Attributes), "system=_OTHER") {
		t.Errorf("a set of several queues: span %q, %s", span.Name, attributes(span.Attributes))
	}
}

func TestSpanOfFailedRun(t *testing.T) {
	t.Parallel()
	for _, texts := range []bool{false, true} {
		r := newRig(t, inboxotel.Config{ErrorTexts: texts, MessageKeys: texts})
		span, _ := r.run(t, t.Context(), inbox.Permanent(errors.New("anna@example.org has no limit")), traced())
		if want := map[bool]string{true: "anna@example.org has no limit"}[texts]; span.Status.Code != codes.Error || span.Status.Description != want || len(span.Events) != 0 {
			t.Errorf("status %+v, events %v", span.Status, span.Events)
		}
		got := attributes(span.Attributes)
		if !strings.Contains(got, "error.type=permanent") || strings.Contains(got, "message_key=A1|paid") != texts || strings.Contains(got, "tenant=acme") != texts {
			t.Errorf("with texts and keys %v: %s", texts, got)
		}
		r.want(t, "messaging.process.duration", map[string]float64{"consumer=billing,destination.name=orders,error.type=permanent,operation.name=process,system=kafka": 1})
	}
}

// b3 is a propagator with a header in capitals, as B3 has it.
type b3 struct{ propagation.TextMapPropagator }

func (b3) Extract(ctx context.Context, c propagation.TextMapCarrier) context.Context {
	id, err := trace.TraceIDFromHex(c.Get("X-B3-TraceId"))
	span, err2 := trace.SpanIDFromHex(c.Get("X-B3-SpanId"))
	if err != nil || err2 != nil {
		return ctx
	}
	return trace.ContextWithRemoteSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{TraceID: id, SpanID: span, TraceFlags: trace.FlagsSampled, Remote: true}))
}

// Headers have come through brokers and gateways: their names are found in other
// letters as well.
func TestPropagators(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{Propagator: b3{}})
	for _, names := range [][2]string{{"X-B3-TraceId", "X-B3-SpanId"}, {"x-b3-traceid", "x-b3-spanid"}} {
		span, _ := r.run(t, t.Context(), nil, traced(header("other", "x"), header(names[0], producerTrace), header(names[1], producerSpan)))
		if span.Parent.SpanID().String() != producerSpan {
			t.Errorf("%v: parent %v", names, span.Parent.SpanID())
		}
	}
	r = newRig(t, inboxotel.Config{Propagator: propagation.NewCompositeTextMapPropagator(propagation.TraceContext{}, propagation.Baggage{})})
	m := traced(header("Traceparent", traceparent), header("baggage", "region=eu"), header("Baggage", "plan=pro"))
	span, inside := r.run(t, t.Context(), nil, m)
	if b := baggage.FromContext(inside); span.Parent.SpanID().String() != producerSpan || b.Member("region").Value() != "eu" || b.Member("plan").Value() != "pro" {
		t.Errorf("parent %v, baggage %q", span.Parent.SpanID(), b)
	}
	if len(m.Headers) != 3 {
		t.Errorf("the message was changed: %v", m.Headers)
	}
}

// The whole way: nothing of a message is in what is exported, whatever fails; and
// with the options that ask for it, it is, so that this test could see it.
func TestNothingOfMessagesIsExported(t *testing.T) {
	t.Parallel()
	const secret = "anna@example.org"
	for _, optIn := range []bool{false, true} {
		r := newRig(t, inboxotel.Config{MessageKeys: optIn, ErrorTexts: optIn})
		db, store, err := openStore(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		consumer, err := inbox.New(store, "billing", keyfunc.JSON("email"), func(ctx context.Context, _ *sql.Tx, m *inbox.Message) error {
			_, span := r.tracer.Tracer("handler").Start(ctx, "charge")
			span.End() // A deferred End would record the value of a panic.
			switch {
			case strings.Contains(string(m.Body), "panic"):
				panic("no such customer: " + secret)
			case strings.Contains(string(m.Body), "permanent"):
				return inbox.Permanent(errors.New("no such customer: " + secret))
			case m.Attempt == 1:
				return fmt.Errorf("busy: %s", m.Body)
			}
			return m.SetResult(secret)
		}, &inbox.Config{
			Logger: slog.New(slog.DiscardHandler),
			Hooks:  []inbox.Hook{r.Telemetry},
			Retry:  inbox.Retry{MaxAttempts: 2, Backoff: time.Millisecond},
			Tenant: func(*broker.Message) (string, error) { return secret, nil },
		})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.Watch(consumer); err != nil {
			t.Fatal(err)
		}
		queue := memory.New("orders", nil)
		for i, extra := range []string{"", "", `,"amount":7`, `,"do":"panic"`, `,"do":"permanent"`} {
			key := secret
			if i > 2 {
				key += extra[7:9] // A key of its own.
			}
			queue.Publish(&broker.Message{Key: []byte(secret), Headers: broker.Headers{header("traceparent", traceparent), header("email", secret)},
				Body: fmt.Appendf(nil, `{"email":%q%s}`, strings.ReplaceAll(key, `"`, ""), extra)})
		}
		queue.Publish(&broker.Message{Key: []byte(secret), Body: []byte(`{"email":null,"name":"` + secret + `"}`)})
		ctx, stop := context.WithTimeout(t.Context(), time.Minute)
		defer stop()
		done := make(chan error, 1)
		go func() { done <- consumer.Run(ctx, queue.Source()) }()
		if err := queue.Drained(ctx); err != nil {
			t.Fatal(err)
		}
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		series, _ := r.collect(t)
		spans := r.spans.GetSpans()
		r.want(t, "ackafter.inbox.outcomes", map[string]float64{
			"consumer=billing,destination.name=orders,outcome=first_attempt,system=memory": 1,
			"consumer=billing,destination.name=orders,outcome=replay,system=memory":        1,
			"consumer=billing,destination.name=orders,outcome=conflict,system=memory":      1,
			"consumer=billing,destination.name=orders,outcome=dead,system=memory":          3,
		})
		if inside := childrenOf(spans, "process orders", "charge"); inside < 5 {
			t.Errorf("%d spans of handlers are within those of their runs, want at least 5", inside)
		}
		if text := fmt.Sprintf("%v", series); strings.Contains(text, "anna") {
			t.Errorf("metrics tell of a customer: %s", text)
		}
		if text := exported(spans); strings.Contains(text, "anna") != optIn {
			t.Errorf("opted in %v, the spans are\n%s", optIn, text)
		}
	}
}

// childrenOf counts the spans with a name whose parent is one of another name.
func childrenOf(spans tracetest.SpanStubs, parent, name string) int {
	n := 0
	for _, s := range spans {
		for _, p := range spans {
			if s.Name == name && p.Name == parent && s.Parent.SpanID() == p.SpanContext.SpanID() {
				n++
			}
		}
	}
	return n
}

// exported is all text of spans.
func exported(spans tracetest.SpanStubs) string {
	var all strings.Builder
	for _, s := range spans {
		fmt.Fprintln(&all, s.Name, s.Attributes, s.Status, s.SpanContext.TraceState(), s.Resource)
		for _, e := range s.Events {
			fmt.Fprintln(&all, e.Name, e.Attributes)
		}
		for _, l := range s.Links {
			fmt.Fprintln(&all, l.Attributes, l.SpanContext.TraceState())
		}
	}
	return all.String()
}

// What a message costs with metrics and spans that are exported to nowhere.
func BenchmarkMessage(b *testing.B) {
	r := newRig(b, inboxotel.Config{})
	r.tracer = sdktrace.NewTracerProvider()
	tel, err := inboxotel.New(&inboxotel.Config{TracerProvider: r.tracer})
	if err != nil {
		b.Fatal(err)
	}
	ctx, m := b.Context(), traced(header("traceparent", traceparent))
	b.ReportAllocs()
	for b.Loop() {
		_, end := tel.OnHandle(ctx, inbox.HandleEvent{Consumer: "billing", Messages: []*inbox.Message{m}})
		end(nil)
		r.OnOutcome(ctx, inbox.OutcomeEvent{Consumer: "billing", Message: &m.Message, Outcome: inbox.FirstAttempt, Duration: time.Millisecond})
	}
}
