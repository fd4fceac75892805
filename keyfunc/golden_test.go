package keyfunc

import (
	"testing"

	"github.com/ackafter/ackafter/broker"
)

// TestGolden pins the canonical form v1. Keys and definitions are stored in the
// databases of users and compared with those of later releases: a line of this
// table is never changed or removed. A form that must change gets a new version.
func TestGolden(t *testing.T) {
	t.Parallel()
	order := &broker.Message{
		ID:   "orders/3/4711",
		Key:  []byte("customer-7"),
		Body: []byte(`{"orderId":"A1","eventType":"order.paid","version":2,"amount":12.50,"order":{"id":17},"items":[{"id":"i0"}],"a.b":"dot","a,b":"x","odd":"a|b\\c","test":false,"email":"jane@example.org"}`),
		Headers: broker.Headers{
			{Name: "Tenant", Value: []byte("acme")}, {Name: "Event-Id", Value: []byte("e|1")},
			{Name: "ce_source", Value: []byte("/orders")}, {Name: "ce_id", Value: []byte("42")},
		},
	}
	framed := &broker.Message{Body: append([]byte("\x00\x00\x00\x00\x0c"), order.Body...)}
	custom := func(m *broker.Message) (string, error) { return string(m.Key[:8]), nil }

	tests := []struct {
		f               Func
		m               *broker.Message
		definition, key string
	}{
		{JSON("orderId"), order, `json:orderId;v1`, `A1`},
		{JSON("orderId", "eventType"), order, `json:orderId,eventType;v1`, `A1|order.paid`},
		{JSON("eventType", "orderId"), order, `json:eventType,orderId;v1`, `order.paid|A1`},
		{JSON("order.id", "version"), order, `json:order.id,version;v1`, `17|2`},
		{JSON("items.0.id", "amount", "test"), order, `json:items.0.id,amount,test;v1`, `i0|12.5|false`},
		{JSON(`a\.b`, "a,b"), order, `json:a\.b,a\,b;v1`, `dot|x`},
		{JSON("odd", "orderId"), order, `json:odd,orderId;v1`, `a\|b\\c|A1`},
		{Header("Event-Id"), order, `header:event-id;v1`, `e\|1`},
		{Header("Tenant", "Event-Id"), order, `header:tenant,event-id;v1`, `acme|e\|1`},
		{BrokerKey(), order, `broker-key;v1`, `customer-7`},
		{MessageID(), order, `message-id;v1`, `orders/3/4711`},
		{CloudEvents(), order, `cloudevents;v1`, `/orders|42`},
		{BodyHash(), &broker.Message{Body: []byte("abc")}, `body-hash:sha256;v1`, `ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad`},
		{Join(Header("tenant"), JSON("orderId", "version")), order, `join(header:tenant|json:orderId,version);v1`, `acme|A1|2`},
		{Join(First(JSON("id"), JSON("orderId", "version")), BrokerKey()), order, `join(first(json:id|json:orderId,version)|broker-key);v1`, `A1\|2|customer-7`},
		{First(JSON("id"), JSON("orderId")), order, `first(json:id|json:orderId);v1`, `A1`},
		{Prefix("pay:ment", JSON("orderId")), order, `prefix(pay\:ment|json:orderId);v1`, `pay:ment|A1`},
		{JSON("a|b(c);d:e"), &broker.Message{Body: []byte(`{"a|b(c);d:e":true}`)}, `json:a\|b\(c\)\;d\:e;v1`, `true`},
		{Custom("first 8 bytes; rev 2", custom), order, `custom:first 8 bytes\; rev 2;v1`, `customer`},
		{HMAC(secret, JSON("email")), order, `hmac(sha256-23d6b875|json:email);v1`, `04069048bffc80b57925e8bbd9e2404a3aa44ae8d7e559c134f48dec790c6973`},
		{HMAC(secret, JSON("odd", "email")), order, `hmac(sha256-23d6b875|json:odd,email);v1`, `539e15e045c33437745dbf3edaa9066fa776ef7bae327a706eac27ebf51e3d0e`},
		{Unwrap(ConfluentFrame(), JSON("orderId")), framed, `unwrap(confluent|json:orderId);v1`, `A1`},
		{Unwrap(ConfluentProtobufFrame(), BodyHash()), &broker.Message{Body: []byte("\x00\x00\x00\x00\x0c\x00abc")}, `unwrap(confluent-protobuf|body-hash:sha256);v1`, `ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad`},
		{Unwrap(Gzip(0), JSON("orderId")), &broker.Message{Body: []byte(zip(t, string(order.Body)))}, `unwrap(gzip|json:orderId);v1`, `A1`},
	}
	for _, tt := range tests {
		if got := tt.f.Definition(); got != tt.definition {
			t.Errorf("definition %s\nwant       %s", got, tt.definition)
		}
		if key := mustKey(t, tt.f, tt.m); key != tt.key {
			t.Errorf("%s: key %s, want %s", tt.definition, key, tt.key)
		}
	}
}
