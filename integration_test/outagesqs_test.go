package integration_test

import (
	"fmt"
	"log/slog"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/sqs"
)

// outageLease is shorter than the outage: without a heartbeat the messages would
// come again meanwhile.
const outageLease = 5 * time.Second

// sqsOutage is a queue.
type sqsOutage struct {
	*outage
	queue  *sqsQueue
	source *sqs.Source
	before sqs.Stats
	middle sqs.Stats // at half of the outage
}

func newSQSOutage(o *outage) outageBroker {
	return &sqsOutage{outage: o, queue: newSQSQueue(o.T, false, nil)}
}

func newSQSFIFOOutage(o *outage) outageBroker {
	return &sqsOutage{outage: o, queue: newSQSQueue(o.T, true, nil)}
}

func (o *sqsOutage) produce(from, n, size int) {
	o.Helper()
	messages := make([]sqsMessage, n)
	for i := range messages {
		// All of the first ones are to be out, so they have groups of their own. The
		// others have other groups: this server takes half a second for ten messages
		// while all their groups are in flight and somebody waits for messages.
		id, group := from+i, ""
		if id < outageInFlight {
			group = fmt.Sprintf("k%d", id)
		} else {
			group = fmt.Sprintf("more%d", id%10)
		}
		messages[i] = sqsMessage{group, fmt.Sprintf(`{"id":"m-%d","more":"%0*d"}`, id, size, 0)}
	}
	o.queue.send(messages...)
}

func (o *sqsOutage) open(log *slog.Logger) broker.Source {
	o.Helper()
	var err error
	o.source, err = sqs.Open(o.Context(), o.queue.name, &sqs.Config{Endpoint: o.queue.address, VisibilityTimeout: outageLease, Logger: log})
	if err != nil {
		o.Fatal(err)
	}
	return o.source
}

func (o *sqsOutage) inFlight() int { return o.source.Stats().InFlight }

func (o *sqsOutage) begin() { o.before = o.source.Stats() }

func (o *sqsOutage) half() { o.middle = o.source.Stats() }

func (o *sqsOutage) sample() {
	o.Helper()
	st := o.source.Stats()
	if st.Lost+st.HeartbeatErrors+st.ReceiveErrors != 0 {
		o.Errorf("leases are lost, or SQS is: %+v", st)
	}
	if st.Acks+int64(st.Unsent) != 0 {
		o.Errorf("%d are acked", st.Acks+int64(st.Unsent))
	}
	if held := st.InFlight + st.Waiting; held > outageMaxInFlight {
		o.Errorf("%d deliveries are out, %d messages wait", st.InFlight, st.Waiting)
	}
}

func (o *sqsOutage) end(length time.Duration) {
	o.Helper()
	st := o.source.Stats()
	beats, received := st.Heartbeats-o.before.Heartbeats, st.Received-o.middle.Received
	visible, inFlight := o.queue.depth()
	o.Logf("%d leases renewed, in the second half %d messages received; the queue has %d messages, %d are in flight", beats, received, visible, inFlight)
	if visible+inFlight != outageInFlight+outageFlood || inFlight > outageMaxInFlight {
		o.Errorf("the queue has %d messages, and %d are in flight", visible, inFlight)
	}
	if received > 0 {
		o.Errorf("%d messages were received although nothing is handled", received)
	}
	// Every third of a lease, for each that is here; none of them in a hot loop.
	if most := int64(outageMaxInFlight) * (3*int64(length/outageLease) + 6); beats == 0 || beats > most {
		o.Errorf("%d leases were renewed, want at most %d", beats, most)
	}
}

func (o *sqsOutage) drained() bool { return o.queue.drained() }

func (o *sqsOutage) check() {
	o.Helper()
	// A heartbeat may come after the delete of its message.
	if st := o.source.Stats(); st.Lost+st.Redelivered+st.RefusedAcks+st.StaleAcks != 0 {
		o.Errorf("%+v, want no lease that ended", st)
	}
	o.queue.empty()
}
