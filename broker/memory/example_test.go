package memory_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
)

// order returns a message with a key.
func order(key, body string) *broker.Message {
	return &broker.Message{Key: []byte(key), Body: []byte(body)}
}

func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	queue := memory.New("orders", nil)
	queue.Publish(order("A1", "paid"), order("B2", "paid"), order("A1", "shipped"))

	source := queue.Source()
	deliveries, err := source.Receive(ctx, 10)
	if err != nil {
		fmt.Println(err)
	}
	for _, d := range deliveries {
		fmt.Printf("%s: %s %s, lane %s, attempt %d\n", d.Message.ID, d.Message.Key, d.Message.Body, d.Lane, d.Attempt)
		if err := d.Ack(ctx); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println(source.Close(ctx))
	_, err = source.Receive(ctx, 10)
	fmt.Println(errors.Is(err, broker.ErrClosed))

	// Output:
	// orders#1: A1 paid, lane orders/A1, attempt 1
	// orders#2: B2 paid, lane orders/B2, attempt 1
	// orders#3: A1 shipped, lane orders/A1, attempt 1
	// <nil>
	// true
}

// A replay: the message is the same, its broker id is not.
func ExampleQueue_Rewind() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	queue := memory.New("orders", nil)
	queue.Publish(order("A1", "paid"), order("B2", "paid"))
	source := queue.Source()
	defer func() { fmt.Println("closed:", source.Close(ctx)) }()

	for pass := 1; pass <= 2; pass++ {
		deliveries, err := source.Receive(ctx, 10)
		if err != nil {
			fmt.Println(err)
		}
		for _, d := range deliveries {
			fmt.Printf("pass %d: %s at position %v is %s\n", pass, d.Message.Key, d.Message.Position, d.Message.ID)
			if err := d.Ack(ctx); err != nil {
				fmt.Println(err)
			}
		}
		if pass == 1 {
			queue.Rewind()
		}
	}

	// Output:
	// pass 1: A1 at position 0 is orders#1
	// pass 1: B2 at position 1 is orders#2
	// pass 2: A1 at position 0 is orders#3
	// pass 2: B2 at position 1 is orders#4
	// closed: <nil>
}

// What a rebalance or a cut connection does: the work was for nothing, and its
// late ack harms nobody.
func ExampleSource_Revoke() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	queue := memory.New("orders", nil)
	queue.Publish(order("A1", "paid"))
	source := queue.Source()
	defer func() { fmt.Println("closed:", source.Close(ctx)) }()

	before, err := source.Receive(ctx, 1)
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println("lost:", source.Revoke(), before[0].Context().Err())

	again, err := source.Receive(ctx, 1)
	if err != nil {
		fmt.Println(err)
	}
	fmt.Println("late ack:", errors.Is(before[0].Ack(ctx), broker.ErrLost))
	fmt.Println("attempt", again[0].Attempt, "acked:", again[0].Ack(ctx))
	fmt.Println("refused:", queue.Stats().Refused)

	// Output:
	// lost: 1 context canceled
	// late ack: true
	// attempt 2 acked: <nil>
	// refused: 1
	// closed: <nil>
}

// Waiting for the end of all work.
func ExampleQueue_Drained() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	queue := memory.New("orders", nil)
	queue.Publish(order("A1", "paid"), order("B2", "paid"))

	impatient, stop := context.WithCancel(ctx)
	stop()
	fmt.Println(queue.Drained(impatient))

	source := queue.Source()
	defer func() { fmt.Println("closed:", source.Close(ctx)) }()
	deliveries, err := source.Receive(ctx, 10)
	if err != nil {
		fmt.Println(err)
	}
	for _, d := range deliveries {
		go func() {
			if err := d.Ack(ctx); err != nil {
				fmt.Println(err)
			}
		}()
	}
	fmt.Println(queue.Drained(ctx))
	fmt.Printf("%+v\n", queue.Stats())

	// Output:
	// memory: wait for "orders" to drain: 2 ready, 0 in flight: context canceled
	// <nil>
	// {Published:2 Ready:0 InFlight:0 Delivered:2 Acked:2 Nacked:0 Lost:0 Refused:0 Rewinds:0}
	// closed: <nil>
}

// Lanes by something else than the key, here by a header.
func ExampleConfig() {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()

	queue := memory.New("orders", &memory.Config{
		Lane: func(m *broker.Message) string {
			tenant, _ := m.Headers.Get("tenant")
			return string(tenant)
		},
	})
	queue.Publish(&broker.Message{Headers: broker.Headers{{Name: "tenant", Value: []byte("acme")}}}, &broker.Message{})

	source := queue.Source()
	defer func() { fmt.Println("closed:", source.Close(ctx)) }()
	deliveries, err := source.Receive(ctx, 10)
	if err != nil {
		fmt.Println(err)
	}
	for _, d := range deliveries {
		fmt.Printf("lane %q\n", d.Lane)
	}

	// Output:
	// lane "orders/acme"
	// lane ""
	// closed: <nil>
}
