package keyfunc

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/broker"
)

// orderBody is an order event of 300 bytes.
func orderBody() []byte {
	body := `{"eventType":"order.paid","orderId":"5f0c2f4e-8a5b-4a1e-9c2d-1b7a6e0d9f33","customer":{"id":48151623,"country":"DE"},"items":[{"sku":"K-1001","quantity":2,"price":12.5},{"sku":"K-2044","quantity":1,"price":89.9}],"total":114.9,"currency":"EUR","paidAt":"2026-01-31T12:34:56.789Z","note":"`
	return []byte(body + strings.Repeat("x", 300-len(body)-2) + `"}`)
}

func BenchmarkKey(b *testing.B) {
	body := orderBody()
	if len(body) != 300 {
		b.Fatalf("body of %d bytes", len(body))
	}
	m := &broker.Message{ID: "orders/3/4711", Key: []byte("A1"), Body: body, Headers: headers(
		"traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "ce_specversion", "1.0", "ce_type", "order.paid", "ce_source", "/orders", "ce_id", "4711", "tenant", "acme").Headers}
	framed := *m
	framed.Body = append([]byte("\x00\x00\x00\x00\x0c"), body...)
	zipped := *m
	zipped.Body = []byte(zip(b, string(body)))
	for _, bench := range []struct {
		name string
		f    Func
		m    *broker.Message
	}{
		{"JSON1", JSON("orderId"), m},
		{"JSON2", JSON("orderId", "eventType"), m},
		{"JSONNested", JSON("customer.id", "items.1.sku"), m},
		{"Header2", Header("ce_id", "tenant"), m},
		{"CloudEvents", CloudEvents(), m},
		{"JoinHeaderJSON2", Join(Header("tenant"), JSON("orderId", "eventType")), m},
		{"BodyHash", BodyHash(), m},
		{"HMACJSON1", HMAC(secret, JSON("orderId")), m},
		{"ConfluentJSON2", Unwrap(ConfluentFrame(), JSON("orderId", "eventType")), &framed},
		{"GzipJSON2", Unwrap(Gzip(0), JSON("orderId", "eventType")), &zipped},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bench.f.Key(bench.m); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	// What part of it is the syntax check, and what people usually write.
	b.Run("json.Valid", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if !json.Valid(body) {
				b.Fatal("not valid")
			}
		}
	})
	b.Run("json.Unmarshal2", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			var order struct{ OrderID, EventType string }
			if err := json.Unmarshal(body, &order); err != nil || order.OrderID+"|"+order.EventType == "" {
				b.Fatal(err)
			}
		}
	})
}

// TestAllocations keeps the promise of one allocation a key.
func TestAllocations(t *testing.T) { //nolint:paralleltest // AllocsPerRun counts what others allocate
	m := &broker.Message{Body: orderBody(), Headers: headers("tenant", "acme").Headers}
	f := Join(Header("tenant"), JSON("orderId", "eventType"))
	// The pool of buffers may be emptied at any time: an average below two.
	if n := testing.AllocsPerRun(200, func() { _, _ = f.Key(m) }); n >= 2 && !raceEnabled {
		t.Errorf("%v allocations a key", n)
	}
}
