package brokertest

import (
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Rule 20: deliveries that the broker takes away end their contexts, and their
// messages come again.
func lostComesAgain(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	r.lose(source, r.receive(source, bodies(messages)...)...)
	r.ack(r.receive(source, bodies(messages)...)...)
	r.quiet(source, "all messages are acked")
}

// Rule 21 (case R2): an ack that comes after the loss returns ErrLost and
// removes nothing: neither its own message, which was delivered again, nor
// another one.
func ackAfterLoss(r *rig) {
	messages := lane(3)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	r.ack(got[0])
	r.lose(source, got[1], got[2])

	again := r.receiveAtLeast(source, body(got[1]), body(got[2]))
	r.refuse(got[1], broker.ErrLost)
	r.refuse(got[1], broker.ErrSettled)
	for _, d := range again {
		if d.Settled() || d.Context().Err() != nil {
			r.Errorf("%s: the new delivery was touched by the late ack of the old one", body(d))
		}
	}
	r.close(source)

	next := r.open()
	r.ack(r.receiveAtLeast(next, body(got[1]), body(got[2]))...)
}

// Rule 22: what a crashed source had not acked comes to the next one.
func crashComesAgain(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	source := r.open()
	r.receive(source, bodies(messages)...)
	r.crash(source)
	next := r.open()
	r.ack(r.receive(next, bodies(messages)...)...)
	r.close(next)
	r.quiet(r.open(), "all messages are acked")
}

// Rule 23: deliveries stay with a source while nobody calls it, also beyond
// session timeouts and leases.
func idleKeepsDeliveries(r *rig) {
	messages := lane(2)
	r.publish(messages...)
	source := r.open()
	got := r.receive(source, bodies(messages)...)
	time.Sleep(r.timing.Idle)
	for _, d := range got {
		if err := d.Context().Err(); err != nil {
			r.Errorf("%s: the delivery was lost (%v) while the source was idle for %v", body(d), err, r.timing.Idle)
		}
	}
	r.ack(got...)
	r.close(source)
	r.quiet(r.open(), "all messages are acked")
}
