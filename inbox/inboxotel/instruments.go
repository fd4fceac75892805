package inboxotel

import (
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/metric"
)

// Bounds of histograms. The first are those of the conventions.
var (
	durations   = []float64{.005, .01, .025, .05, .075, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10}
	phases      = []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30}
	transaction = []float64{1, 2, 5, 10, 20, 50, 100, 200, 500, 1000}
)

// instruments are those of events.
type instruments struct {
	processDuration     metric.Float64Histogram
	consumedMessages    metric.Int64Counter
	outcomes            metric.Int64Counter
	messageDuration     metric.Float64Histogram
	retries             metric.Int64Counter
	deadLetters         metric.Int64Counter
	staleAcks           metric.Int64Counter
	pauses              metric.Int64Counter
	pauseTime           metric.Float64Counter
	transactionDuration metric.Float64Histogram
	transactionMessages metric.Int64Histogram
}

func (i *instruments) create(m metric.Meter) error {
	var errs []error
	counter := func(name, unit, description string) metric.Int64Counter {
		c, err := m.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(description))
		errs = append(errs, named(name, err))
		return c
	}
	seconds := func(name, description string, bounds []float64) metric.Float64Histogram {
		h, err := m.Float64Histogram(name, metric.WithUnit("s"), metric.WithDescription(description), metric.WithExplicitBucketBoundaries(bounds...))
		errs = append(errs, named(name, err))
		return h
	}
	i.processDuration = seconds("messaging.process.duration", "Duration of processing operation.", durations)
	i.consumedMessages = counter("messaging.client.consumed.messages", "{message}", "Number of messages that were delivered to the application.")
	i.outcomes = counter("ackafter.inbox.outcomes", "{message}", "Messages that are done with, by outcome.")
	i.messageDuration = seconds("ackafter.inbox.message.duration", "Time from the start of a message's transaction to its settled ack.", durations)
	i.retries = counter("ackafter.inbox.retries", "{attempt}", "Failed attempts that are followed by another one.")
	i.deadLetters = counter("ackafter.inbox.dead_letters", "{message}", "Messages that became dead letters, by reason.")
	i.staleAcks = counter("ackafter.inbox.stale_acks", "{ack}", "Acks that were dropped because the delivery was lost.")
	i.pauses = counter("ackafter.inbox.pauses", "{pause}", "Times that receiving stopped because the database could not be used.")
	i.transactionDuration = seconds("ackafter.inbox.transaction.duration", "Time of each part of a transaction.", phases)
	var err error
	const pauseTime, messages = "ackafter.inbox.pause.time", "ackafter.inbox.transaction.messages"
	i.pauseTime, err = m.Float64Counter(pauseTime, metric.WithUnit("s"), metric.WithDescription("Time that receiving was stopped, counted when it goes on."))
	errs = append(errs, named(pauseTime, err))
	i.transactionMessages, err = m.Int64Histogram(messages, metric.WithUnit("{message}"), metric.WithDescription("Messages in one transaction."),
		metric.WithExplicitBucketBoundaries(transaction...))
	errs = append(errs, named(messages, err))
	return errors.Join(errs...)
}

// named says which instrument an error is about.
func named(name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("instrument %s: %w", name, err)
}
