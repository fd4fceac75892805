package integration_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// The broker is there and answers nothing, for longer than a session lasts: no
// hang, no hot loop, a Close in time, and it goes on by itself.
func TestFrozenBroker(t *testing.T) {
	t.Parallel()
	own := servers.OwnKafka(t)
	p := newPipelineOn(t, []string{own.Address})
	patient := func(n *network) *kafka.Config {
		return &kafka.Config{Dial: n.dial, DialTimeout: 2 * time.Second, RequestTimeout: 2 * time.Second, HeartbeatInterval: 500 * time.Millisecond}
	}
	n := &network{}
	c := p.start(keyfunc.JSON("id"), effect, nil, patient(n))
	p.write(0, kafkago.Message{Value: []byte(`{"id":"before"}`)})
	p.lag0()
	patientAck, patientClose := p.openBeside(patient(&network{}))
	defaultAck, defaultClose := p.openBeside(&kafka.Config{})
	stopped := p.beside(patient(&network{}), &inbox.Config{AckTimeout: 3 * time.Second})

	own.Freeze(t)
	frozen := time.Now()
	patientAck()
	defaultAck()
	eventually(t, time.Minute, "Health says so", func() bool { return c.source.Health() != nil })
	noticed := time.Since(frozen)
	// Whoever stops or starts now does so in time.
	results := make(chan error, 4)
	go func() {
		results <- within(5*time.Second, "Close with a deadline", func() { patientClose(3 * time.Second) })
	}()
	go func() { results <- within(12*time.Second, "Close without a deadline", func() { defaultClose(0) }) }()
	go func() { results <- within(10*time.Second, "a stop of Run", stopped) }()
	go func() {
		results <- within(5*time.Second, "Open with a deadline", func() {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			defer cancel()
			cfg := patient(&network{})
			cfg.Logger = slog.New(slog.DiscardHandler)
			_, err := kafka.Open(ctx, p.topic.brokers, "other", []string{p.topic.name}, cfg)
			if !errors.Is(err, context.DeadlineExceeded) || !says(err, own.Address) {
				t.Errorf("Open = %v", err)
			}
		})
	}()
	for range 4 {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
	length := 20 * time.Second
	dials, requests, since := n.dials.Load(), n.sentAll(), time.Now()
	<-time.After(time.Until(frozen.Add(length))) // This is how long the fault lasts.
	dials, requests = n.dials.Load()-dials, n.sentAll()-requests
	watched := time.Since(since).Seconds()
	t.Logf("noticed after %v; %d connections and %d requests in %.1f s; health: %v", noticed, dials, requests, watched, c.source.Health())
	if limit := 10 + 4*watched; float64(dials) > limit || float64(requests) > limit {
		t.Errorf("a hot loop: %d connections and %d requests in %.1f s", dials, requests, watched)
	}

	own.Thaw(t)
	thawed := time.Now()
	p.write(0, kafkago.Message{Value: []byte(`{"id":"after"}`)})
	p.lag0()
	t.Logf("went on after %v", time.Since(thawed))
	eventually(t, time.Minute, "Health is green", func() bool { return c.source.Health() == nil })
	c.stop(t)
	p.once(2)
}

// within tells how long f took if that was too long.
func within(limit time.Duration, what string, f func()) error {
	began := time.Now()
	f()
	if took := time.Since(began); took > limit {
		return errors.New(what + " took " + took.String())
	}
	return nil
}

// openBeside opens another source, in a group of its own, and receives a message.
// The returned functions ack it, and close the source with a deadline, or without
// one; the ack cannot be told to anybody by then.
func (p *pipeline) openBeside(cfg *kafka.Config) (ack func(), shut func(limit time.Duration)) {
	p.t.Helper()
	cfg.Logger = slog.New(slog.DiscardHandler)
	s, err := kafka.Open(p.t.Context(), p.topic.brokers, servers.Name(p.t), []string{p.topic.name}, cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	ds, err := s.Receive(p.t.Context(), 1)
	if err != nil {
		p.t.Fatal(err)
	}
	ack = func() {
		if err := ds[0].Ack(p.t.Context()); err != nil {
			p.t.Error(err)
		}
	}
	return ack, func(limit time.Duration) {
		ctx := p.t.Context()
		if limit > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, limit)
			defer cancel()
		}
		if err := s.Close(ctx); err == nil {
			p.t.Error("Close returned nil although it could not commit the ack")
		} else {
			p.t.Logf("Close: %v", err)
		}
	}
}

// beside starts another consumer, in a group of its own; the returned function
// stops it.
func (p *pipeline) beside(source *kafka.Config, cfg *inbox.Config) (stop func()) {
	p.t.Helper()
	c := p.startIn(servers.Name(p.t), keyfunc.JSON("id"), effect, cfg, source)
	eventually(p.t, time.Minute, "another consumer has joined", func() bool { return c.source.Stats().Joined })
	return func() {
		c.cancel()
		<-c.done
	}
}
