package rabbitmq

import (
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
)

func TestPublishing(t *testing.T) {
	t.Parallel()
	when := time.Now()
	cfg := (*PublisherConfig)(nil).withDefaults()
	p, key, err := cfg.newPublishing(&broker.Message{
		ID: "id", Key: []byte("orders.paid"), Body: []byte("{}"), Time: when, Source: "rabbitmq:q", Position: broker.At(3),
		Headers: broker.Headers{
			{Name: "content-type", Value: []byte("application/json")}, {Name: "content-type", Value: []byte("second")},
			{Name: "content-encoding", Value: []byte("gzip")}, {Name: "correlation-id", Value: []byte("c")}, {Name: "reply-to", Value: []byte("r")},
			{Name: "type", Value: []byte("t")}, {Name: "app-id", Value: []byte("a")}, {Name: "priority", Value: []byte("7")},
			{Name: "user-id", Value: []byte("forged")}, {Name: "expiration", Value: []byte("1")}, {Name: "amqp-exchange", Value: []byte("x")},
			{Name: "x-delivery-count", Value: []byte("3")}, {Name: "x-stream-offset", Value: []byte("3")},
			{Name: "CC", Value: []byte(`["k"]`)}, {Name: "BCC", Value: []byte(`["k"]`)},
			{Name: "text", Value: []byte("ä")}, {Name: "bytes", Value: []byte{0xff}}, {Name: "empty", Value: []byte{}}, {Name: "nothing"},
			{Name: "via", Value: []byte("a")}, {Name: "via", Value: []byte("b")}, {Name: "via", Value: []byte("c")},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := amqp.Publishing{
		MessageId: "id", Timestamp: when, Body: []byte("{}"), DeliveryMode: amqp.Persistent, ContentType: "application/json", ContentEncoding: "gzip",
		CorrelationId: "c", ReplyTo: "r", Type: "t", AppId: "a", Priority: 7,
		Headers: amqp.Table{
			"content-type": "second", "text": "ä", "bytes": []byte{0xff}, "empty": "", "nothing": nil, "via": []any{"a", "b", "c"},
		},
	}
	if key != "orders.paid" || !reflect.DeepEqual(p, want) {
		t.Errorf("key %q, publishing %+v, want %+v", key, p, want)
	}
}

func TestPublishingLimits(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 256)
	cfg := (&PublisherConfig{MaxMessageBytes: 10}).withDefaults()
	for _, row := range []struct {
		message *broker.Message
		want    string
	}{
		{nil, "nil"},
		{&broker.Message{Body: make([]byte, 11)}, "its body has 11 bytes"},
		{&broker.Message{Key: []byte(long)}, "its key has 256 bytes"},
		{&broker.Message{Headers: broker.Headers{{Name: long}}}, "a header's name has 256 bytes"},
		{&broker.Message{Headers: broker.Headers{{Name: "a", Value: make([]byte, frameSize)}}}, "its headers have"},
		{&broker.Message{Headers: slices.Repeat(broker.Headers{{Name: "a", Value: make([]byte, 91)}}, 1400)}, "its headers have"},
	} {
		_, _, err := cfg.newPublishing(row.message)
		if err == nil || !strings.Contains(err.Error(), row.want) || errors.Is(err, ErrTooLarge) == (row.message == nil) {
			t.Errorf("%v, want %q", err, row.want)
		}
	}
	p, key, err := (&PublisherConfig{RoutingKey: "queue"}).withDefaults().newPublishing(&broker.Message{
		ID: long, Key: []byte("key"), Headers: broker.Headers{
			{Name: "type", Value: []byte(long)}, {Name: "priority", Value: []byte("256")}, {Name: "app-id"},
		},
	})
	if err != nil || key != "queue" || p.MessageId == "" || p.MessageId == long || p.Type != "" || p.Priority != 0 {
		t.Errorf("key %q, publishing %+v, %v", key, p, err)
	}
	if want := (amqp.Table{"type": long, "priority": "256", "app-id": nil}); !reflect.DeepEqual(p.Headers, want) {
		t.Errorf("headers %v, want %v", p.Headers, want)
	}
}
