package rabbitmq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

// A source hands out messages until they are acked. Here against a broker in this
// process.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	server, err := newFakeBroker(`{"orderId":"A1","eventType":"paid"}`, `{"orderId":"A2","eventType":"paid"}`)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.close()

	source, err := rabbitmq.Open(ctx, []string{server.url()}, "billing", &rabbitmq.Config{
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for left := 2; left > 0; {
		deliveries, err := source.Receive(ctx, 10)
		if err != nil {
			fmt.Println(err)
			return
		}
		for _, d := range deliveries {
			fmt.Printf("from %s: %s\n", d.Message.Source, d.Message.Body)
			if err := d.Ack(ctx); err != nil {
				fmt.Println(err)
			}
		}
		left -= len(deliveries)
	}
	if err := source.Close(ctx); err != nil { // sends what is still to be sent
		fmt.Println(err)
	}
	queued, acked := server.counts()
	fmt.Println("queued:", queued, "acked:", acked)
	// Output:
	// from rabbitmq:billing: {"orderId":"A1","eventType":"paid"}
	// from rabbitmq:billing: {"orderId":"A2","eventType":"paid"}
	// queued: 0 acked: 2
}

// What is wrong with the arguments is said before any broker is asked, and never
// shows a password.
func ExampleOpen() {
	ctx := context.Background()
	urls := []string{"amqp://billing:secret@rabbit-1/shop", "amqp://billing:secret@rabbit-2/shop"}

	_, err := rabbitmq.Open(ctx, urls, "", nil)
	fmt.Println(err)
	_, err = rabbitmq.Open(ctx, []string{"amqp://billing:sec/ret@rabbit-1/shop"}, "orders", nil)
	fmt.Println(err)
	_, err = rabbitmq.Open(ctx, urls, "orders", &rabbitmq.Config{Prefetch: -1})
	fmt.Println(err)
	// Output:
	// rabbitmq: open: queue: must not be blank
	// rabbitmq: open: urls[0]: must be amqp://user:password@host:port/vhost, or amqps://; what is special in a part must be written as %XX
	// rabbitmq: config: Prefetch = -1: must be from 1 to 65535: memory has to be bounded
}

// A missing queue is an error with its name; it is created only if Config.Declare
// says how.
func ExampleOpen_missingQueue() {
	server, err := newFakeBroker()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.close()
	_, err = rabbitmq.Open(context.Background(), []string{server.url()}, "biling", nil)
	fmt.Println(errors.Is(err, rabbitmq.ErrNoQueue))
	fmt.Println(err)
	// Output:
	// true
	// rabbitmq: open: queue does not exist: create it, or let Config.Declare do it: look for queue "biling": Exception (404) Reason: "NOT_FOUND - no queue 'biling' in vhost '/'"
}

// A queue with the order of its messages kept over several processes, and with a
// place for what nobody could handle.
func ExampleDeclare() {
	cfg := &rabbitmq.Config{
		Declare: &rabbitmq.Declare{
			Exchange:             "orders",
			BindingKeys:          []string{"order.*"},
			SingleActiveConsumer: true,
			DeadLetterExchange:   "orders.dead",
		},
		Lanes: rabbitmq.LaneByHeader("orderId"),
	}
	fmt.Println(cfg.Declare.Exchange, cfg.Lanes)
	// Output:
	// orders header:orderId
}

// A hook is told when the source consumes.
func ExampleConfig_hooks() {
	server, err := newFakeBroker()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.close()
	consuming := make(consumingPrinter, 1)
	source, err := rabbitmq.Open(context.Background(), []string{server.url()}, "billing", &rabbitmq.Config{
		Hooks:  []rabbitmq.Hook{consuming},
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(<-consuming)
	fmt.Println("healthy:", source.Health() == nil)
	if err := source.Close(context.Background()); err != nil {
		fmt.Println(err)
	}
	// Output:
	// epoch 1, prefetch 200
	// healthy: true
}

// consumingPrinter is a hook.
type consumingPrinter chan string

func (p consumingPrinter) OnConsuming(_ context.Context, e rabbitmq.ConsumingEvent) {
	p <- fmt.Sprintf("epoch %d, prefetch %d", e.Epoch, e.Prefetch)
}

// A publisher returns when the broker has the messages, and says which ones nobody
// takes.
func ExampleOpenPublisher() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	server, err := newFakeBroker()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.close()
	// The default exchange: the key is the queue's name.
	publisher, err := rabbitmq.OpenPublisher(ctx, []string{server.url()}, "", &rabbitmq.PublisherConfig{
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = publisher.Publish(ctx, &broker.Message{
		Key: []byte("billing"), Body: []byte(`{"orderId":"A1","eventType":"paid"}`),
		Headers: broker.Headers{{Name: rabbitmq.HeaderContentType, Value: []byte("application/json")}},
	})
	queued, _ := server.counts()
	fmt.Println(queued, err)
	if err := publisher.Close(ctx); err != nil {
		fmt.Println(err)
	}
	// Output:
	// 1 <nil>
}

// One message that no queue takes does not stop the others.
func ExamplePublisher_Publish() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	server, err := newFakeBroker()
	if err != nil {
		fmt.Println(err)
		return
	}
	defer server.close()
	publisher, err := rabbitmq.OpenPublisher(ctx, []string{server.url()}, "", &rabbitmq.PublisherConfig{
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = publisher.Close(ctx) }()
	err = publisher.Publish(ctx,
		&broker.Message{Key: []byte("billing"), Body: []byte("one")},
		&broker.Message{Key: []byte("biling"), Body: []byte("two")},
		&broker.Message{Key: []byte("billing"), Body: []byte("three")},
	)
	var failed *rabbitmq.PublishError
	if errors.As(err, &failed) {
		fmt.Println("not published:", failed.Failed, errors.Is(err, rabbitmq.ErrUnroutable))
	}
	queued, _ := server.counts()
	fmt.Println("queued:", queued)
	// Output:
	// not published: [1] true
	// queued: 2
}
