package sqs_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/sqs"
)

// shelf is a client of a queue in this process.
type shelf struct {
	sqs.Client // the calls that an example does not use

	mu       sync.Mutex
	messages []types.Message
	deleted  int
	visible  []string // messages that were given back, and for how long they stay hidden
}

func put(bodies ...string) *shelf {
	s := &shelf{}
	for i, body := range bodies {
		id := fmt.Sprintf("id-%d", i+1)
		s.messages = append(s.messages, types.Message{
			MessageId: &id, ReceiptHandle: &id, Body: &body,
			Attributes:        map[string]string{"MessageGroupId": "customer-7", "ApproximateReceiveCount": "1"},
			MessageAttributes: map[string]types.MessageAttributeValue{"eventType": {DataType: aws.String("String"), StringValue: aws.String("paid")}},
		})
	}
	return s
}

//nolint:revive // it is the client's name
func (s *shelf) GetQueueUrl(context.Context, *awssqs.GetQueueUrlInput, ...func(*awssqs.Options)) (*awssqs.GetQueueUrlOutput, error) {
	return &awssqs.GetQueueUrlOutput{QueueUrl: aws.String("https://sqs.eu-central-1.amazonaws.com/123456789012/orders.fifo")}, nil
}

func (s *shelf) GetQueueAttributes(context.Context, *awssqs.GetQueueAttributesInput, ...func(*awssqs.Options)) (*awssqs.GetQueueAttributesOutput, error) {
	return &awssqs.GetQueueAttributesOutput{}, nil
}

func (s *shelf) ReceiveMessage(ctx context.Context, in *awssqs.ReceiveMessageInput, _ ...func(*awssqs.Options)) (*awssqs.ReceiveMessageOutput, error) {
	s.mu.Lock()
	n := min(int(in.MaxNumberOfMessages), len(s.messages))
	got := s.messages[:n]
	s.messages = s.messages[n:]
	s.mu.Unlock()
	if n == 0 {
		<-ctx.Done() // a long poll
		return nil, ctx.Err()
	}
	return &awssqs.ReceiveMessageOutput{Messages: got}, nil
}

func (s *shelf) DeleteMessage(context.Context, *awssqs.DeleteMessageInput, ...func(*awssqs.Options)) (*awssqs.DeleteMessageOutput, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleted++
	return &awssqs.DeleteMessageOutput{}, nil
}

func (s *shelf) DeleteMessageBatch(_ context.Context, in *awssqs.DeleteMessageBatchInput, _ ...func(*awssqs.Options)) (*awssqs.DeleteMessageBatchOutput, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.deleted += len(in.Entries)
	answer := &awssqs.DeleteMessageBatchOutput{}
	for _, e := range in.Entries {
		answer.Successful = append(answer.Successful, types.DeleteMessageBatchResultEntry{Id: e.Id})
	}
	return answer, nil
}

func (s *shelf) ChangeMessageVisibility(_ context.Context, in *awssqs.ChangeMessageVisibilityInput, _ ...func(*awssqs.Options)) (*awssqs.ChangeMessageVisibilityOutput, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.visible = append(s.visible, fmt.Sprintf("%s in %d s", *in.ReceiptHandle, in.VisibilityTimeout))
	return &awssqs.ChangeMessageVisibilityOutput{}, nil
}

// A source hands out messages until they are acked. Here from a client in this
// process.
func Example() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	queue := put(`{"orderId":"A1"}`, `{"orderId":"A2"}`)
	source, err := sqs.Open(ctx, "orders.fifo", &sqs.Config{Client: queue, Logger: slog.New(slog.DiscardHandler)})
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
			kind, _ := d.Message.Headers.Get("eventType")
			fmt.Printf("%s %s in the lane %s: %s\n", d.Message.Source, kind, d.Lane, d.Message.Body)
			if err := d.Ack(ctx); err != nil {
				fmt.Println(err)
			}
		}
		left -= len(deliveries)
	}
	if err := source.Close(ctx); err != nil { // sends what is still to be sent
		fmt.Println(err)
	}
	fmt.Println("deleted:", queue.deleted)

	// Output:
	// sqs:orders.fifo paid in the lane orders.fifo/customer-7: {"orderId":"A1"}
	// sqs:orders.fifo paid in the lane orders.fifo/customer-7: {"orderId":"A2"}
	// deleted: 2
}

// What is given back takes with it what was received of its group after it: the last
// one becomes visible first, and none before the first one's delay is over.
func ExampleSource_Receive() {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	queue := put(`{"orderId":"A1"}`, `{"orderId":"A2"}`)
	source, err := sqs.Open(ctx, "orders.fifo", &sqs.Config{Client: queue, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		fmt.Println(err)
		return
	}
	deliveries, err := source.Receive(ctx, 2)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(deliveries[0].Nack(ctx, 30*time.Second))
	fmt.Println(deliveries[1].Nack(ctx, 0))
	if err := source.Close(ctx); err != nil {
		fmt.Println(err)
	}
	for _, line := range queue.visible {
		fmt.Println(line)
	}

	// Output:
	// <nil>
	// <nil>
	// id-2 in 30 s
	// id-1 in 30 s
}

// What is wrong with the arguments is said before SQS is asked.
func ExampleOpen() {
	ctx := context.Background()
	_, err := sqs.Open(ctx, "arn:aws:sns:eu-central-1:123456789012:orders", nil)
	fmt.Println(err)
	_, err = sqs.Open(ctx, "my orders", nil)
	fmt.Println(err)
	_, err = sqs.Open(ctx, "orders", &sqs.Config{VisibilityTimeout: 1500 * time.Millisecond})
	fmt.Println(err)

	// Output:
	// sqs: open: this is no name, URL or ARN of a queue: ARN "arn:aws:sns:eu-central-1:123456789012:orders": is of the service "sns", not sqs; it must be arn:PARTITION:sqs:REGION:ACCOUNT:NAME
	// sqs: open: this is no name, URL or ARN of a queue: queue "my orders": has ' ': letters, digits, - and _ are allowed, and .fifo at the end
	// sqs: config: VisibilityTimeout = 1.5s: must be whole seconds
}
