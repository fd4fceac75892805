package broker_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// printer is the smallest adapter's end of a delivery.
type printer struct{}

func (printer) Ack(_ context.Context, d *broker.Delivery) error {
	fmt.Println("broker: done with", d.Tag) //nolint:forbidigo // it is the output of the examples
	return nil
}

func (printer) Nack(_ context.Context, d *broker.Delivery, delay time.Duration) error {
	fmt.Println("broker: again in", delay, d.Tag) //nolint:forbidigo // it is the output of the examples
	return nil
}

// An adapter makes deliveries; the first settlement decides, and a delivery
// that is lost cannot be settled.
func ExampleNewDelivery() {
	epoch, lose := context.WithCancel(context.Background())
	defer lose()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()

	message := &broker.Message{ID: "orders/3/4711", Source: "kafka:orders/3", Position: broker.At(4711)}
	first := broker.NewDelivery(epoch, message, "orders/3/A1", printer{})
	first.Tag = "offset 4711"
	second := broker.NewDelivery(epoch, message, "orders/3/A1", printer{})
	second.Tag = "offset 4711"

	fmt.Println(first.Ack(ctx))
	fmt.Println(first.Nack(ctx, time.Minute))
	lose()
	fmt.Println(errors.Is(second.Ack(ctx), broker.ErrLost))

	// Output:
	// broker: done with offset 4711
	// <nil>
	// broker: nack "orders/3/4711": delivery is already settled
	// true
}

func ExampleDelivery_Nack() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	d := broker.NewDelivery(context.Background(), &broker.Message{}, "", printer{})
	d.Tag = "tag 1"
	fmt.Println(d.Nack(ctx, 30*time.Second))

	// Output:
	// broker: again in 30s tag 1
	// <nil>
}

func ExampleHeaders() {
	headers := broker.Headers{
		{Name: "content-type", Value: []byte("application/json")},
		{Name: "via", Value: []byte("a")},
		{Name: "via", Value: []byte("b")},
	}
	contentType, ok := headers.Get("content-type")
	fmt.Printf("%s %v\n", contentType, ok)
	_, ok = headers.Get("Content-Type") // names are compared exactly
	fmt.Println(ok)
	fmt.Printf("%s\n", headers.Values("via"))

	// Output:
	// application/json true
	// false
	// [a b]
}

func ExamplePosition() {
	var none broker.Position
	fmt.Printf("%q %v\n", none, none.Known)
	fmt.Printf("%q %v\n", broker.At(0), broker.At(0).Known)

	// Output:
	// "" false
	// "0" true
}

func ExampleMessage_Size() {
	small := &broker.Message{Key: []byte("A1"), Body: []byte(`{"orderId":"A1"}`)}
	large := &broker.Message{Key: []byte("A1"), Body: make([]byte, 1<<20)}
	fmt.Println(small.Size() < 1000, large.Size() > 1<<20)

	// Output:
	// true true
}
