package sqs

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
)

// The policy is read, and said at the start in one line; a warning when it would take
// messages from the consumer.
func TestRedriveIsExplained(t *testing.T) {
	t.Parallel()
	const target = "arn:aws:sqs:us-east-1:000000000000:dead"
	for _, row := range []struct {
		policy    string
		heartbeat bool
		level     slog.Level
		text      string
	}{
		{"", true, slog.LevelInfo, "no dead letter queue"},
		{"", false, slog.LevelInfo, "no dead letter queue"},
		{`{"deadLetterTargetArn":"` + target + `","maxReceiveCount":5}`, true, slog.LevelInfo, "max_receive_count=5 dead_letter_queue=" + target},
		{`{"deadLetterTargetArn":"` + target + `","maxReceiveCount":"1000"}`, true, slog.LevelInfo, "max_receive_count=1000"},
		{`{"deadLetterTargetArn":"` + target + `","maxReceiveCount":4}`, true, slog.LevelWarn, "maxReceiveCount of the queue to 5"},
		{`{"deadLetterTargetArn":"` + target + `","maxReceiveCount":"1"}`, true, slog.LevelWarn, "max_receive_count=1 "},
		{`{"deadLetterTargetArn":"` + target + `","maxReceiveCount":10}`, false, slog.LevelWarn, "without a heartbeat"},
		{`{"deadLetterTargetArn":"` + target + `","maxReceiveCount":0}`, true, slog.LevelWarn, "cannot be read"},
		{`{"maxReceiveCount":5}`, true, slog.LevelWarn, "cannot be read"},
		{`{"deadLetterTargetArn":"` + target + `"}`, true, slog.LevelWarn, "cannot be read"},
		{"something", true, slog.LevelWarn, "redrive_policy=something"},
	} {
		var text bytes.Buffer
		log := slog.New(slog.NewTextHandler(&text, nil))
		readRedrive(map[string]string{"RedrivePolicy": row.policy, "MessageRetentionPeriod": "345600"}).tell(t.Context(), log, row.heartbeat)
		line := text.String()
		if strings.Count(line, "\n") != 1 || !strings.Contains(line, "level="+row.level.String()) || !strings.Contains(line, row.text) || !strings.Contains(line, "kept_for=96h") {
			t.Errorf("%q, heartbeat %v: said\n%swant one line of %v with %q", row.policy, row.heartbeat, line, row.level, row.text)
		}
	}
}

// lasts notes messages that came for the last time.
type lasts struct {
	mu     sync.Mutex
	events []LastReceiveEvent
}

var _ OnLastReceive = (*lasts)(nil)

func (l *lasts) OnLastReceive(_ context.Context, e LastReceiveEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// A message that was received as often as the policy allows is reported, and is in
// the dead letter queue when it is given back.
func TestLastReceiveIsReported(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	name, url := newQueue(t, client, false)
	dead, deadURL := newQueue(t, client, false)
	policy := fmt.Sprintf(`{"deadLetterTargetArn":"arn:aws:sqs:us-east-1:000000000000:%s","maxReceiveCount":2}`, dead)
	if _, err := client.SetQueueAttributes(within(t, time.Minute), &awssqs.SetQueueAttributesInput{QueueUrl: &url, Attributes: map[string]string{"RedrivePolicy": policy}}); err != nil {
		t.Fatal(err)
	}
	sendBodies(t, client, url, "a")
	l := &lasts{}
	s := openOn(t, client, name, Config{Hooks: []Hook{l}})
	for range 2 {
		d := receive(t, s, 1)[0]
		if err := d.Nack(t.Context(), 0); err != nil {
			t.Fatal(err)
		}
	}
	fromDead := openOn(t, client, dead, Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan error, 1)
	go func() { // The server moves a message when it would be received once more.
		_, err := s.Receive(ctx, 1)
		ended <- err
	}()
	d := receive(t, fromDead, 1)[0]
	ack(t, d)
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("receive: %v, want nothing to come", err)
	}
	if err := closeNow(t, fromDead); err != nil {
		t.Error(err)
	}
	if n := left(t, client, deadURL); n != "0 0" {
		t.Errorf("in the dead letter queue are %s messages", n)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) != 1 || l.events[0].Receives != 2 || !strings.HasSuffix(l.events[0].DeadLetterQueue, ":"+dead) || s.Stats().LastReceives != 1 {
		t.Errorf("the events are %+v, want one of the second receive", l.events)
	}
}
