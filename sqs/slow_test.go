package sqs

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/smithy-go"
)

// slow is a fake of whose calls some wait for a channel, or fail.
type slow struct {
	*fake
	beats, deletes <-chan struct{} // nil: they do not wait
	failBeats      error
	fail           func(call int) error
	calls          chan int // entries of each call that failed
}

func (s *slow) ChangeMessageVisibilityBatch(ctx context.Context, in *awssqs.ChangeMessageVisibilityBatchInput, opts ...func(*awssqs.Options)) (*awssqs.ChangeMessageVisibilityBatchOutput, error) {
	if s.failBeats != nil {
		return nil, s.failBeats
	}
	if s.beats != nil {
		select {
		case <-s.beats:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	return s.fake.ChangeMessageVisibilityBatch(ctx, in, opts...)
}

func (s *slow) DeleteMessageBatch(ctx context.Context, in *awssqs.DeleteMessageBatchInput, opts ...func(*awssqs.Options)) (*awssqs.DeleteMessageBatchOutput, error) {
	if s.deletes != nil {
		select {
		case <-s.deletes:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if s.fail != nil {
		if err := s.fail(len(s.calls)); err != nil {
			s.calls <- len(in.Entries)
			return nil, err
		}
	}
	return s.fake.DeleteMessageBatch(ctx, in, opts...)
}

// However many leases there are, those that cannot be renewed end in time.
func TestLeasesEndWhileHeartbeatsHang(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.send(numbered(400)...)
	s := openFake(t, f, "orders", Config{Client: &slow{fake: f, beats: make(chan struct{})}, VisibilityTimeout: 2 * time.Second})
	from := time.Now()
	for _, d := range receive(t, s, 400) {
		select {
		case <-d.Context().Done():
		case <-time.After(time.Minute):
			t.Fatal("a delivery is not lost")
		}
	}
	if took := time.Since(from); took > 7*time.Second {
		t.Errorf("the last lease of 2 s ended after %v", took)
	}
}

// What is received must not outrun the deletes: their leases would end.
func TestReceivesNoMoreThanIsDeleted(t *testing.T) {
	t.Parallel()
	const all = 1000
	f := newFake()
	f.send(numbered(all)...)
	deletes := make(chan struct{})
	s := openFake(t, f, "orders", Config{Client: &slow{fake: f, deletes: deletes}})
	n := 0
	for {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		some, err := s.Receive(ctx, batch)
		cancel()
		if err != nil {
			break
		}
		ack(t, some...)
		n += len(some)
	}
	if most := maxUnsent + 2*defaultPollers*batch; n < maxUnsent || n > most {
		t.Errorf("%d were received while nothing was deleted, want %d to %d", n, maxUnsent, most)
	}
	close(deletes)
	for n < all {
		some := receive(t, s, 1)
		ack(t, some...)
		n += len(some)
	}
	if err := closeNow(t, s); err != nil || s.Stats().Acks != all {
		t.Errorf("close: %v, %+v", err, s.Stats())
	}
}

// case S2: what was throttled, or got no answer, goes together again; what was
// refused goes alone.
func TestFailedCallIsRepeated(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name  string
		err   error
		alone int
	}{
		{"throttled", &smithy.GenericAPIError{Code: "ThrottlingException", Fault: smithy.FaultClient}, 0},
		{"no answer", errors.New("connection reset"), 0},
		{"refused", &smithy.GenericAPIError{Code: "AWS.SimpleQueueService.BatchRequestTooLong", Fault: smithy.FaultClient}, batch},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			f := newFake()
			f.send(numbered(batch)...)
			failing := &slow{fake: f, calls: make(chan int, 100)}
			failing.fail = func(call int) error {
				if call < 3 {
					return row.err
				}
				return nil
			}
			s := openFake(t, f, "orders", Config{Client: failing, AckDelay: time.Minute, MaxBackoff: 100 * time.Millisecond})
			ack(t, receive(t, s, batch)...)
			if row.alone > 0 {
				f.await(t, "delete", row.alone)
			} else {
				f.await(t, "delete batch", 1)
			}
			if err := closeNow(t, s); err != nil || s.Stats().Acks != batch {
				t.Errorf("close: %v, %+v", err, s.Stats())
			}
			if row.alone == 0 && !slices.Equal(f.sizes(), []int{batch}) || len(f.alone) != row.alone {
				t.Errorf("the batches have %v entries, alone were %q", f.sizes(), f.alone)
			}
		})
	}
}

// What lets leases end is said with them: a permission that is missing, mostly.
func TestLostSaysWhatHeartbeatsSay(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.send(message("a", ""))
	lost := make(losses, 1)
	denied := &slow{fake: f, failBeats: &smithy.GenericAPIError{Code: "AccessDenied", Message: "no"}}
	s := openFake(t, f, "orders", Config{Client: denied, VisibilityTimeout: time.Second, Hooks: []Hook{lost}})
	receive(t, s, 1)
	select {
	case e := <-lost:
		if e.ID != "a" || !errors.Is(e.Err, ErrForbidden) {
			t.Errorf("got %+v, want ErrForbidden", e)
		}
	case <-time.After(time.Minute):
		t.Fatal("the delivery is not lost")
	}
}

type losses chan LostEvent

func (l losses) OnLost(_ context.Context, e LostEvent) { l <- e }

// An ack waits for others, and not until its lease ends.
func TestAckDelayEndsBeforeTheLease(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.send(numbered(2)...)
	s := openFake(t, f, "orders", Config{AckDelay: time.Minute, VisibilityTimeout: 2 * time.Second})
	from := time.Now()
	ack(t, receive(t, s, 2)...)
	f.await(t, "delete batch", 1)
	if took := time.Since(from); took > 10*time.Second {
		t.Errorf("the deletes were sent after %v", took)
	}
}

// Credentials that are refused for a while, until they are renewed, cost no ack.
func TestAcksOutlastRefusedCredentials(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.send(numbered(batch)...)
	failing := &slow{fake: f, calls: make(chan int, 100)}
	failing.fail = func(call int) error {
		if call < 2*maxFaults {
			return &smithy.GenericAPIError{Code: "ExpiredToken", Fault: smithy.FaultClient}
		}
		return nil
	}
	f.failAlone = func(string, int) error { return &smithy.GenericAPIError{Code: "ExpiredToken"} }
	s := openFake(t, f, "orders", Config{Client: failing, AckDelay: time.Minute, MaxBackoff: 100 * time.Millisecond})
	ack(t, receive(t, s, batch)...)
	f.await(t, "delete batch", 1)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Acks != batch || st.RefusedAcks != 0 || len(f.alone) > 0 {
		t.Errorf("got %+v, and %q alone", st, f.alone)
	}
}

// A server that does not let requests wait is not asked all the time.
func TestEmptyAnswersAtOnceAreNoHotLoop(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders", Config{Client: hasty{f}})
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := s.Receive(ctx, 1); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if n := len(f.receives); n > 50 {
		t.Errorf("%d requests were made in 2 s", n)
	}
}

// hasty is a fake that does not wait for messages.
type hasty struct{ *fake }

func (h hasty) ReceiveMessage(ctx context.Context, in *awssqs.ReceiveMessageInput, opts ...func(*awssqs.Options)) (*awssqs.ReceiveMessageOutput, error) {
	short := *in
	short.WaitTimeSeconds = 0
	return h.fake.ReceiveMessage(ctx, &short, opts...)
}
