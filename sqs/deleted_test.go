package sqs

import (
	"context"
	"errors"
	"testing"
	"time"

	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
)

// deletions notes that the queue is gone.
type deletions struct{ events chan QueueDeletedEvent }

var _ OnQueueDeleted = deletions{}

func (d deletions) OnQueueDeleted(_ context.Context, e QueueDeletedEvent) { d.events <- e }

func (d deletions) await(t testing.TB) QueueDeletedEvent {
	t.Helper()
	select {
	case e := <-d.events:
		return e
	case <-time.After(time.Minute):
		t.Fatal("no event came")
		return QueueDeletedEvent{}
	}
}

// The queue is deleted while a source waits for messages and another delivery is out,
// and made again: an event each, Stop ends with ErrNoQueue, Wait goes on.
func TestQueueIsDeleted(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	name, url := newQueue(t, client, false)
	stops, waits := deletions{make(chan QueueDeletedEvent, 10)}, deletions{make(chan QueueDeletedEvent, 10)}
	stopping := openOn(t, client, name, Config{Hooks: []Hook{stops}, MaxBackoff: time.Second})
	stopping.mu.Lock()
	stopping.finalAfter = 10 * time.Millisecond
	stopping.mu.Unlock()
	waiting := openOn(t, client, name, Config{Hooks: []Hook{waits}, MaxBackoff: time.Second, OnQueueDeleted: QueueDeletedWait, VisibilityTimeout: time.Second})
	waiting.mu.Lock()
	waiting.finalAfter = 10 * time.Millisecond
	waiting.mu.Unlock()
	sendBodies(t, client, url, "out")
	out := receive(t, waiting, 1)[0]
	ended := make(chan error, 1)
	go func() {
		_, err := stopping.Receive(within(t, time.Minute), 1)
		ended <- err
	}()
	came := make(chan []*broker.Delivery, 1)
	go func() {
		got, err := waiting.Receive(within(t, time.Minute), 1)
		if err != nil {
			t.Errorf("receive of the source that waits: %v", err)
		}
		came <- got
	}()

	if _, err := client.DeleteQueue(within(t, time.Minute), &awssqs.DeleteQueueInput{QueueUrl: &url}); err != nil {
		t.Fatal(err)
	}
	if e := stops.await(t); e.Queue != name || !e.Stops || !errors.Is(e.Err, ErrNoQueue) {
		t.Errorf("the event is %+v", e)
	}
	if e := waits.await(t); e.Queue != name || e.Stops || !errors.Is(e.Err, ErrNoQueue) {
		t.Errorf("the event is %+v", e)
	}
	if err := <-ended; !errors.Is(err, ErrNoQueue) {
		t.Errorf("receive: %v, want %v", err, ErrNoQueue)
	}
	if err := waiting.Health(); !errors.Is(err, ErrNoQueue) {
		t.Errorf("health: %v, want %v", err, ErrNoQueue)
	}
	<-out.Context().Done() // Its lease cannot be renewed.

	if _, err := client.CreateQueue(within(t, time.Minute), &awssqs.CreateQueueInput{QueueName: &name}); err != nil {
		t.Fatal(err)
	}
	sendBodies(t, client, url, "new")
	got := <-came
	if len(got) != 1 || string(got[0].Message.Body) != "new" {
		t.Fatalf("received %v, want the new message", bodies(got))
	}
	ack(t, got...)
	if err := waiting.Health(); err != nil {
		t.Errorf("health: %v", err)
	}
	if st := waiting.Stats(); len(waits.events) > 0 || st.Lost != 1 || st.ReceiveErrors > 200 {
		t.Errorf("%d more events, %+v; want none, one lost delivery, and no hot loop", len(waits.events), st)
	}
}

// While the queue is gone requests are made with backoff, whatever the policy.
func TestNoHotLoopWithoutQueue(t *testing.T) {
	t.Parallel()
	for _, policy := range []QueueDeletedPolicy{QueueDeletedStop, QueueDeletedWait} {
		f := newFake()
		f.receiveErr = func() error { return &types.QueueDoesNotExist{} }
		d := deletions{make(chan QueueDeletedEvent, 10)}
		s := openFake(t, f, "orders", Config{OnQueueDeleted: policy, MaxBackoff: retry.MinBackoff, Hooks: []Hook{d}})
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		if _, err := s.Receive(ctx, 100); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("receive: %v, want it to wait", err)
		}
		cancel()
		if err := closeNow(t, s); err != nil {
			t.Error(err)
		}
		most := int64(time.Since(start)/(retry.MinBackoff/2)) + 2
		if n := s.Stats().ReceiveErrors; n < 2 || n > most {
			t.Errorf("%d requests failed, want from 2 to %d", n, most)
		}
		if len(d.events) != 1 {
			t.Errorf("%d events, want one", len(d.events))
		}
	}
}
