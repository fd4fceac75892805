package inboxotel

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/ackafter/ackafter/inbox"
)

// Parked is what the parked table holds for a consumer.
type Parked struct {
	// Retry messages wait for their next attempt, Waiting ones behind another of
	// their lane, Dead ones for a person.
	Retry, Waiting, Dead int64
	// Oldest is when the oldest that is not dead was parked; zero when there is
	// none, or when it is not known.
	Oldest time.Time
}

// CountParked returns a function for Telemetry.WatchParked that asks the store, which
// those of this module answer, for one consumer's parked messages. Discarded ones are
// not counted. The error is the store's.
func CountParked(store inbox.Undertaker, consumer string) func(ctx context.Context) (Parked, error) {
	return func(ctx context.Context) (Parked, error) {
		groups, err := store.GroupParked(ctx, inbox.ParkedFilter{Consumer: consumer})
		if err != nil {
			return Parked{}, err
		}
		var p Parked
		for _, g := range groups {
			switch g.State {
			case inbox.ParkedRetry:
				p.Retry += int64(g.Count)
			case inbox.ParkedWaiting:
				p.Waiting += int64(g.Count)
			case inbox.ParkedDead:
				p.Dead += int64(g.Count)
				continue
			default:
				continue
			}
			if p.Oldest.IsZero() || g.First.Before(p.Oldest) {
				p.Oldest = g.First
			}
		}
		return p, nil
	}
}

// Lag is how far a consumer is behind in one partition or queue.
type Lag struct {
	// Source names it as broker.Message.Source does: "kafka:orders/3".
	Source string
	// Messages is how many are not done yet. Negative: unknown, and not reported.
	Messages int64
	// Oldest is when the first of them was made; zero when there is none, or when it
	// is not known.
	Oldest time.Time
}

// states are the instruments that are asked when they are collected.
type states struct {
	runs, ready, paused            metric.Int64ObservableGauge
	inFlight, inFlightSize         metric.Int64ObservableGauge
	inFlightOldest                 metric.Float64ObservableGauge
	handlersRunning, handlersStuck metric.Int64ObservableGauge
	parked, lag                    metric.Int64ObservableGauge
	parkedOldest, lagOldest        metric.Float64ObservableGauge
}

func (s *states) create(m metric.Meter) error {
	var errs []error
	number := func(name, unit, description string) metric.Int64ObservableGauge {
		g, err := m.Int64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, named(name, err))
		return g
	}
	age := func(name, description string) metric.Float64ObservableGauge {
		g, err := m.Float64ObservableGauge(name, metric.WithUnit("s"), metric.WithDescription(description))
		errs = append(errs, named(name, err))
		return g
	}
	s.runs = number("ackafter.inbox.runs", "{run}", "Runs of the consumer that go on.")
	s.ready = number("ackafter.inbox.ready", "{consumer}", "1 when the consumer is ready, else 0.")
	s.paused = number("ackafter.inbox.paused", "{consumer}", "1 while receiving is stopped because the database cannot be used, else 0.")
	s.inFlight = number("ackafter.inbox.in_flight.messages", "{message}", "Deliveries that were received and are not settled.")
	s.inFlightSize = number("ackafter.inbox.in_flight.size", "By", "Size of the deliveries that were received and are not settled.")
	s.inFlightOldest = age("ackafter.inbox.in_flight.oldest", "Age of the oldest delivery that is not settled, since it was received.")
	s.handlersRunning = number("ackafter.inbox.handlers.running", "{handler}", "Runs of the handler that go on.")
	s.handlersStuck = number("ackafter.inbox.handlers.stuck", "{handler}", "Runs of the handler that go on past their timeout or were left behind.")
	s.parked = number("ackafter.inbox.parked.messages", "{message}", "Messages in the parked table, by state.")
	s.parkedOldest = age("ackafter.inbox.parked.oldest", "Age of the oldest parked message that is not dead.")
	s.lag = number("ackafter.source.lag", "{message}", "Messages of a partition or queue that are not done.")
	s.lagOldest = age("ackafter.source.oldest", "Age of the oldest message that is not done, since it was made.")
	return errors.Join(errs...)
}

// Watch reports how consumers stand: Runs, readiness, pauses, what is in flight, and
// handlers that run or are stuck. Consumers are told apart by their names. Neither
// databases nor brokers are asked.
//
// stop ends it and may be called more than once. The error is the meter provider's.
func (t *Telemetry) Watch(consumers ...inbox.HealthReporter) (stop func() error, err error) {
	s := &t.states
	return t.register(func(_ context.Context, o metric.Observer) error {
		for _, c := range consumers {
			h := c.Health()
			with := metric.WithAttributeSet(attribute.NewSet(attrConsumer.String(h.Consumer)))
			stuck := int64(0)
			for _, r := range h.Handlers {
				stuck += flag(r.Stuck || r.LeftBehind)
			}
			o.ObserveInt64(s.runs, int64(h.Runs), with)
			o.ObserveInt64(s.ready, flag(h.Ready()), with)
			o.ObserveInt64(s.paused, flag(h.Paused), with)
			o.ObserveInt64(s.inFlight, int64(h.InFlight), with)
			o.ObserveInt64(s.inFlightSize, h.InFlightBytes, with)
			o.ObserveFloat64(s.inFlightOldest, age(h.OldestInFlight), with)
			o.ObserveInt64(s.handlersRunning, int64(len(h.Handlers)), with)
			o.ObserveInt64(s.handlersStuck, stuck, with)
		}
		return nil
	}, s.runs, s.ready, s.paused, s.inFlight, s.inFlightSize, s.inFlightOldest, s.handlersRunning, s.handlersStuck)
}

// WatchParked reports what count, of CountParked or your own, finds in the parked table.
// It is called at every collection, with its context, and should ask the database one cheap
// question, on a connection that the workers do not need; one process of several may
// do it for all. Its error goes to OpenTelemetry's error handler, and nothing is reported then.
//
// stop and the error are as for Watch.
func (t *Telemetry) WatchParked(consumer string, count func(ctx context.Context) (Parked, error)) (stop func() error, err error) {
	s := &t.states
	return t.register(func(ctx context.Context, o metric.Observer) error {
		p, err := count(ctx)
		if err != nil {
			return fmt.Errorf("inboxotel: count parked messages of consumer %q: %w", consumer, err)
		}
		for state, n := range map[inbox.ParkedState]int64{inbox.ParkedRetry: p.Retry, inbox.ParkedWaiting: p.Waiting, inbox.ParkedDead: p.Dead} {
			o.ObserveInt64(s.parked, n, metric.WithAttributes(attrConsumer.String(consumer), attrState.String(string(state))))
		}
		o.ObserveFloat64(s.parkedOldest, age(p.Oldest), metric.WithAttributes(attrConsumer.String(consumer)))
		return nil
	}, s.parked, s.parkedOldest)
}

// WatchLag reports what lag returns: how far the partitions are behind that this
// process has now. It is called at every collection and must not wait; a source's
// Stats has the numbers.
//
// stop and the error are as for Watch.
func (t *Telemetry) WatchLag(consumer string, lag func() []Lag) (stop func() error, err error) {
	s := &t.states
	return t.register(func(_ context.Context, o metric.Observer) error {
		for _, l := range lag() {
			from, partition := t.place(l.Source)
			attrs := []attribute.KeyValue{attrConsumer.String(consumer), attrSystem.String(from.system), attrDestination.String(from.destination)}
			if partition != "" && from.destination != other {
				attrs = append(attrs, attrPartition.String(partition))
			}
			with := metric.WithAttributes(attrs...)
			if l.Messages >= 0 {
				o.ObserveInt64(s.lag, l.Messages, with)
			}
			o.ObserveFloat64(s.lagOldest, age(l.Oldest), with)
		}
		return nil
	}, s.lag, s.lagOldest)
}

func (t *Telemetry) register(callback metric.Callback, instruments ...metric.Observable) (stop func() error, err error) {
	r, err := t.meter.RegisterCallback(callback, instruments...)
	if err != nil {
		return nil, fmt.Errorf("inboxotel: watch: %w", err)
	}
	return r.Unregister, nil
}

func flag(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// age is how long ago something was, 0 when it was not.
func age(since time.Time) float64 {
	if since.IsZero() {
		return 0
	}
	return max(time.Since(since).Seconds(), 0)
}
