package sqs

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/brokertest"
)

// serverURL returns the address of a real server, from ACKAFTER_TEST_SQS; without it
// the test is skipped, or fails if ACKAFTER_TEST_REQUIRE is 1.
func serverURL(t testing.TB) string {
	t.Helper()
	address := os.Getenv("ACKAFTER_TEST_SQS")
	if address == "" {
		if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
			t.Fatal("ACKAFTER_TEST_SQS is not set")
		}
		t.Skip("ACKAFTER_TEST_SQS is not set")
	}
	return address
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// newTestClient returns a client whose connections go with the test.
func newTestClient(t testing.TB, address string, through http.RoundTripper) *awssqs.Client {
	t.Helper()
	if through == nil {
		transport := &http.Transport{MaxIdleConnsPerHost: 50}
		t.Cleanup(transport.CloseIdleConnections)
		through = transport
	}
	return awssqs.New(awssqs.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(address), Credentials: credentials.NewStaticCredentialsProvider("key", "secret", ""),
		HTTPClient: &http.Client{Transport: through}, RetryMaxAttempts: 1,
	})
}

var queues atomic.Int64

// newQueue makes a queue that nothing else uses and returns its name and URL.
func newQueue(t testing.TB, client *awssqs.Client, fifo bool) (name, url string) {
	t.Helper()
	name = fmt.Sprintf("test-%d-%d", time.Now().UnixNano(), queues.Add(1))
	in := &awssqs.CreateQueueInput{Attributes: map[string]string{}}
	if fifo {
		name += fifoSuffix
		in.Attributes["FifoQueue"] = "true"
	}
	in.QueueName = &name
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	made, err := client.CreateQueue(ctx, in)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		_, _ = client.DeleteQueue(ctx, &awssqs.DeleteQueueInput{QueueUrl: made.QueueUrl})
	})
	return name, *made.QueueUrl
}

// What no queue of SQS can do: a body is text and not empty, a group has at most 128
// printable characters, attributes are not empty, their names unique; a sequence
// number has 20 digits; the server sets the time.
var withoutInGeneral = []brokertest.Feature{
	brokertest.Positions, brokertest.Committed, brokertest.Keys, brokertest.NilKey, brokertest.BinaryHeaders, brokertest.RepeatedHeaders,
	brokertest.BinaryBody, brokertest.EmptyBody, brokertest.NilBody, brokertest.Times, brokertest.Recall,
}

// TestConformance checks the rules that hold for every source.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		fifo    bool
		without []brokertest.Feature
	}{
		{"standard", false, []brokertest.Feature{brokertest.Lanes}},
		// Nothing of a group is received while something of it is in flight, so the rule
		// of the lane that waits, which receives two messages and then the third one,
		// cannot hold. TestGroupOrder looks at delays instead.
		{"fifo", true, []brokertest.Feature{brokertest.NackDelay}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			q := &conformance{url: serverURL(t), fifo: row.fifo}
			brokertest.Run(t, brokertest.Harness{
				Setup: q.setup, Without: append(row.without, withoutInGeneral...),
				Timing: brokertest.Timing{Idle: 8 * time.Second, Quiet: 500 * time.Millisecond, Wait: 60 * time.Second, Prompt: 10 * time.Second, Delay: 2 * time.Second},
			})
		})
	}
}

type conformance struct {
	url  string
	fifo bool
}

func (q *conformance) setup(t testing.TB) brokertest.Queue {
	client := newTestClient(t, q.url, nil)
	name, url := newQueue(t, client, q.fifo)
	network := &cuttable{transport: &http.Transport{MaxIdleConnsPerHost: 50}}
	t.Cleanup(network.transport.CloseIdleConnections)
	return brokertest.Queue{
		Open: func(ctx context.Context) (broker.Source, error) {
			s, err := Open(ctx, name, &Config{
				Client: newTestClient(t, q.url, network), VisibilityTimeout: 6 * time.Second, WaitTime: time.Second,
				MaxBackoff: 200 * time.Millisecond, RequestTimeout: 20 * time.Second, Logger: quiet(),
			})
			if err != nil {
				return nil, err
			}
			return &rigged{s, network}, nil
		},
		Publish: func(ctx context.Context, messages ...*broker.Message) error {
			for _, m := range messages {
				if err := q.publish(ctx, client, url, m); err != nil {
					return err
				}
			}
			return nil
		},
		Lose: func(ctx context.Context, source broker.Source) error {
			return lose(ctx, client, source.(*rigged).Source)
		},
		Crash: func(_ context.Context, source broker.Source) error {
			source.(*rigged).cancel() // Nothing is sent any more.
			return nil
		},
		Cut: func(context.Context) (func() error, error) {
			network.set(true)
			return func() error { network.set(false); return nil }, nil
		},
	}
}

func (q *conformance) publish(ctx context.Context, client *awssqs.Client, url string, m *broker.Message) error {
	in := &awssqs.SendMessageInput{QueueUrl: &url, MessageBody: aws.String(string(m.Body)), MessageAttributes: map[string]types.MessageAttributeValue{}}
	for _, h := range m.Headers {
		in.MessageAttributes[h.Name] = types.MessageAttributeValue{DataType: aws.String("String"), StringValue: aws.String(string(h.Value))}
	}
	if q.fifo {
		in.MessageGroupId = aws.String(base64.RawURLEncoding.EncodeToString(m.Key)) // a group has no spaces
		in.MessageDeduplicationId = aws.String(fmt.Sprint(queues.Add(1)))
	}
	_, err := client.SendMessage(ctx, in)
	return err
}

// rigged is a source whose connections go with it.
type rigged struct {
	*Source
	network *cuttable
}

func (r *rigged) Close(ctx context.Context) error {
	defer r.network.transport.CloseIdleConnections()
	return r.Source.Close(ctx)
}

// lose makes messages visible that are out, the last one first, as if their leases
// had ended.
func lose(ctx context.Context, client *awssqs.Client, s *Source) error {
	s.ledger.mu.Lock()
	var entries []*entry
	for _, e := range s.ledger.byID {
		if e.state == out {
			entries = append(entries, e)
			e.beatAt = time.Now().Add(time.Hour)
		}
	}
	s.ledger.mu.Unlock()
	slices.SortFunc(entries, func(a, b *entry) int { return int(b.place) - int(a.place) })
	var errs []error
	for _, e := range entries {
		_, err := client.ChangeMessageVisibility(ctx, &awssqs.ChangeMessageVisibilityInput{QueueUrl: &s.url, ReceiptHandle: &e.handle})
		errs = append(errs, err)
	}
	s.ledger.mu.Lock()
	defer s.ledger.mu.Unlock()
	for _, e := range entries {
		e.until = time.Now()
	}
	return errors.Join(errs...)
}

// cuttable is a network that can be cut.
type cuttable struct {
	transport *http.Transport
	mu        sync.Mutex
	isCut     bool
}

var errCut = errors.New("the network is cut")

func (c *cuttable) set(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.isCut = cut
}

// RoundTrip implements http.RoundTripper.
func (c *cuttable) RoundTrip(r *http.Request) (*http.Response, error) {
	c.mu.Lock()
	cut := c.isCut
	c.mu.Unlock()
	if cut {
		return nil, errCut
	}
	return c.transport.RoundTrip(r)
}
