package brokertest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Rule 40: messages with one key have one lane and come in the order in which
// they were published, however many calls it takes.
func laneOrder(r *rig) {
	const lanes, each = 3, 8
	var messages []*broker.Message
	want := make(map[string][]string)
	for i := range each {
		for l := range lanes {
			key := fmt.Sprintf("lane-%d", l)
			m := message(key, fmt.Sprintf("%s/%d", key, i))
			messages = append(messages, m)
			want[key] = append(want[key], string(m.Body))
		}
	}
	r.publish(messages...)
	source := r.open()
	got := make(map[string][]string)
	names := make(map[string]string)
	ctx, cancel := r.context()
	defer cancel()
	for received := 0; received < len(messages); {
		deliveries, err := r.receiveOnce(ctx, source, 4)
		if err != nil {
			r.Fatalf("receive: %v; got only %v", err, got)
		}
		received += len(deliveries)
		for _, d := range deliveries {
			key, _, _ := strings.Cut(body(d), "/")
			got[key] = append(got[key], body(d))
			if d.Lane == "" {
				r.Errorf("%s: the delivery has no lane", body(d))
			}
			if before, ok := names[key]; ok && before != d.Lane {
				r.Errorf("messages with the key %q are in the lanes %q and %q, want one", key, before, d.Lane)
			}
			names[key] = d.Lane
		}
		r.ack(deliveries...)
	}
	for key := range want {
		if !slices.Equal(got[key], want[key]) {
			r.Errorf("the lane of %q came as %v, want %v", key, got[key], want[key])
		}
	}
}

// Rule 41 (case S3): messages of a lane that are given back come again in their
// order, in whatever order they were given back, and before later ones.
func laneOrderAfterNack(r *rig) {
	messages := lane(4)
	r.publish(messages[:3]...)
	source := r.open()
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
		got := r.receiveInOrder(source, "m0", "m1", "m2")
		for _, i := range order {
			r.nack(0, got[i])
		}
	}
	r.publish(messages[3])
	r.ack(r.receiveInOrder(source, "m0", "m1", "m2", "m3")...)
	r.quiet(source, "all messages are acked")
}

// Rule 42: a lane keeps its order when a source is closed in the middle of it.
func laneOrderAfterClose(r *rig) {
	messages := lane(6)
	r.publish(messages[:5]...)
	source := r.open()
	got := r.receiveInOrder(source, "m0", "m1", "m2", "m3", "m4")
	r.ack(got[:2]...)
	r.close(source)
	r.publish(messages[5])
	r.ack(r.receiveInOrder(r.open(), "m2", "m3", "m4", "m5")...)
}

// Rule 43: a lane keeps its order when its deliveries are lost.
func laneOrderAfterLoss(r *rig) {
	messages := lane(4)
	r.publish(messages[:3]...)
	source := r.open()
	got := r.receiveInOrder(source, "m0", "m1", "m2")
	r.lose(source, got...)
	r.publish(messages[3])
	r.ack(r.receiveInOrder(source, "m0", "m1", "m2", "m3")...)
}

// Rule 44: a lane waits for its message that was given back with a delay.
func laneWaitsForDelayedNack(r *rig) {
	messages := lane(3)
	r.publish(messages[:2]...)
	source := r.open()
	got := r.receiveInOrder(source, "m0", "m1")
	start := time.Now()
	r.nack(r.timing.Delay, got[0])
	r.nack(0, got[1])
	r.publish(messages[2])
	again := r.receiveInOrder(source, "m0", "m1", "m2")
	if took := time.Since(start); took < r.timing.Delay {
		r.Errorf("the lane went on after %v, want not before the delay of %v", took, r.timing.Delay)
	}
	r.ack(again...)
}

// Rule 45: nothing of a lane is handed out while deliveries of it are recalled and
// not settled, so that what is given back comes before what was not delivered yet.
func laneWaitsForRecalled(r *rig) {
	messages := lane(3)
	r.publish(messages...)
	source := r.open()
	got := r.receiveInOrder(source, "m0", "m1")
	r.recall(source, got...)
	r.quiet(source, "deliveries of the lane are recalled and not settled")
	r.ack(got[0])
	r.nack(0, got[1])
	r.ackAll(source, true, "m1", "m2")
}
