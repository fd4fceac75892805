package sqs

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/aws/smithy-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/retry"
)

// refusals notes refused acks and lost deliveries.
type refusals struct {
	mu     sync.Mutex
	events []RefusedAckEvent
	lost   []LostEvent
	got    chan struct{}
}

var (
	_ OnRefusedAck = (*refusals)(nil)
	_ OnLost       = (*refusals)(nil)
)

func newRefusals() *refusals { return &refusals{got: make(chan struct{}, 100)} }

func (r *refusals) OnRefusedAck(_ context.Context, e RefusedAckEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events = append(r.events, e)
	r.got <- struct{}{}
}

func (r *refusals) OnLost(_ context.Context, e LostEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lost = append(r.lost, e)
	r.got <- struct{}{}
}

func (r *refusals) await(t testing.TB) {
	t.Helper()
	select {
	case <-r.got:
	case <-time.After(30 * time.Second):
		t.Fatal("no event came")
	}
}

// case S2
func TestDeletesInBatches(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders", Config{AckDelay: 2 * time.Second})
	f.send(numbered(23)...)
	ack(t, receive(t, s, 23)...)
	f.await(t, "delete batch", 3)
	if got := f.sizes(); !slices.Equal(got, []int{10, 10, 3}) {
		t.Errorf("the calls have %v entries, want 10, 10, 3", got)
	}
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Acks != 23 || st.Unsent != 0 || st.InFlight != 0 || len(f.alone) > 0 {
		t.Errorf("got %+v, and %q alone", st, f.alone)
	}
}

// case S2
func TestFailedDeleteIsRetriedAlone(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.failDelete = func(handle string, _ int) *types.BatchResultErrorEntry {
		if handle == "h-m4" {
			return &types.BatchResultErrorEntry{Code: aws.String("InternalError"), Message: aws.String("try again")}
		}
		return nil
	}
	f.failAlone = func(_ string, times int) error {
		if times < 4 {
			return errors.New("connection reset")
		}
		return nil
	}
	s := openFake(t, f, "orders", Config{AckDelay: time.Minute, MaxBackoff: retry.MinBackoff})
	f.send(numbered(10)...)
	ack(t, receive(t, s, 10)...)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if got := f.sizes(); !slices.Equal(got, []int{10}) {
		t.Errorf("the batches have %v entries, want one of ten", got)
	}
	if want := []string{"h-m4", "h-m4", "h-m4"}; !slices.Equal(f.alone, want) {
		t.Errorf("alone were sent %q, want %q", f.alone, want)
	}
	if st := s.Stats(); st.Acks != 10 || st.RefusedAcks != 0 {
		t.Errorf("got %+v", st)
	}
}

// case S2
func TestSenderFaultIsNotRetriedForEver(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.failDelete = func(handle string, _ int) *types.BatchResultErrorEntry {
		if handle == "h-m1" {
			return &types.BatchResultErrorEntry{Code: aws.String("AccessDenied"), Message: aws.String("no"), SenderFault: true}
		}
		return nil
	}
	f.failAlone = func(string, int) error { return &smithy.GenericAPIError{Code: "AccessDenied", Message: "no"} }
	r := newRefusals()
	s := openFake(t, f, "orders", Config{AckDelay: time.Second, MaxBackoff: retry.MinBackoff, Hooks: []Hook{r}})
	f.send(numbered(3)...)
	ack(t, receive(t, s, 3)...)
	r.await(t)
	if got := f.tries["h-m1"]; got != maxFaults {
		t.Errorf("it was sent %d times, want %d", got, maxFaults)
	}
	if e := r.events[0]; e.ID != "m1" || e.Redelivered || !errors.Is(e.Err, ErrForbidden) || !strings.Contains(e.Err.Error(), "sqs:DeleteMessage") {
		t.Errorf("the event is %+v", e)
	}
	if st := s.Stats(); st.Acks != 2 || st.RefusedAcks != 1 {
		t.Errorf("got %+v", st)
	}
}

// case S2: one MessageId twice in a batch has distinct entry ids. The first delivery
// is acked while its message comes again, so both handles are never in one call: the
// newest one wins.
func TestNewestHandleWins(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders", Config{AckDelay: time.Minute})
	messages := numbered(3)
	f.send(messages...)
	ack(t, receive(t, s, 3)...)
	f.send(again(messages[0], "h-new"), message("m3", ""))
	if got := receive(t, s, 1); string(got[0].Message.Body) != "m3" {
		t.Errorf("received %v, want m3: m0 is done", bodies(got))
	} else {
		ack(t, got...)
	}
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if want := [][]string{{"h-new", "h-m1", "h-m2", "h-m3"}}; len(f.deletes) != 1 || !slices.Equal(f.deletes[0], want[0]) {
		t.Errorf("deleted were %q, want %q", f.deletes, want)
	}
}

// case S1: a refused old handle is no failure.
func TestOldHandleIsAlreadyRedelivered(t *testing.T) {
	t.Parallel()
	for name, code := range map[string]string{"AWS": "ReceiptHandleIsInvalid", "with name space": "com.amazonaws.sqs#ReceiptHandleIsInvalid"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake()
			f.failDelete = func(handle string, _ int) *types.BatchResultErrorEntry {
				if handle == "h-m0" {
					return &types.BatchResultErrorEntry{Code: aws.String(code), SenderFault: true}
				}
				return nil
			}
			r := newRefusals()
			s := openFake(t, f, "orders", Config{AckDelay: time.Second, Hooks: []Hook{r}})
			f.send(numbered(2)...)
			ack(t, receive(t, s, 2)...)
			r.await(t)
			if err := closeNow(t, s); err != nil {
				t.Error(err)
			}
			if st := s.Stats(); st.Redelivered != 1 || st.RefusedAcks != 0 || st.Acks != 1 || len(f.alone) > 0 || !r.events[0].Redelivered {
				t.Errorf("got %+v, alone %q, %+v", st, f.alone, r.events)
			}
		})
	}
}

// case S3: what is given back takes with it what waits of its group, the last one
// first, and other groups go on.
func TestGroupGoesBackInOrder(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders.fifo", Config{})
	f.send(message("a", "g1"), message("b", "g1"), message("c", "g2"), message("d", "g1"))
	got := receive(t, s, 4)
	if want := []string{"a", "b", "c", "d"}; !slices.Equal(bodies(got), want) {
		t.Fatalf("received %v, want %v", bodies(got), want)
	}
	nack := func(d *broker.Delivery, delay time.Duration) {
		if err := d.Nack(t.Context(), delay); err != nil {
			t.Error(err)
		}
	}
	nack(got[0], 90*time.Second)
	nack(got[3], 0)
	ack(t, got[2])
	f.await(t, "delete", 1)
	if len(f.changes) > 0 {
		t.Errorf("%v went back while b is out", f.changes)
	}
	nack(got[1], 0)
	f.await(t, "change", 3)
	if want := []change{{"h-d", 90}, {"h-b", 90}, {"h-a", 90}}; !slices.Equal(f.changes, want) {
		t.Errorf("went back: %v, want %v", f.changes, want)
	}
}

// case S3: the same for what was not handed out yet.
func TestWhatWaitsOfTheGroupGoesBack(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders.fifo", Config{WaitTime: 20 * time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := s.Receive(ctx, 4)
		ended <- err
	}()
	f.await(t, "receive", 1)
	cancel() // The request goes on, and what it brings waits.
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Fatalf("receive: %v", err)
	}
	f.send(message("a", "g1"), message("b", "g1"), message("c", "g2"), message("d", "g1"))
	if err := receive(t, s, 1)[0].Nack(t.Context(), 0); err != nil {
		t.Error(err)
	}
	f.await(t, "change", 3)
	if want := []change{{"h-d", 0}, {"h-b", 0}, {"h-a", 0}}; !slices.Equal(f.changes, want) {
		t.Errorf("went back: %v, want %v", f.changes, want)
	}
	if got := receive(t, s, 1); string(got[0].Message.Body) != "c" {
		t.Errorf("received %v, want c", bodies(got))
	}
	if st := s.Stats(); st.Returned != 2 {
		t.Errorf("got %+v", st)
	}
}

// Nothing is asked for while nobody receives, and never more than wanted.
func TestReceivesOnlyWhatIsWanted(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders", Config{})
	f.send(numbered(5)...)
	got := receive(t, s, 3)
	for range 3 { // It looks again whether something is wanted.
		s.wanted <- struct{}{}
	}
	ack(t, got...)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if !slices.Equal(f.receives, []int32{3}) || len(f.messages) != 2 {
		t.Errorf("asked for %v, %d are left; want one request for 3", f.receives, len(f.messages))
	}
	if want := []string{"All", "All"}; !slices.Equal(f.asked, want) {
		t.Errorf("asked for the attributes %q, want %q", f.asked, want)
	}
}

// More requests are under way while they come back full, and never more than
// Pollers.
func TestPollersFollowTheLoad(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders", Config{Pollers: 3})
	f.send(numbered(100)...)
	ack(t, receive(t, s, 100)...)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	for _, n := range f.receives {
		if n != batch {
			t.Errorf("requests are for %v messages, want ten each", f.receives)
		}
	}
}

// The heartbeat renews what waits and what is out, and not what is acked; when it is
// refused the delivery is lost.
func TestHeartbeat(t *testing.T) {
	t.Parallel()
	f := newFake()
	var mu sync.Mutex
	refuse := ""
	f.failBeat = func(handle string) *types.BatchResultErrorEntry {
		mu.Lock()
		defer mu.Unlock()
		if handle == refuse {
			return &types.BatchResultErrorEntry{Code: aws.String("MessageNotInflight"), SenderFault: true}
		}
		return nil
	}
	r := newRefusals()
	s := openFake(t, f, "orders", Config{VisibilityTimeout: 30 * time.Second, Heartbeat: 50 * time.Millisecond, AckDelay: time.Minute, Hooks: []Hook{r}})
	f.send(numbered(2)...)
	got := receive(t, s, 2)
	ack(t, got[0])
	f.mu.Lock()
	f.beats = nil
	f.mu.Unlock()
	f.await(t, "beat", 3)
	f.mu.Lock()
	for _, b := range f.beats[1:] { // the first may have been on its way
		if b != (change{"h-m1", 30}) {
			t.Errorf("a heartbeat is %v, want one of m1 for 30 s", b)
		}
	}
	f.mu.Unlock()
	mu.Lock()
	refuse = "h-m1"
	mu.Unlock()
	r.await(t)
	<-got[1].Context().Done()
	if err := got[1].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack after the loss: %v", err)
	}
	if got[0].Context().Err() != nil {
		t.Error("the other delivery was lost, too")
	}
	if st := s.Stats(); st.Lost != 1 || st.StaleAcks != 1 || st.Heartbeats == 0 {
		t.Errorf("got %+v", st)
	}
}

// case S1: without a heartbeat the delivery is lost at the end of its lease, and the
// next one is settled with its own handle.
func TestLeaseEndsWithoutHeartbeat(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders.fifo", Config{VisibilityTimeout: time.Second, Heartbeat: -1})
	m := message("m0", "g")
	f.send(m)
	first := receive(t, s, 1)[0]
	<-first.Context().Done()
	f.send(again(m, "h-second"))
	second := receive(t, s, 1)[0]
	if err := first.Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack after the lease: %v", err)
	}
	ack(t, second)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if want := []string{"h-second"}; !slices.Equal(f.alone, want) || len(f.deletes)+len(f.beats) > 0 {
		t.Errorf("deleted alone: %q, batches %q, heartbeats %v; want %q", f.alone, f.deletes, f.beats, want)
	}
}

// What is not settled becomes visible at the Close.
func TestCloseGivesBack(t *testing.T) {
	t.Parallel()
	f := newFake()
	s := openFake(t, f, "orders.fifo", Config{})
	f.send(message("a", "g"), message("b", "g"), message("c", "g"))
	got := receive(t, s, 3)
	ack(t, got[0])
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if want := []change{{"h-c", 0}, {"h-b", 0}}; !slices.Equal(f.changes, want) || !slices.Equal(f.alone, []string{"h-a"}) {
		t.Errorf("went back: %v, deleted %q; want %v and h-a", f.changes, f.alone, want)
	}
	if err := got[1].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack after Close: %v", err)
	}
	if err := s.Health(); !errors.Is(err, broker.ErrClosed) {
		t.Errorf("health after Close: %v", err)
	}
}

// Close says what it could not send, and ends in time.
func TestCloseSaysWhatIsUnsent(t *testing.T) {
	t.Parallel()
	f := newFake()
	f.failAlone = func(string, int) error { return errors.New("connection refused") }
	s := openFake(t, f, "orders", Config{MaxBackoff: retry.MinBackoff})
	f.send(message("a", ""))
	ack(t, receive(t, s, 1)...)
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	if err := s.Close(ctx); err == nil || !strings.Contains(err.Error(), "1 deletes") {
		t.Errorf("got the error %v", err)
	}
	if err := s.Close(t.Context()); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

// A refusal that lasts ends the source; one that passes does not.
func TestReceiveErrors(t *testing.T) {
	t.Parallel()
	f := newFake()
	gone := false
	f.receiveErr = func() error { // with the mutex held
		if gone {
			return &types.QueueDoesNotExist{}
		}
		if len(f.receives) < 3 {
			return errors.New("connection refused")
		}
		return nil
	}
	s := openFake(t, f, "orders", Config{MaxBackoff: retry.MinBackoff})
	f.send(message("a", ""))
	ack(t, receive(t, s, 1)...)
	if err := s.Health(); err != nil {
		t.Errorf("health: %v", err)
	}
	if st := s.Stats(); st.ReceiveErrors != 2 {
		t.Errorf("got %+v", st)
	}
	f.mu.Lock()
	gone = true
	f.mu.Unlock()
	s.mu.Lock()
	s.finalAfter = time.Millisecond
	s.mu.Unlock()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := s.Receive(ctx, 1); !errors.Is(err, ErrNoQueue) {
		t.Errorf("receive: %v, want %v", err, ErrNoQueue)
	}
	if err := s.Health(); !errors.Is(err, ErrNoQueue) {
		t.Errorf("health: %v", err)
	}
}
