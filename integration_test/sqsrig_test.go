package integration_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/integration_test/servers"
)

// sqsEnvironment is what the default configuration chain of a source finds: the
// server takes any login.
var sqsEnvironment = map[string]string{
	"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}

// sqsKinds are the kinds of queues; true: FIFO.
var sqsKinds = map[string]bool{"standard": false, "fifo": true}

// sqsGroups is how many message groups a test has. This server takes the longer the
// more there are: with 2,000 of them a tenth of a second for each receive, and with
// 100 as long for each message that is sent to one of them while all are in flight
// and somebody waits.
const sqsGroups = 20

// sqsQueue is a queue of one test, and a client that is not ours.
type sqsQueue struct {
	*testing.T
	client  *awssqs.Client
	address string // of the server
	name    string
	url     string
	fifo    bool
	sent    int
}

// newSQSQueue makes a queue on the shared server; attributes may be nil.
func newSQSQueue(t *testing.T, fifo bool, attributes map[string]string) *sqsQueue {
	t.Helper()
	q := &sqsQueue{T: t, address: servers.SQS(t), name: servers.Name(t), fifo: fifo}
	transport := &http.Transport{}
	t.Cleanup(transport.CloseIdleConnections)
	q.client = awssqs.New(awssqs.Options{
		Region: sqsEnvironment["AWS_REGION"], BaseEndpoint: aws.String(q.address), HTTPClient: &http.Client{Transport: transport},
		Credentials: credentials.NewStaticCredentialsProvider("key", "secret", ""),
	})
	all := make(map[string]string)
	for name, value := range attributes {
		all[name] = value
	}
	if fifo {
		q.name += ".fifo"
		all["FifoQueue"] = "true"
	}
	ctx, cancel := q.within(time.Minute)
	defer cancel()
	made, err := q.client.CreateQueue(ctx, &awssqs.CreateQueueInput{QueueName: &q.name, Attributes: all})
	if err != nil {
		t.Fatal(err)
	}
	q.url = *made.QueueUrl
	t.Cleanup(func() {
		ctx, cancel := q.within(10 * time.Second)
		defer cancel()
		if _, err := q.client.DeleteQueue(ctx, &awssqs.DeleteQueueInput{QueueUrl: &q.url}); err != nil {
			t.Log(err)
		}
	})
	return q
}

// within bounds calls of the client; it works at the end of the test, too.
func (q *sqsQueue) within(limit time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(q.Context()), limit)
}

// sqsMessage is what is sent to a queue; a standard queue takes no notice of the
// group.
type sqsMessage struct{ group, body string }

// inGroups puts bodies into some groups, one after the other.
func inGroups(bodies ...string) []sqsMessage {
	messages := make([]sqsMessage, len(bodies))
	for i, body := range bodies {
		messages[i] = sqsMessage{"k" + strconv.Itoa(i%sqsGroups), body}
	}
	return messages
}

// send sends messages in this order.
func (q *sqsQueue) send(messages ...sqsMessage) {
	q.Helper()
	ctx, cancel := q.within(time.Minute)
	defer cancel()
	if err := q.trySend(ctx, messages...); err != nil {
		q.Fatal(err)
	}
}

func (q *sqsQueue) trySend(ctx context.Context, messages ...sqsMessage) error {
	for some := range slices.Chunk(messages, 10) {
		in := &awssqs.SendMessageBatchInput{QueueUrl: &q.url}
		for _, m := range some {
			q.sent++
			e := types.SendMessageBatchRequestEntry{Id: aws.String(strconv.Itoa(q.sent)), MessageBody: aws.String(m.body)}
			if q.fifo {
				e.MessageGroupId, e.MessageDeduplicationId = aws.String(m.group), aws.String(strconv.Itoa(q.sent))
			}
			in.Entries = append(in.Entries, e)
		}
		answer, err := q.client.SendMessageBatch(ctx, in)
		if err != nil {
			return err
		}
		if len(answer.Failed) > 0 {
			return fmt.Errorf("%d messages were not sent: %s", len(answer.Failed), aws.ToString(answer.Failed[0].Message))
		}
	}
	return nil
}

// depth returns how many messages can be received, now or after their delay, and how
// many are in flight. This server counts them exactly.
func (q *sqsQueue) depth() (visible, inFlight int) {
	q.Helper()
	ctx, cancel := q.within(time.Minute)
	defer cancel()
	answer, err := q.client.GetQueueAttributes(ctx, &awssqs.GetQueueAttributesInput{QueueUrl: &q.url, AttributeNames: []types.QueueAttributeName{types.QueueAttributeNameAll}})
	if err != nil {
		q.Fatal(err)
	}
	number := func(name types.QueueAttributeName) int {
		n, err := strconv.Atoi(answer.Attributes[string(name)])
		if err != nil {
			q.Fatalf("%s: %v", name, err)
		}
		return n
	}
	return number(types.QueueAttributeNameApproximateNumberOfMessages) + number(types.QueueAttributeNameApproximateNumberOfMessagesDelayed),
		number(types.QueueAttributeNameApproximateNumberOfMessagesNotVisible)
}

// drained tells whether nothing is in the queue and nothing in flight.
func (q *sqsQueue) drained() bool {
	q.Helper()
	visible, inFlight := q.depth()
	return visible == 0 && inFlight == 0
}

// empty checks that nothing is left.
func (q *sqsQueue) empty() {
	q.Helper()
	if visible, inFlight := q.depth(); visible != 0 || inFlight != 0 {
		q.Errorf("%d messages are left in %s, and %d are in flight", visible, q.name, inFlight)
	}
}

// arn is the queue's.
func (q *sqsQueue) arn() string {
	parts := strings.Split(q.url, "/")
	return strings.Join([]string{"arn:aws:sqs", sqsEnvironment["AWS_REGION"], parts[len(parts)-2], q.name}, ":")
}
