package sqs

import (
	"cmp"
	"context"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/broker"
)

// fake is an SQS of one queue whose answers a test decides. It hands out what send
// was given, and forgets nothing that it is told.
type fake struct {
	mu       sync.Mutex
	messages []types.Message
	arrived  chan struct{} // closed when there is a message

	receives []int32    // how many were asked for
	asked    []string   // attributes that were asked for
	deletes  [][]string // the handles of each call, in the order of the calls
	alone    []string   // of those for one message
	changes  []change   // calls about one message
	beats    []change   // entries of batches
	happened chan string

	receiveErr func() error
	failDelete func(handle string, times int) *types.BatchResultErrorEntry // of batches
	failAlone  func(handle string, times int) error
	failBeat   func(handle string) *types.BatchResultErrorEntry
	tries      map[string]int
}

// change is a change of visibility.
type change struct {
	handle  string
	seconds int32
}

func newFake() *fake {
	return &fake{arrived: make(chan struct{}), happened: make(chan string, 10000), tries: make(map[string]int)}
}

// send makes messages available; a group makes it one of a FIFO queue.
func (f *fake) send(messages ...types.Message) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.messages = append(f.messages, messages...)
	close(f.arrived)
	f.arrived = make(chan struct{})
}

// message makes one; its id is its body, its handle is "h-" and its body.
func message(body, group string) types.Message {
	m := types.Message{MessageId: aws.String(body), Body: aws.String(body), ReceiptHandle: aws.String("h-" + body), Attributes: map[string]string{"ApproximateReceiveCount": "1"}}
	if group != "" {
		m.Attributes["MessageGroupId"] = group
	}
	return m
}

// again is a message with another handle.
func again(m types.Message, handle string) types.Message {
	m.ReceiptHandle = aws.String(handle)
	return m
}

//nolint:revive // it is the client's name
func (f *fake) GetQueueUrl(_ context.Context, in *awssqs.GetQueueUrlInput, _ ...func(*awssqs.Options)) (*awssqs.GetQueueUrlOutput, error) {
	return &awssqs.GetQueueUrlOutput{QueueUrl: aws.String("http://fake/1/" + *in.QueueName)}, nil
}

func (f *fake) GetQueueAttributes(context.Context, *awssqs.GetQueueAttributesInput, ...func(*awssqs.Options)) (*awssqs.GetQueueAttributesOutput, error) {
	return &awssqs.GetQueueAttributesOutput{}, nil
}

func (f *fake) ReceiveMessage(ctx context.Context, in *awssqs.ReceiveMessageInput, _ ...func(*awssqs.Options)) (*awssqs.ReceiveMessageOutput, error) {
	f.mu.Lock()
	f.receives = append(f.receives, in.MaxNumberOfMessages)
	f.asked = append(slices.Clone(in.MessageAttributeNames), string(in.MessageSystemAttributeNames[0]))
	f.mu.Unlock()
	f.happened <- "receive"
	over := time.After(time.Duration(in.WaitTimeSeconds) * time.Second)
	for {
		f.mu.Lock()
		if f.receiveErr != nil {
			if err := f.receiveErr(); err != nil {
				f.mu.Unlock()
				return nil, err
			}
		}
		n := min(int(in.MaxNumberOfMessages), len(f.messages))
		got := slices.Clone(f.messages[:n])
		f.messages = f.messages[n:]
		arrived := f.arrived
		f.mu.Unlock()
		if n > 0 {
			return &awssqs.ReceiveMessageOutput{Messages: got}, nil
		}
		select {
		case <-arrived:
		case <-over:
			return &awssqs.ReceiveMessageOutput{}, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (f *fake) DeleteMessage(_ context.Context, in *awssqs.DeleteMessageInput, _ ...func(*awssqs.Options)) (*awssqs.DeleteMessageOutput, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := *in.ReceiptHandle
	f.alone = append(f.alone, h)
	f.tries[h]++
	f.happened <- "delete"
	if f.failAlone != nil {
		if err := f.failAlone(h, f.tries[h]); err != nil {
			return nil, err
		}
	}
	return &awssqs.DeleteMessageOutput{}, nil
}

func (f *fake) DeleteMessageBatch(_ context.Context, in *awssqs.DeleteMessageBatchInput, _ ...func(*awssqs.Options)) (*awssqs.DeleteMessageBatchOutput, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := &awssqs.DeleteMessageBatchOutput{}
	var handles []string
	ids := make(map[string]bool)
	for _, e := range in.Entries {
		h := *e.ReceiptHandle
		if ids[*e.Id] {
			return nil, &types.BatchEntryIdsNotDistinct{}
		}
		ids[*e.Id] = true
		handles = append(handles, h)
		f.tries[h]++
		if f.failDelete != nil {
			if failed := f.failDelete(h, f.tries[h]); failed != nil {
				failed.Id = e.Id
				answer.Failed = append(answer.Failed, *failed)
				continue
			}
		}
		answer.Successful = append(answer.Successful, types.DeleteMessageBatchResultEntry{Id: e.Id})
	}
	f.deletes = append(f.deletes, handles)
	f.happened <- "delete batch"
	return answer, nil
}

func (f *fake) ChangeMessageVisibility(_ context.Context, in *awssqs.ChangeMessageVisibilityInput, _ ...func(*awssqs.Options)) (*awssqs.ChangeMessageVisibilityOutput, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.changes = append(f.changes, change{*in.ReceiptHandle, in.VisibilityTimeout})
	f.happened <- "change"
	return &awssqs.ChangeMessageVisibilityOutput{}, nil
}

func (f *fake) ChangeMessageVisibilityBatch(_ context.Context, in *awssqs.ChangeMessageVisibilityBatchInput, _ ...func(*awssqs.Options)) (*awssqs.ChangeMessageVisibilityBatchOutput, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	answer := &awssqs.ChangeMessageVisibilityBatchOutput{}
	for _, e := range in.Entries {
		f.beats = append(f.beats, change{*e.ReceiptHandle, e.VisibilityTimeout})
		if f.failBeat != nil {
			if failed := f.failBeat(*e.ReceiptHandle); failed != nil {
				failed.Id = e.Id
				answer.Failed = append(answer.Failed, *failed)
				continue
			}
		}
		answer.Successful = append(answer.Successful, types.ChangeMessageVisibilityBatchResultEntry{Id: e.Id})
	}
	f.happened <- "beat"
	return answer, nil
}

// await waits until that many calls of a kind have happened.
func (f *fake) await(t testing.TB, kind string, n int) {
	t.Helper()
	limit := time.After(30 * time.Second)
	for n > 0 {
		select {
		case k := <-f.happened:
			if k == kind {
				n--
			}
		case <-limit:
			t.Fatalf("%d calls of %q are missing", n, kind)
		}
	}
}

// sizes are how many entries the batches had, sorted.
func (f *fake) sizes() []int {
	f.mu.Lock()
	defer f.mu.Unlock()
	var sizes []int
	for _, d := range f.deletes {
		sizes = append(sizes, len(d))
	}
	slices.SortFunc(sizes, func(a, b int) int { return cmp.Compare(b, a) })
	return sizes
}

// openFake opens a source on a fake.
func openFake(t testing.TB, f *fake, queue string, cfg Config) *Source {
	t.Helper()
	if cfg.Client == nil {
		cfg.Client = f
	}
	if cfg.Logger == nil {
		cfg.Logger = quiet()
	}
	s, err := Open(t.Context(), queue, &cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		_ = s.Close(ctx)
	})
	return s
}

// receive takes exactly n deliveries.
func receive(t testing.TB, s *Source, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got []*broker.Delivery
	for len(got) < n {
		some, err := s.Receive(ctx, n-len(got))
		if err != nil {
			t.Fatalf("receive: %v after %d of %d", err, len(got), n)
		}
		got = append(got, some...)
	}
	return got
}

func ack(t testing.TB, deliveries ...*broker.Delivery) {
	t.Helper()
	for _, d := range deliveries {
		if err := d.Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// closeNow closes a source and returns its error.
func closeNow(t testing.TB, s *Source) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	return s.Close(ctx)
}

// bodies are those of deliveries.
func bodies(deliveries []*broker.Delivery) []string {
	var names []string
	for _, d := range deliveries {
		names = append(names, string(d.Message.Body))
	}
	return names
}

// numbered makes messages m0, m1, ...
func numbered(n int) []types.Message {
	var messages []types.Message
	for i := range n {
		messages = append(messages, message("m"+strconv.Itoa(i), ""))
	}
	return messages
}
