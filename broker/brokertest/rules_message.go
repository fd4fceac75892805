package brokertest

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// binary is every byte, in an order that is no valid UTF-8.
func binary() []byte {
	b := make([]byte, 0, 256)
	for i := 255; i >= 0; i-- {
		b = append(b, byte(i))
	}
	return b
}

// pass sends messages one after the other and returns them as they come.
func (r *rig) pass(messages ...*broker.Message) []*broker.Message {
	r.Helper()
	source := r.open()
	ctx, cancel := r.context()
	defer cancel()
	var got []*broker.Message
	for _, m := range messages {
		r.publish(m)
		deliveries, err := r.receiveOnce(ctx, source, 1)
		if err != nil {
			r.Fatalf("receive: %v", err)
		}
		r.ack(deliveries...)
		got = append(got, deliveries[0].Message)
	}
	return got
}

// Rule 50: a body comes through unchanged.
func bodySurvives(r *rig) {
	texts := [][]byte{[]byte(`{"orderId":"A1", "text":"ä € 𝄞"}`), bytes.Repeat([]byte("0123456789abcdef"), 4096)}
	if r.has(BinaryBody) {
		texts = append(texts, binary(), []byte{0})
	}
	if r.has(EmptyBody) {
		texts = append(texts, []byte{})
	}
	messages := make([]*broker.Message, len(texts))
	for i := range texts {
		messages[i] = &broker.Message{Key: []byte("k"), Body: texts[i]}
	}
	for i, m := range r.pass(messages...) {
		if !bytes.Equal(m.Body, texts[i]) {
			r.Errorf("a body of %d bytes came as %d other bytes: %.40q, want %.40q", len(texts[i]), len(m.Body), m.Body, texts[i])
		}
	}
}

// Rule 51: a nil body stays nil and an empty one stays empty.
func nilBodySurvives(r *rig) {
	got := r.pass(&broker.Message{Key: []byte("k")}, &broker.Message{Key: []byte("k"), Body: []byte{}})
	if got[0].Body != nil {
		r.Errorf("a nil body came as %q, want nil", got[0].Body)
	}
	if got[1].Body == nil || len(got[1].Body) != 0 {
		r.Errorf("an empty body came as %#v, want empty and not nil", got[1].Body)
	}
}

// Rule 52: a key comes through unchanged.
func keySurvives(r *rig) {
	keys := [][]byte{[]byte("order-1"), binary()}
	got := r.pass(&broker.Message{Key: keys[0], Body: []byte("m0")}, &broker.Message{Key: keys[1], Body: []byte("m1")})
	for i, m := range got {
		if !bytes.Equal(m.Key, keys[i]) {
			r.Errorf("the key %.40q came as %.40q", keys[i], m.Key)
		}
	}
}

// Rule 53: a nil key stays nil and an empty one stays empty.
func nilKeySurvives(r *rig) {
	got := r.pass(&broker.Message{Body: []byte("m0")}, &broker.Message{Key: []byte{}, Body: []byte("m1")})
	if got[0].Key != nil {
		r.Errorf("a nil key came as %q, want nil", got[0].Key)
	}
	if got[1].Key == nil || len(got[1].Key) != 0 {
		r.Errorf("an empty key came as %#v, want empty and not nil", got[1].Key)
	}
}

// Rule 54: headers come through; a broker may add its own.
func headersSurvive(r *rig) {
	want := broker.Headers{{Name: "content-type", Value: []byte("application/json")}, {Name: "trace", Value: []byte("00-abc-01")}}
	if r.has(BinaryHeaders) {
		want = append(want, broker.Header{Name: "bytes", Value: binary()}, broker.Header{Name: "empty", Value: []byte{}})
	}
	got := r.pass(&broker.Message{Key: []byte("k"), Body: []byte("m"), Headers: want})[0].Headers
	for _, h := range want {
		value, ok := got.Get(h.Name)
		if !ok {
			r.Errorf("the header %q did not come through", h.Name)
		} else if !bytes.Equal(value, h.Value) {
			r.Errorf("the header %q came as %.40q, want %.40q", h.Name, value, h.Value)
		}
	}
}

// Rule 55: a header that comes several times keeps all its values, in order.
func repeatedHeadersSurvive(r *rig) {
	sent := broker.Headers{
		{Name: "via", Value: []byte("a")}, {Name: "other", Value: []byte("x")}, {Name: "via", Value: []byte("b")}, {Name: "via", Value: []byte("a")},
	}
	got := r.pass(&broker.Message{Key: []byte("k"), Body: []byte("m"), Headers: sent})[0].Headers
	if values := got.Values("via"); string(bytes.Join(values, []byte(" "))) != "a b a" {
		r.Errorf("the values of a repeated header came as %q, want [a b a]", values)
	}
}

// Rule 56: a time comes through, to the second or better.
func timeSurvives(r *rig) {
	want := time.Now().Add(-time.Hour)
	got := r.pass(&broker.Message{Key: []byte("k"), Body: []byte("m"), Time: want})[0].Time
	if diff := got.Sub(want).Abs(); diff > time.Second {
		r.Errorf("the time %v came as %v", want, got)
	}
}

// byBody sorts deliveries of lane's messages as they were published.
func byBody(deliveries []*broker.Delivery) []*broker.Delivery {
	slices.SortFunc(deliveries, func(a, b *broker.Delivery) int { return strings.Compare(body(a), body(b)) })
	return deliveries
}

// Rule 57: messages have a source and a position, which grows within it and is
// the same when a message comes again.
func positionsGrow(r *rig) {
	messages := lane(5)
	r.publish(messages...)
	source := r.open()
	got := byBody(r.receive(source, bodies(messages)...))
	for i, d := range got {
		m := d.Message
		if m.Source == "" || !m.Position.Known {
			r.Fatalf("%s: source %q, position %+v; want both", body(d), m.Source, m.Position)
		}
		if i == 0 {
			continue
		}
		before := got[i-1].Message
		if m.Source != before.Source || m.Position.Offset <= before.Position.Offset {
			r.Errorf("%s is at %s %v and %s at %s %v, want one source and a growing position", body(got[i-1]), before.Source, before.Position, body(d), m.Source, m.Position)
		}
	}
	r.close(source)
	for i, d := range byBody(r.receive(r.open(), bodies(messages)...)) {
		if a, b := got[i].Message, d.Message; a.Source != b.Source || a.Position != b.Position {
			r.Errorf("%s was at %s %v and came again at %s %v", body(d), a.Source, a.Position, b.Source, b.Position)
		}
	}
}

// Rule 58: attempts count from 1, over nacks and over sources.
func attemptsCount(r *rig) {
	r.publish(message("k", "m0"))
	source := r.open()
	for want := 1; want <= 4; want++ {
		d := r.receive(source, "m0")[0]
		if d.Attempt != want {
			r.Errorf("delivery %d has the attempt %d", want, d.Attempt)
		}
		switch want {
		case 1, 2:
			r.nack(0, d)
		case 3:
			r.close(source)
			source = r.open()
		default:
			r.ack(d)
		}
	}
}

// Rule 59: a message that was handed over does not change, whatever is received
// after it.
func messagesStay(r *rig) {
	const n = 50
	source := r.open()
	var messages []*broker.Message
	for i := range n {
		messages = append(messages, &broker.Message{
			Key: fmt.Appendf(nil, "key-%02d", i), Body: fmt.Appendf(nil, "m%02d", i), Headers: broker.Headers{{Name: "n", Value: fmt.Appendf(nil, "%02d", i)}},
		})
	}
	r.publish(messages...)
	ctx, cancel := r.context()
	defer cancel()
	var got []*broker.Message
	var then []string
	for len(got) < n {
		deliveries, err := r.receiveOnce(ctx, source, 3)
		if err != nil {
			r.Fatalf("receive: %v; got only %d of %d", err, len(got), n)
		}
		for _, d := range deliveries {
			got = append(got, d.Message)
			then = append(then, describe(d.Message))
		}
		r.ack(deliveries...)
	}
	r.close(source)
	for i, m := range got {
		if now := describe(m); now != then[i] {
			r.Errorf("a message changed after it was handed over: it was %s, and is %s", then[i], now)
		}
	}
}

func describe(m *broker.Message) string {
	return fmt.Sprintf("key %q, headers %q, body %q, position %v of %q", m.Key, m.Headers, m.Body, m.Position, m.Source)
}
