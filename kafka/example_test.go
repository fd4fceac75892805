package kafka_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka"
)

// A source hands out records, and commits what was acked. Here against a broker
// in this process.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cluster.Close()
	brokers := cluster.ListenAddrs()
	transport := &kafkago.Transport{}
	defer transport.CloseIdleConnections()
	writer := &kafkago.Writer{Addr: kafkago.TCP(brokers...), Topic: "orders", BatchTimeout: time.Millisecond, Transport: transport}
	defer func() { _ = writer.Close() }()
	if err := writer.WriteMessages(ctx,
		kafkago.Message{Key: []byte("A1"), Value: []byte(`{"orderId":"A1","eventType":"paid"}`)},
		kafkago.Message{Key: []byte("A2"), Value: []byte(`{"orderId":"A2","eventType":"paid"}`)},
	); err != nil {
		fmt.Println(err)
		return
	}

	source, err := kafka.Open(ctx, brokers, "billing", []string{"orders"}, &kafka.Config{
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
			fmt.Printf("%s in lane %s: %s\n", d.Message.ID, d.Lane, d.Message.Body)
			if err := d.Ack(ctx); err != nil {
				fmt.Println(err)
			}
		}
		left -= len(deliveries)
	}
	if err := source.Close(ctx); err != nil {
		fmt.Println(err)
	}
	fmt.Println("committed:", cluster.GroupInfo("billing").Commits["orders"][0].Offset)
	// Output:
	// orders/0/0 in lane orders/0/A1: {"orderId":"A1","eventType":"paid"}
	// orders/0/1 in lane orders/0/A2: {"orderId":"A2","eventType":"paid"}
	// committed: 2
}

// A publisher writes messages, and returns when they are confirmed. Here against
// a broker in this process.
func ExampleOpenPublisher() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(3, "orders-dead"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cluster.Close()

	publisher, err := kafka.OpenPublisher(ctx, cluster.ListenAddrs(), "orders-dead", &kafka.PublisherConfig{
		MaxMessageBytes: 1000,
		Logger:          slog.New(slog.DiscardHandler),
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	err = publisher.Publish(ctx,
		&broker.Message{Key: []byte("A1"), Body: []byte(`{"orderId":"A1"}`), Headers: broker.Headers{{Name: "reason", Value: []byte("no such customer")}}},
		&broker.Message{Key: []byte("A2")}, // a tombstone
	)
	fmt.Println(err)
	err = publisher.Publish(ctx, &broker.Message{Key: []byte("A3"), Body: make([]byte, 5000)})
	fmt.Println(err, errors.Is(err, kafka.ErrTooLarge))
	if err := publisher.Close(ctx); err != nil {
		fmt.Println(err)
	}
	// Output:
	// <nil>
	// kafka: publish: message 0: message is too large: PublisherConfig.MaxMessageBytes allows 1000 bytes true
}

// What is wrong with the arguments is said before any broker is asked.
func ExampleOpen() {
	ctx := context.Background()
	brokers, topics := []string{"kafka-1:9092", "kafka-2:9092"}, []string{"orders"}

	_, err := kafka.Open(ctx, brokers, "", topics, nil)
	fmt.Println(err)
	_, err = kafka.Open(ctx, brokers, "billing", []string{"orders", "orders"}, nil)
	fmt.Println(err)
	_, err = kafka.Open(ctx, brokers, "billing", topics, &kafka.Config{DrainTimeout: time.Minute})
	fmt.Println(err)
	// Output:
	// kafka: open: group: must not be empty
	// kafka: open: topics[1] is "orders": is there twice
	// kafka: config: DrainTimeout = 1m0s: must be less than RebalanceTimeout (1m0s)
}

// A missing topic is an error with its name; it is never created.
func ExampleOpen_missingTopic() {
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cluster.Close()
	_, err = kafka.Open(context.Background(), cluster.ListenAddrs(), "billing", []string{"orders", "refunds"}, nil)
	fmt.Println(err)
	fmt.Println(errors.Is(err, kafka.ErrNoTopic))
	// Output:
	// kafka: open: topic does not exist: "refunds"
	// true
}

// A hook is told of a gap: messages that retention took before they were
// handled.
func ExampleConfig_hooks() {
	gaps := make(gapPrinter, 1)
	cluster, err := kfake.NewCluster(kfake.NumBrokers(1), kfake.SeedTopics(1, "orders"))
	if err != nil {
		fmt.Println(err)
		return
	}
	defer cluster.Close()
	transport := &kafkago.Transport{}
	defer transport.CloseIdleConnections()
	writer := &kafkago.Writer{Addr: kafkago.TCP(cluster.ListenAddrs()...), Topic: "orders", BatchTimeout: time.Millisecond, Transport: transport}
	defer func() { _ = writer.Close() }()
	open := func() (*kafka.Source, error) {
		return kafka.Open(context.Background(), cluster.ListenAddrs(), "billing", []string{"orders"}, &kafka.Config{
			Hooks:  []kafka.Hook{gaps},
			Logger: slog.New(slog.DiscardHandler),
		})
	}
	ctx := context.Background()
	for i := range 10 {
		if err := writer.WriteMessages(ctx, kafkago.Message{Value: []byte{byte(i)}}); err != nil {
			fmt.Println(err)
			return
		}
	}
	source, err := open()
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 2 { // two are handled
		deliveries, err := source.Receive(ctx, 1)
		if err != nil {
			fmt.Println(err)
			return
		}
		_ = deliveries[0].Ack(ctx)
	}
	_ = source.Close(ctx)
	_ = cluster.DeleteRecords("orders", 0, 8) // as retention does

	source, err = open()
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(<-gaps)
	_ = source.Close(ctx)
	// Output:
	// kafka: orders/0: offsets 2 to 7 (6) are gone before they were handled: the log begins at 8
}

// gapPrinter is a hook.
type gapPrinter chan string

func (p gapPrinter) OnGap(_ context.Context, e kafka.GapError) { p <- e.Error() }
