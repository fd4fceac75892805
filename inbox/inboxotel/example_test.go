package inboxotel_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"time"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxotel"
	"github.com/ackafter/ackafter/keyfunc"
)

// numbers returns the numbers of one metric by the value of a label, sorted.
func numbers(ctx context.Context, reader sdkmetric.Reader, name, label string) []string {
	var all metricdata.ResourceMetrics
	if err := reader.Collect(ctx, &all); err != nil {
		return []string{err.Error()}
	}
	var lines []string
	for _, s := range all.ScopeMetrics {
		for _, m := range s.Metrics {
			if m.Name != name {
				continue
			}
			var points []metricdata.DataPoint[int64]
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				points = d.DataPoints
			case metricdata.Gauge[int64]:
				points = d.DataPoints
			}
			for _, p := range points {
				value, _ := p.Attributes.Value(attribute.Key(label))
				lines = append(lines, fmt.Sprintf("%s: %d", value.AsString(), p.Value))
			}
		}
	}
	slices.Sort(lines)
	return lines
}

// A consumer with metrics and traces: one hook. The handler's context carries the
// span, and with it the trace of the message.
func Example() {
	dir, err := os.MkdirTemp("", "otel")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, store, err := openStore(dir)
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()

	reader, spans := sdkmetric.NewManualReader(), tracetest.NewInMemoryExporter()
	telemetry, err := inboxotel.New(&inboxotel.Config{
		MeterProvider:  sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)),
		TracerProvider: sdktrace.NewTracerProvider(sdktrace.WithSyncer(spans)),
	})
	if err != nil {
		panic(err)
	}
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(ctx context.Context, _ *sql.Tx, m *inbox.Message) error {
			fmt.Println("handling", m.MessageKey, "in trace", trace.SpanContextFromContext(ctx).TraceID())
			return nil
		}, &inbox.Config{Hooks: []inbox.Hook{telemetry}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}

	queue := memory.New("orders", nil)
	for range 3 { // As at-least-once delivery has it.
		queue.Publish(&broker.Message{
			Headers: broker.Headers{{Name: "traceparent", Value: []byte("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")}},
			Body:    []byte(`{"orderId":"A1"}`),
		})
	}
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- consumer.Run(ctx, queue.Source()) }()
	if err := queue.Drained(ctx); err != nil {
		fmt.Println(err)
	}
	stop()
	<-done

	fmt.Println("outcomes:", numbers(context.Background(), reader, "ackafter.inbox.outcomes", "ackafter.outcome"))
	for _, s := range spans.GetSpans() {
		fmt.Println("span:", s.Name)
	}
	// Output:
	// handling A1 in trace 4bf92f3577b34da6a3ce929d0e0e4736
	// outcomes: [first_attempt: 1 replay: 2]
	// span: process orders
}

// What is a state and not an event is asked for at every collection.
func ExampleTelemetry_Watch() {
	dir, err := os.MkdirTemp("", "otel")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, store, err := openStore(dir)
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	reader := sdkmetric.NewManualReader()
	telemetry, err := inboxotel.New(&inboxotel.Config{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))})
	if err != nil {
		panic(err)
	}
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(ctx context.Context, _ *sql.Tx, _ *inbox.Message) error {
			fmt.Println("running:", numbers(ctx, reader, "ackafter.inbox.handlers.running", "ackafter.consumer"))
			return nil
		}, &inbox.Config{Hooks: []inbox.Hook{telemetry}, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	stop, err := telemetry.Watch(consumer)
	if err != nil {
		panic(err)
	}
	if _, err := consumer.Process(context.Background(), &broker.Message{Body: []byte(`{"orderId":"A1"}`)}); err != nil {
		fmt.Println(err)
	}
	fmt.Println("running:", numbers(context.Background(), reader, "ackafter.inbox.handlers.running", "ackafter.consumer"))
	fmt.Println(stop())
	// Output:
	// running: [billing: 1]
	// running: [billing: 0]
	// <nil>
}

// Dead letters and messages that wait for another attempt are counted in the
// database.
func ExampleTelemetry_WatchParked() {
	dir, err := os.MkdirTemp("", "otel")
	if err != nil {
		panic(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	db, store, err := openStore(dir)
	if err != nil {
		panic(err)
	}
	defer func() { _ = db.Close() }()
	reader := sdkmetric.NewManualReader()
	telemetry, err := inboxotel.New(&inboxotel.Config{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))})
	if err != nil {
		panic(err)
	}
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(context.Context, *sql.Tx, *inbox.Message) error { return nil },
		&inbox.Config{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		panic(err)
	}
	stop, err := telemetry.WatchParked("billing", inboxotel.CountParked(store, "billing"))
	if err != nil {
		panic(err)
	}

	queue := memory.New("orders", nil)
	queue.Publish(&broker.Message{Body: []byte(`{"orderId":null}`)}) // A key that cannot be trusted.
	ctx, end := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- consumer.Run(ctx, queue.Source()) }()
	if err := queue.Drained(ctx); err != nil {
		fmt.Println(err)
	}
	end()
	<-done
	fmt.Println("parked:", numbers(context.Background(), reader, "ackafter.inbox.parked.messages", "ackafter.state"))
	fmt.Println(stop())
	// Output:
	// parked: [dead: 1 retry: 0 waiting: 0]
	// <nil>
}

// How far a source is behind, it knows best: here a list, elsewhere what the Stats
// of the adapter's source have.
func ExampleTelemetry_WatchLag() {
	reader := sdkmetric.NewManualReader()
	telemetry, err := inboxotel.New(&inboxotel.Config{MeterProvider: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader))})
	if err != nil {
		panic(err)
	}
	stop, err := telemetry.WatchLag("billing", func() []inboxotel.Lag {
		return []inboxotel.Lag{{Source: "kafka:orders/3", Messages: 12, Oldest: time.Now().Add(-time.Minute)}}
	})
	if err != nil {
		panic(err)
	}
	fmt.Println("lag:", numbers(context.Background(), reader, "ackafter.source.lag", "messaging.destination.partition.id"))
	fmt.Println(stop())
	// Output:
	// lag: [3: 12]
	// <nil>
}
