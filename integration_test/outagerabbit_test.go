package integration_test

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

const outagePrefetch = 180

// rabbitOutage is a queue.
type rabbitOutage struct {
	*outage
	line   *rabbitLine
	source *rabbitmq.Source
	before rabbitmq.Stats
}

func newRabbitOutage(o *outage) outageBroker {
	return &rabbitOutage{outage: o, line: newRabbitLine(o.T, "quorum")}
}

func (o *rabbitOutage) produce(from, n, size int) {
	o.Helper()
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = fmt.Sprintf(`{"id":"m-%d","more":"%0*d"}`, from+i, size, 0)
	}
	o.line.publishBodies(bodies...)
}

func (o *rabbitOutage) open(log *slog.Logger) broker.Source {
	o.Helper()
	o.source = o.line.open(&rabbitmq.Config{Prefetch: outagePrefetch, Logger: log})
	return o.source
}

func (o *rabbitOutage) inFlight() int { return o.source.Stats().InFlight }

func (o *rabbitOutage) begin() { o.before = o.source.Stats() }

func (o *rabbitOutage) sample() {
	o.Helper()
	st := o.source.Stats()
	if !st.Consuming || st.Epochs != 1 || st.Host != o.before.Host {
		o.Errorf("the channel is lost: %+v", st)
	}
	if st.Acks != 0 {
		o.Errorf("%d are acked", st.Acks)
	}
	if st.InFlight > outageMaxInFlight || st.InFlight+st.Waiting > outagePrefetch {
		o.Errorf("%d deliveries are out, %d messages wait", st.InFlight, st.Waiting)
	}
}

func (o *rabbitOutage) half() {}

func (o *rabbitOutage) end(time.Duration) {
	o.Helper()
	eventually(o.T, time.Minute, "the broker has all messages, and some are out", func() bool {
		messages, unacked := o.line.totals()
		return messages == outageInFlight+outageFlood && unacked == outagePrefetch
	})
	n := o.line.counts().Stats
	o.Logf("the broker counts %+v", n)
	if n.Deliver > outagePrefetch || n.Redeliver != 0 || n.Ack != 0 {
		o.Errorf("the broker counts %+v, want %d deliveries and nothing else", n, outagePrefetch)
	}
}

func (o *rabbitOutage) drained() bool {
	messages, _ := o.line.totals()
	return messages == 0 && o.source.Stats().Acks == outageInFlight+outageFlood
}

func (o *rabbitOutage) check() {
	o.Helper()
	if st := o.source.Stats(); st.Epochs != 1 || st.Lost+st.Recalled+st.Returned != 0 {
		o.Errorf("%+v, want one channel from which nothing went back", st)
	}
	o.line.empty()
}
