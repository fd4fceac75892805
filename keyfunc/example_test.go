package keyfunc_test

import (
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/keyfunc"
)

// order is an event as it comes from a broker.
func order() *broker.Message {
	return &broker.Message{
		ID:      "orders/3/4711",
		Key:     []byte("customer-7"),
		Headers: broker.Headers{{Name: "tenant", Value: []byte("acme")}, {Name: "Event-Id", Value: []byte("e-17")}},
		Body:    []byte(`{"orderId":"A1","eventType":"order.paid","customer":{"id":7,"email":"jane@example.org"},"items":[{"sku":"K-1001"}],"amount":12.50}`),
	}
}

// show returns the definition and the key, or the error.
func show(f keyfunc.Func, m *broker.Message) string {
	key, err := f.Key(m)
	if err != nil {
		return err.Error()
	}
	return f.Definition() + " -> " + key
}

func ExampleJSON() {
	// One order has several events, so the order's id alone is not a key.
	fmt.Println(show(keyfunc.JSON("orderId", "eventType"), order()))
	// Output:
	// json:orderId,eventType;v1 -> A1|order.paid
}

func ExampleJSON_paths() {
	m := order()
	fmt.Println(show(keyfunc.JSON("customer.id", "items.0.sku", "amount"), m))
	m.Body = []byte(`{"order.id":"A1"}`)
	fmt.Println(show(keyfunc.JSON(`order\.id`), m))
	// Output:
	// json:customer.id,items.0.sku,amount;v1 -> 7|K-1001|12.5
	// json:order\.id;v1 -> A1
}

func ExampleJSON_notTrusted() {
	key := keyfunc.JSON("order.id")
	for _, body := range []string{
		`{"order":{}}`,
		`{"order":{"id":null}}`,
		`{"order":{"id":"  "}}`,
		`{"order":{"id":"a\u0000b"}}`,
		`{"order":{"id":"\ud800"}}`,
		`{"order":{"id":"A1","id":"A2"}}`,
		`{"order":{"id":"A1"}} {"order":{"id":"A2"}}`,
		"\x00\x00\x00\x00\x0c" + `{"order":{"id":"A1"}}`,
	} {
		fmt.Println(show(key, &broker.Message{Body: []byte(body)}))
	}
	// Output:
	// keyfunc: json "order.id": is missing
	// keyfunc: json "order.id": is null, must be a string, a number or a boolean
	// keyfunc: json "order.id": is blank
	// keyfunc: json "order.id": holds a NUL character
	// keyfunc: json "order.id": holds a lone surrogate
	// keyfunc: json "order.id": is repeated
	// keyfunc: json: body is not JSON: first byte is 0x7b, data follows the JSON value at byte 21
	// keyfunc: json: body is not JSON: first byte is 0x00, as in the frame of a schema registry (see ConfluentFrame)
}

func ExampleHeader() {
	fmt.Println(show(keyfunc.Header("Event-Id"), order()))
	// Output:
	// header:event-id;v1 -> e-17
}

func ExampleBrokerKey() {
	// The record key says whose events these are; the type tells them apart.
	fmt.Println(show(keyfunc.Join(keyfunc.BrokerKey(), keyfunc.JSON("eventType")), order()))
	// Output:
	// join(broker-key|json:eventType);v1 -> customer-7|order.paid
}

func ExampleMessageID() {
	// The last resort: a replayed message has another id and runs again.
	fmt.Println(show(keyfunc.MessageID(), order()))
	// Output:
	// message-id;v1 -> orders/3/4711
}

func ExampleCloudEvents() {
	binary := &broker.Message{Headers: broker.Headers{
		{Name: "ce_specversion", Value: []byte("1.0")},
		{Name: "ce_source", Value: []byte("/orders")},
		{Name: "ce_id", Value: []byte("17")},
	}}
	structured := &broker.Message{
		Headers: broker.Headers{{Name: "content-type", Value: []byte("application/cloudevents+json; charset=utf-8")}},
		Body:    []byte(`{"specversion":"1.0","id":"17","source":"/orders","data":{"orderId":"A1"}}`),
	}
	fmt.Println(show(keyfunc.CloudEvents(), binary))
	fmt.Println(show(keyfunc.CloudEvents(), structured))
	// Output:
	// cloudevents;v1 -> /orders|17
	// cloudevents;v1 -> /orders|17
}

func ExampleJoin() {
	fmt.Println(show(keyfunc.Join(keyfunc.Header("tenant"), keyfunc.JSON("orderId", "eventType")), order()))

	// Two tuples never have the same text.
	pair := keyfunc.JSON("a", "b")
	fmt.Println(show(pair, &broker.Message{Body: []byte(`{"a":"x|y","b":"z"}`)}))
	fmt.Println(show(pair, &broker.Message{Body: []byte(`{"a":"x","b":"y|z"}`)}))
	// Output:
	// join(header:tenant|json:orderId,eventType);v1 -> acme|A1|order.paid
	// json:a,b;v1 -> x\|y|z
	// json:a,b;v1 -> x|y\|z
}

func ExampleFirst() {
	// The id moved from "id" to "orderId".
	key := keyfunc.First(keyfunc.JSON("orderId"), keyfunc.JSON("id"))
	for _, body := range []string{`{"orderId":"A1"}`, `{"id":"A1"}`, `{"orderId":null,"id":"A1"}`, `{}`} {
		fmt.Println(show(key, &broker.Message{Body: []byte(body)}))
	}
	// Output:
	// first(json:orderId|json:id);v1 -> A1
	// first(json:orderId|json:id);v1 -> A1
	// keyfunc: json "orderId": is null, must be a string, a number or a boolean
	// keyfunc: first: no alternative is there (json "orderId": is missing; json "id": is missing)
}

func ExamplePrefix() {
	// An order and a refund may have the same number.
	key := keyfunc.First(
		keyfunc.Prefix("order", keyfunc.JSON("orderId")),
		keyfunc.Prefix("refund", keyfunc.JSON("refundId")),
	)
	fmt.Println(show(key, &broker.Message{Body: []byte(`{"orderId":17}`)}))
	fmt.Println(show(key, &broker.Message{Body: []byte(`{"refundId":17}`)}))
	// Output:
	// first(prefix(order|json:orderId)|prefix(refund|json:refundId));v1 -> order|17
	// first(prefix(order|json:orderId)|prefix(refund|json:refundId));v1 -> refund|17
}

func ExampleBodyHash() {
	fmt.Println(show(keyfunc.BodyHash(), &broker.Message{Body: []byte("abc")}))
	// Output:
	// body-hash:sha256;v1 -> ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad
}

func ExampleHMAC() {
	secret, err := hex.DecodeString("6b1d0c1f5e0a4c7b9f3e2d8a7c6b5a49382716051423324150617283948a9b0c")
	if err != nil {
		fmt.Println(err)
		return
	}
	// The address is neither stored nor logged.
	fmt.Println(show(keyfunc.HMAC(secret, keyfunc.JSON("customer.email")), order()))
	// Output:
	// hmac(sha256-f27b5980|json:customer.email);v1 -> fc99d30643cb2bee8858f2b9cfcc1a235d879fdee996ec531e359dc1d49e4f12
}

func ExampleUnwrap() {
	// A topic in which only newer messages have the registry's prefix.
	key := keyfunc.First(
		keyfunc.Unwrap(keyfunc.ConfluentFrame(), keyfunc.JSON("orderId")),
		keyfunc.JSON("orderId"),
	)
	fmt.Println(show(key, &broker.Message{Body: []byte("\x00\x00\x00\x00\x0c" + `{"orderId":"A1"}`)}))
	fmt.Println(show(key, &broker.Message{Body: []byte(`{"orderId":"A1"}`)}))
	// Output:
	// first(unwrap(confluent|json:orderId)|json:orderId);v1 -> A1
	// first(unwrap(confluent|json:orderId)|json:orderId);v1 -> A1
}

func ExampleConfluentFrame() {
	m := &broker.Message{Body: []byte("\x00\x00\x00\x00\x0c" + `{"orderId":"A1"}`)}
	fmt.Println(show(keyfunc.Unwrap(keyfunc.ConfluentFrame(), keyfunc.JSON("orderId")), m))

	// A handler may use the frame as well.
	inner, err := keyfunc.ConfluentFrame().Strip(m)
	fmt.Println(string(inner.Body), err)
	// Output:
	// unwrap(confluent|json:orderId);v1 -> A1
	// {"orderId":"A1"} <nil>
}

func ExampleConfluentProtobufFrame() {
	// Field 1 of the message, a short string, taken out by hand; a real program
	// calls its generated code.
	id := keyfunc.Custom("orders.v1.Order.id", func(m *broker.Message) (string, error) {
		if len(m.Body) < 2 || m.Body[0] != 1<<3|2 || len(m.Body) < 2+int(m.Body[1]) {
			return "", keyfunc.ErrMissing
		}
		return string(m.Body[2 : 2+int(m.Body[1])]), nil
	})
	fmt.Println(show(keyfunc.Unwrap(keyfunc.ConfluentProtobufFrame(), id), &broker.Message{Body: []byte("\x00\x00\x00\x00\x0c" + "\x00" + "\x0a\x02A1")}))
	// Output:
	// unwrap(confluent-protobuf|custom:orders.v1.Order.id);v1 -> A1
}

func ExampleGzip() {
	key := keyfunc.Unwrap(keyfunc.Gzip(1<<20), keyfunc.JSON("orderId"))
	body, err := hex.DecodeString("1f8b0800000000000203ab56ca2f4a492df24c51b252723454aa05001f069a5e10000000")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(show(key, &broker.Message{Body: body}))
	fmt.Println(show(key, &broker.Message{Body: []byte(`{"orderId":"A1"}`)}))
	// Output:
	// unwrap(gzip|json:orderId);v1 -> A1
	// keyfunc: gzip: body is not gzip, which begins with 0x1f 0x8b: first byte is 0x7b
}

func ExampleCustom() {
	// A binary record key, written out so that people can read it.
	key := keyfunc.Custom("record key in hex", func(m *broker.Message) (string, error) {
		if m.Key == nil {
			return "", keyfunc.ErrMissing
		}
		return hex.EncodeToString(m.Key), nil
	})
	fmt.Println(show(key, &broker.Message{Key: []byte{0, 0, 0, 17}}))
	fmt.Println(show(key, &broker.Message{}))
	// Output:
	// custom:record key in hex;v1 -> 00000011
	// keyfunc: custom "record key in hex": function found no key
}

func ExampleValidate() {
	for _, f := range []keyfunc.Func{nil, keyfunc.JSON(), keyfunc.JSON("a..b"), keyfunc.Join(keyfunc.JSON("id"), nil), keyfunc.JSON("id")} {
		fmt.Println(keyfunc.Validate(f))
	}
	// Output:
	// keyfunc: func: key function must not be nil
	// keyfunc: json: needs at least one path
	// keyfunc: json: path 1 has an empty step
	// keyfunc: join: part 2 cannot be used: keyfunc: func: key function must not be nil
	// <nil>
}

// serial is a Func of a user.
type serial struct{}

func (serial) Key(m *broker.Message) (string, error) { return m.ID, nil }
func (serial) Definition() string                    { return "serial number, rev 1" }

func ExampleDerive() {
	// Key of a foreign Func may return anything; Derive checks it.
	for _, id := range []string{"S-1", "", "S\x00"} {
		fmt.Println(keyfunc.Derive(serial{}, &broker.Message{ID: id}))
	}
	// Output:
	// S-1 <nil>
	//  keyfunc: key: is blank
	//  keyfunc: key: holds a NUL character
}

func ExampleCheck() {
	fmt.Println(keyfunc.Check("A1"))
	fmt.Println(keyfunc.Check("\u00a0"))
	// Output:
	// <nil>
	// keyfunc: key: is blank
}

func ExampleError() {
	_, err := keyfunc.JSON("customer.email").Key(&broker.Message{Body: []byte(`{"customer":{}}`)})
	var e *keyfunc.Error
	if errors.As(err, &e) {
		fmt.Println(e.Func, e.Field, e.Rule)
	}
	fmt.Println(errors.Is(err, keyfunc.ErrMissing), errors.Is(err, keyfunc.ErrInvalid))
	// Output:
	// json customer.email is missing
	// true true
}
