package integration_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"os/exec"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/rabbitmq"
)

// Messages of clients that are not ours: properties and header values of all types
// arrive as they were sent, and as what a dead letter went through says; and they
// are kept with a dead letter of the inbox.
func TestRabbitForeignMessages(t *testing.T) {
	t.Parallel()
	for _, kind := range rabbitKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, kind)
			exchange := r.queue + "-exchange"
			if err := errors.Join(
				r.ch.ExchangeDeclare(exchange, "topic", false, true, false, false, nil),
				r.ch.QueueBind(r.queue, "#", exchange, false, nil),
			); err != nil {
				t.Fatal(err)
			}
			var mu sync.Mutex
			got := map[string]*inbox.Message{}
			c := r.start(func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				mu.Lock()
				defer mu.Unlock()
				got[m.MessageKey] = m
				if m.MessageKey == "dead-lettered" {
					return inbox.Permanent(errors.New("for a person"))
				}
				return effect(ctx, tx, m)
			}, nil, nil)
			when := time.Date(2026, 5, 17, 10, 30, 0, 0, time.UTC)
			wanted := map[string]foreignMessage{
				"over http":     r.publishOverHTTP(exchange, when),
				"binary":        r.publishBinary(exchange),
				"in C":          r.publishInC(exchange),
				"dead-lettered": r.publishDeadLetter(exchange, when),
			}
			r.api(http.MethodPost, "exchanges/%2F/"+exchange+"/publish", map[string]any{
				"properties": map[string]any{}, "routing_key": "", "payload": "", "payload_encoding": "string",
			}, nil)
			eventually(t, time.Minute, "all are done", func() bool {
				return c.count(inbox.FirstAttempt) == len(wanted)-1 && c.count(inbox.Dead) == 2
			})
			c.stop(t)
			for key, want := range wanted {
				if m := got[key]; m == nil {
					t.Errorf("%s: no such message", key)
				} else {
					want.check(t, key, &m.Message)
				}
			}
			r.checkForeignParked(wanted["dead-lettered"])
			r.empty()
		})
	}
}

// checkForeignParked checks the dead letters: the one that a handler refused has all
// that it came with, the one without anything has no key.
func (r *rabbitLine) checkForeignParked(want foreignMessage) {
	r.Helper()
	store, err := inboxpgx.New(r.pool)
	if err != nil {
		r.Fatal(err)
	}
	parked, err := store.ListParked(r.Context(), inbox.ParkedFilter{})
	if err != nil || len(parked) != 2 {
		r.Fatalf("%d dead letters, %v", len(parked), err)
	}
	for _, summary := range parked {
		p, err := store.GetParked(r.Context(), summary.ID)
		if err != nil {
			r.Fatal(err)
		}
		switch p.Reason {
		case inbox.ReasonPermanent:
			want.check(r.T, "parked", p.Message)
		case inbox.ReasonInvalidKey:
			if m := p.Message; len(m.Body) != 0 || m.Key != nil || !m.Time.IsZero() || m.ID == "" {
				r.Errorf("parked without anything: %+v", m)
			}
		default:
			r.Errorf("parked: %+v", p)
		}
	}
}

// foreignMessage is what a message has to be.
type foreignMessage struct {
	id, key string // of the broker
	body    string
	time    time.Time
	headers map[string]string
	// nothing are headers that have the value of nothing.
	nothing []string
	deaths  []map[string]any // x-death without its times
}

func (w foreignMessage) check(t *testing.T, what string, m *broker.Message) {
	t.Helper()
	if w.id != "" && m.ID != w.id || m.ID == "" || string(m.Key) != w.key || string(m.Body) != w.body || !m.Time.Equal(w.time) {
		t.Errorf("%s: id %q, key %q, time %v, body %q", what, m.ID, m.Key, m.Time, m.Body)
	}
	expected := len(w.headers) + len(w.nothing)
	for name, value := range w.headers {
		if got, ok := m.Headers.Get(name); !ok || string(got) != value {
			t.Errorf("%s: header %s is %q, want %q", what, name, got, value)
		}
	}
	for _, name := range w.nothing {
		if got, ok := m.Headers.Get(name); !ok || got != nil {
			t.Errorf("%s: header %s is %q, want nothing", what, name, got)
		}
	}
	if w.deaths != nil {
		expected++
		w.checkDeaths(t, what, m)
	}
	if len(m.Headers) != expected {
		t.Errorf("%s: %d headers, want %d: %v", what, len(m.Headers), expected, m.Headers)
	}
}

func (w foreignMessage) checkDeaths(t *testing.T, what string, m *broker.Message) {
	t.Helper()
	text, _ := m.Headers.Get("x-death")
	var deaths []map[string]any
	if err := json.Unmarshal(text, &deaths); err != nil {
		t.Errorf("%s: x-death is %s: %v", what, text, err)
		return
	}
	for _, d := range deaths {
		at, err := time.Parse(time.RFC3339, d["time"].(string))
		if err != nil || time.Since(at).Abs() > time.Hour {
			t.Errorf("%s: x-death is %s: %v", what, text, err)
		}
		delete(d, "time")
	}
	if !reflect.DeepEqual(deaths, w.deaths) {
		t.Errorf("%s: x-death is %s, want %v", what, text, w.deaths)
	}
}

// publishOverHTTP lets the broker itself make the message, out of JSON.
func (r *rabbitLine) publishOverHTTP(exchange string, when time.Time) foreignMessage {
	r.Helper()
	const body = `{"id":"over http","name":"Grüße"}`
	r.api(http.MethodPost, "exchanges/%2F/"+exchange+"/publish", map[string]any{
		"routing_key": "orders.paid", "payload": body, "payload_encoding": "string",
		"properties": map[string]any{
			"message_id": "m-1", "correlation_id": "c-1", "content_type": "application/json", "content_encoding": "identity",
			"reply_to": "answers", "type": "order.paid", "app_id": "shop", "user_id": "guest", "priority": 3, "delivery_mode": 2,
			"timestamp": when.Unix(),
			"headers": map[string]any{
				"text": "a ü", "int": 42, "negative": -7, "big": int64(1)<<53 + 1, "float": 0.25, "yes": true, "no": false,
				"list": []any{1, "two", false, map[string]any{"three": 3}}, "table": map[string]any{"b": "x", "a": []any{}},
			},
		},
	}, nil)
	return foreignMessage{
		id: "m-1", key: "orders.paid", body: body, time: when, headers: map[string]string{
			"content-type": "application/json", "content-encoding": "identity", "correlation-id": "c-1", "reply-to": "answers",
			"type": "order.paid", "app-id": "shop", "user-id": "guest", "priority": "3", "amqp-exchange": exchange,
			"text": "a ü", "int": "42", "negative": "-7", "big": "9007199254740993", "float": "0.25", "yes": "true", "no": "false",
			"list": `[1,"two",false,{"three":3}]`, "table": `{"a":[],"b":"x"}`,
		},
	}
}

// publishBinary sends a body that is no text.
func (r *rabbitLine) publishBinary(exchange string) foreignMessage {
	r.Helper()
	body := "{\"id\":\"binary\",\"more\":\"" + string(bytes.Repeat([]byte("x"), 200<<10)) + "\"}\n\n" // more than a frame
	r.api(http.MethodPost, "exchanges/%2F/"+exchange+"/publish", map[string]any{
		"routing_key": "ü", "payload": base64.StdEncoding.EncodeToString([]byte(body)), "payload_encoding": "base64", "properties": map[string]any{},
	}, nil)
	return foreignMessage{key: "ü", body: body, headers: map[string]string{"amqp-exchange": exchange}}
}

// publishInC sends one by the client in C.
func (r *rabbitLine) publishInC(exchange string) foreignMessage {
	r.Helper()
	path, err := exec.LookPath("amqp-publish")
	if err != nil {
		missing(r.T, "amqp-publish is not installed")
	}
	const body = `{"id":"in C"}`
	cmd := exec.CommandContext(r.Context(), path, "--url="+strings.TrimSuffix(r.server.URL, "/"), "-e", exchange, "-r", "orders.C", "-p", "-C", "text/json", "-E", "utf-8",
		"-H", "traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "-H", "empty:", "-b", body)
	if out, err := cmd.CombinedOutput(); err != nil {
		r.Fatalf("amqp-publish: %v: %s", err, out)
	}
	return foreignMessage{key: "orders.C", body: body, headers: map[string]string{
		"content-type": "text/json", "content-encoding": "utf-8", "amqp-exchange": exchange, "empty": "",
		"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
	}}
}

// publishDeadLetter sends one with values of all types that the protocol has through
// a queue in which it grows too old.
func (r *rabbitLine) publishDeadLetter(exchange string, when time.Time) foreignMessage {
	r.Helper()
	waiting := r.queue + "-waiting"
	if _, err := r.ch.QueueDeclare(waiting, false, true, false, false, amqp.Table{"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": "late"}); err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _, _ = r.channel().QueueDelete(waiting, false, false, false) })
	const body = `{"id":"dead-lettered"}`
	confirm, err := r.ch.PublishWithDeferredConfirmWithContext(r.Context(), "", waiting, true, false, amqp.Publishing{
		Body: []byte(body), MessageId: "d-1", Timestamp: when, Expiration: "1", DeliveryMode: amqp.Persistent,
		Headers: amqp.Table{
			"int8": int8(-8), "uint8": byte(200), "int16": int16(-16), "uint16": uint16(65535), "int32": int32(-32),
			"int64": int64(-64), "float32": float32(0.5), "float64": 0.1, "decimal": amqp.Decimal{Scale: 2, Value: 12345},
			"bytes": []byte{0, 0xff}, "text": "t", "time": when, "nothing": nil,
			"table": amqp.Table{"list": []any{int32(1), "x", nil}},
		},
	})
	if err == nil {
		_, err = confirm.WaitContext(r.Context())
	}
	if err != nil {
		r.Fatal(err)
	}
	return foreignMessage{
		id: "d-1", key: "late", body: body, time: when, nothing: []string{"nothing"}, headers: map[string]string{
			"int8": "-8", "uint8": "200", "int16": "-16", "uint16": "65535", "int32": "-32",
			"int64": "-64", "float32": "0.5", "float64": "0.1", "decimal": "123.45",
			"bytes": "\x00\xff", "text": "t", "time": "2026-05-17T10:30:00Z", "table": `{"list":[1,"x",null]}`,
			"amqp-exchange": exchange, "x-first-death-exchange": "", "x-first-death-queue": waiting, "x-first-death-reason": "expired",
		},
		deaths: []map[string]any{{
			"count": 1.0, "exchange": "", "queue": waiting, "reason": "expired", "routing-keys": []any{waiting}, "original-expiration": "1",
		}},
	}
}

// A quorum queue counts how often a message came back, and says so in a header and
// in the attempt; a classic one does not count.
func TestRabbitDeliveryCount(t *testing.T) {
	t.Parallel()
	for _, kind := range rabbitKinds {
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			r := newRabbitLine(t, kind)
			r.publish(0, 1)
			for round := range 4 {
				s := r.open(&rabbitmq.Config{})
				d := receive(t, s, 1)[0]
				count, counted := d.Message.Headers.Get("x-delivery-count")
				attempt, text := round+1, []string{"", "1", "2", "3"}[round]
				if kind == "classic" || round == 0 { // not before it is known that the broker counts
					attempt, text = 0, ""
				}
				if d.Attempt != attempt || string(count) != text || counted != (text != "") {
					t.Errorf("round %d: attempt %d, count %q; want %d, %q", round, d.Attempt, count, attempt, text)
				}
				if err := s.Close(t.Context()); err != nil {
					t.Error(err)
				}
			}
			c := r.start(effect, nil, nil)
			eventually(t, time.Minute, "it is done", func() bool { return c.count(inbox.FirstAttempt) == 1 })
			c.stop(t)
			if a := c.outcomes[0].Attempt; a != 1 {
				t.Errorf("attempt %d of the handler, want 1: that a message came back says nothing of the handler", a)
			}
			r.empty()
		})
	}
}
