package rabbitmq

import (
	"math"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

func TestMessage(t *testing.T) {
	t.Parallel()
	when := time.Date(2026, 5, 17, 12, 30, 0, 0, time.FixedZone("", 7200))
	d := &amqp.Delivery{
		MessageId: "m-1", Timestamp: when, RoutingKey: "orders.paid", Exchange: "orders", Body: []byte("{}"),
		ContentType: "application/json", ContentEncoding: "gzip", CorrelationId: "c", ReplyTo: "r", Type: "t", AppId: "a",
		UserId: "u", Expiration: "60000", Priority: 7,
		Headers: amqp.Table{
			"text": "A1", "bytes": []byte{0, 255}, "empty": "", "none": nil, "true": true,
			"int8": int8(-3), "byte": byte(200), "int64": int64(math.MinInt64), "float": 0.1, "float32": float32(0.1),
			"time": when, "decimal": amqp.Decimal{Scale: 2, Value: -7}, "whole": amqp.Decimal{Value: 5},
			"table": amqp.Table{"b": int32(1), "a": []any{"x", nil, 1.5, []byte{0xff}, when, math.Inf(1), amqp.Decimal{Scale: 1, Value: 15}}},
			// An entry that a property has the name of, and one that claims to be one.
			"type": "of the table", "user-id": "forged",
		},
	}
	m := newMessage(d, "rabbitmq:billing", "billing#x.1.7")
	if m.ID != "m-1" || m.Source != "rabbitmq:billing" || string(m.Key) != "orders.paid" || string(m.Body) != "{}" || !m.Time.Equal(when) || m.Position.Known {
		t.Errorf("message %+v", m)
	}
	want := []struct{ name, value string }{
		{"content-type", "application/json"}, {"content-encoding", "gzip"}, {"correlation-id", "c"}, {"reply-to", "r"},
		{"type", "t"}, {"app-id", "a"}, {"user-id", "u"}, {"expiration", "60000"}, {"priority", "7"}, {"amqp-exchange", "orders"},
		{"byte", "200"}, {"bytes", "\x00\xff"}, {"decimal", "-0.07"}, {"empty", ""}, {"float", "0.1"}, {"float32", "0.1"},
		{"int64", "-9223372036854775808"}, {"int8", "-3"}, {"none", ""},
		{"table", `{"a":["x",null,1.5,"/w==","2026-05-17T10:30:00Z","+Inf",1.5],"b":1}`},
		{"text", "A1"}, {"time", "2026-05-17T10:30:00Z"}, {"true", "true"}, {"type", "of the table"}, {"whole", "5"},
	}
	for i, w := range want {
		if i >= len(m.Headers) {
			t.Fatalf("only %d headers, want %d", len(m.Headers), len(want))
		}
		if h := m.Headers[i]; h.Name != w.name || string(h.Value) != w.value {
			t.Errorf("header %d is %s = %q, want %s = %q", i, h.Name, h.Value, w.name, w.value)
		}
		if nothing := m.Headers[i].Value == nil; nothing != (w.name == "none") {
			t.Errorf("header %s is nil: %v", w.name, nothing)
		}
	}
	if len(m.Headers) != len(want) {
		t.Errorf("%d headers, want %d", len(m.Headers), len(want))
	}
}

// What a dead letter went through is readable.
func TestMessageOfADeadLetter(t *testing.T) {
	t.Parallel()
	m := newMessage(&amqp.Delivery{Headers: amqp.Table{"x-death": []any{amqp.Table{
		"count": int64(2), "queue": "billing", "reason": "rejected", "routing-keys": []any{"paid"},
	}}}}, "s", "id")
	got, ok := m.Headers.Get("x-death")
	const want = `[{"count":2,"queue":"billing","reason":"rejected","routing-keys":["paid"]}]`
	if !ok || string(got) != want {
		t.Errorf("x-death is %s, want %s", got, want)
	}
}

func TestMessageWithoutAnything(t *testing.T) {
	t.Parallel()
	m := newMessage(&amqp.Delivery{}, "rabbitmq:q", "q#x.1.7")
	if m.ID != "q#x.1.7" || m.Key != nil || m.Body == nil || len(m.Headers) != 0 || !m.Time.IsZero() {
		t.Errorf("message %+v", m)
	}
}

func TestLanes(t *testing.T) {
	t.Parallel()
	d := &amqp.Delivery{RoutingKey: "a b%", Headers: amqp.Table{"tenant": int32(7), "void": nil, "empty": ""}}
	for _, row := range []struct {
		lanes LaneBy
		want  string
	}{
		{LaneNone, ""},
		{LaneQueue, "q"},
		{LaneByRoutingKey, "q/a%20b%25"},
		{LaneByHeader("tenant"), "q/7"},
		{LaneByHeader("missing"), ""},
		{LaneByHeader("void"), ""},
		{LaneByHeader("empty"), "q/"},
	} {
		if got := row.lanes.laneOf("q", d); got != row.want || !row.lanes.valid() {
			t.Errorf("%q: lane %q, want %q", row.lanes, got, row.want)
		}
	}
	for _, wrong := range []LaneBy{"Queue", "header", LaneByHeader("")} {
		if wrong.valid() {
			t.Errorf("%q is valid", wrong)
		}
	}
}

func FuzzValues(f *testing.F) {
	f.Add("name", []byte{0, 255}, 1.5, int64(3), uint8(9))
	f.Fuzz(func(t *testing.T, name string, bytes []byte, number float64, whole int64, scale uint8) {
		table := amqp.Table{name: []any{name, bytes, number, float32(number), whole, amqp.Decimal{Scale: scale, Value: int32(whole)}, time.Unix(whole, 0)}}
		if len(text(table)) == 0 {
			t.Error("a table became nothing")
		}
		if got := string(text(bytes)); got != string(bytes) {
			t.Errorf("bytes %q became %q", bytes, got)
		}
	})
}
