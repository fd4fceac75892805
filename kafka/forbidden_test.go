package kafka

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kerr"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// A member that may not read the group's offsets says so, and goes on when it may.
func TestOffsetsAreForbidden(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	fault := c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.OffsetFetch}, Err: kerr.TopicAuthorizationFailed, Count: -1})
	s := openSource(t, c, []string{"orders"}, quick(t))
	eventually(t, "Health says so", func() bool { return errors.Is(s.Health(), kafkago.TopicAuthorizationFailed) })
	if s.Stats().Joined {
		t.Error("joined without the group's offsets")
	}
	fault.Remove()
	eventually(t, "Health is green", func() bool { return s.Health() == nil })
}

func TestForbidden(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders", "refunds"))
	s := openSource(t, c, []string{"orders", "refunds"}, quick(t))
	for _, tc := range []struct {
		err  error
		says string
	}{
		{kafkago.GroupAuthorizationFailed, `group "billing"`},
		{kafkago.TopicAuthorizationFailed, `topic "orders", "refunds"`},
	} {
		if got := s.forbidden(t.Context(), fmt.Errorf("join: %w", tc.err)); !errors.Is(got, ErrForbidden) || !errors.Is(got, tc.err) || !strings.Contains(got.Error(), tc.says) {
			t.Errorf("%v: got %v, want %s", tc.err, got, tc.says)
		}
	}
	c.Fault(kfake.Fault{Keys: []kmsg.Key{kmsg.Metadata}, Topic: "refunds", Err: kerr.TopicAuthorizationFailed, Count: -1})
	if got := s.forbidden(t.Context(), kafkago.TopicAuthorizationFailed); !strings.Contains(got.Error(), `topic "refunds":`) {
		t.Errorf("got %v, want the one topic", got)
	}
	if got := s.forbidden(t.Context(), kafkago.LeaderNotAvailable); got != nil {
		t.Errorf("got %v, want nil", got)
	}
}
