package kafka

import (
	"context"
	"fmt"
	"slices"
	"sync"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// assigner is one of the library's strategies to share partitions among the
// members, which runs in the group's leader. It looks the partitions up itself:
// what the library finds out is nothing at all as soon as one of the topics does
// not exist.
type assigner struct {
	kafkago.GroupBalancer
	source *Source
	shared *shared
}

// shared is what the last assignment of this member, as the leader, was made of.
type shared struct {
	mu     sync.Mutex
	counts map[string]int // partitions by topic; nil: it was not the leader
}

// take returns the counts, once.
func (s *shared) take() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	counts := s.counts
	s.counts = nil
	return counts
}

// assigners returns the strategies of the library, its preferred one first.
func (s *Source) assigners(last *shared) []kafkago.GroupBalancer {
	return []kafkago.GroupBalancer{
		assigner{kafkago.RangeGroupBalancer{}, s, last},
		assigner{kafkago.RoundRobinGroupBalancer{}, s, last},
	}
}

// AssignGroups implements kafkago.GroupBalancer. Topics that do not exist get no
// members.
func (a assigner) AssignGroups(members []kafkago.GroupMember, partitions []kafkago.Partition) kafkago.GroupMemberAssignments {
	var topics []string
	for _, m := range members {
		topics = append(topics, m.Topics...)
	}
	slices.Sort(topics)
	topics = slices.Compact(topics)
	// The other members wait, and no heartbeat is sent meanwhile.
	ctx, cancel := context.WithTimeout(a.source.closing, a.source.cfg.SessionTimeout/3)
	defer cancel()
	found, err := a.source.cluster.partitions(ctx, topics)
	if err == nil {
		partitions = found
	} else if a.source.closing.Err() == nil {
		// What the library has found is lacking at worst: then the watcher notices.
		a.source.log.WarnContext(ctx, "kafka: the partitions to share in the group cannot be looked up", "error", err)
	}
	counts := make(map[string]int)
	for _, p := range partitions {
		counts[p.Topic]++
	}
	a.shared.mu.Lock()
	a.shared.counts = counts
	a.shared.mu.Unlock()
	return a.GroupBalancer.AssignGroups(members, partitions)
}

// partitions returns all partitions of the topics that exist.
func (c *cluster) partitions(ctx context.Context, topics []string) ([]kafkago.Partition, error) {
	var m *wire.Metadata
	err := c.exclusive(ctx, func() error {
		return c.ask(ctx, func(conn *wire.Conn) (err error) {
			m, err = conn.Metadata(ctx, topics)
			return err
		})
	})
	if err != nil {
		return nil, fmt.Errorf("look up partitions: %w", err)
	}
	var all []kafkago.Partition
	for name, topic := range m.Topics {
		for id := range topic.Leaders {
			all = append(all, kafkago.Partition{Topic: name, ID: int(id)})
		}
	}
	slices.SortFunc(all, func(a, b kafkago.Partition) int { return a.ID - b.ID })
	return all, nil
}
