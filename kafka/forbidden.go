package kafka

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	kafkago "github.com/segmentio/kafka-go"
)

// forbidden returns what err means for the source's group and topics when it says
// that a permission is missing: an ErrForbidden that names it. Else it returns nil.
func (s *Source) forbidden(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, kafkago.GroupAuthorizationFailed):
		return fmt.Errorf("kafka: group %q: %w to read: %w", s.name, ErrForbidden, err)
	case errors.Is(err, kafkago.TopicAuthorizationFailed):
		return fmt.Errorf("kafka: topic %s: %w to read: %w", strings.Join(s.forbiddenTopics(ctx), ", "), ErrForbidden, err)
	}
	return nil
}

// forbiddenTopics asks which topics may not even be described; if that cannot be
// told, it may be any of them.
func (s *Source) forbiddenTopics(ctx context.Context) []string {
	m, err := s.cluster.metadata(ctx, time.Now())
	var some, all []string
	for _, name := range s.topics {
		quoted := strconv.Quote(name)
		all = append(all, quoted)
		if err == nil && errors.Is(m.Topics[name].Err, kafkago.TopicAuthorizationFailed) {
			some = append(some, quoted)
		}
	}
	if len(some) > 0 {
		return some
	}
	return all
}
