package kafka

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/findcoordinator"
	"github.com/segmentio/kafka-go/protocol/heartbeat"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"

	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// coordinator talks to the broker that keeps the group's offsets, over a
// connection of its own, so that offsets can still be committed while the
// group's connection is broken. Its methods may be called concurrently.
type coordinator struct {
	cluster *cluster
	group   string

	turn chan struct{} // holds one token: who has it uses conn and used
	conn *wire.Conn
	used time.Time
}

func newCoordinator(c *cluster, group string) *coordinator {
	co := &coordinator{cluster: c, group: group, turn: make(chan struct{}, 1)}
	co.turn <- struct{}{}
	return co
}

// epoch is a member in one generation: what fences a commit.
type epoch struct {
	generation int32
	member     string
}

// roundTrip sends a request to the coordinator. code reads the response's
// error, which is returned; one that says that this is not the coordinator any
// more makes the next request look for it again.
func (c *coordinator) roundTrip(ctx context.Context, req protocol.Message, code func(protocol.Message) int16) (protocol.Message, error) {
	select {
	case <-c.turn:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { c.turn <- struct{}{} }()

	if c.conn != nil && time.Since(c.used) > idleConn {
		c.conn.Close() // the broker would, without telling, or something in between
		c.conn = nil
	}
	if c.conn == nil {
		conn, err := c.find(ctx)
		if err != nil {
			return nil, err
		}
		c.conn = conn
	}
	res, err := c.conn.RoundTrip(ctx, req)
	c.used = time.Now()
	if err == nil {
		if n := code(res); n != 0 {
			err = kafkago.Error(n)
		}
	}
	var answer kafkago.Error
	if err != nil && (!errors.As(err, &answer) || answer == kafkago.NotCoordinatorForGroup || answer == kafkago.GroupCoordinatorNotAvailable) {
		c.conn.Close()
		c.conn = nil
	}
	return res, err
}

func (c *coordinator) find(ctx context.Context) (*wire.Conn, error) {
	res, err := c.cluster.request(ctx, &findcoordinator.Request{Key: c.group})
	if err != nil {
		return nil, fmt.Errorf("find the group's coordinator: %w", err)
	}
	f := res.(*findcoordinator.Response)
	if f.ErrorCode != 0 {
		return nil, fmt.Errorf("find the group's coordinator: %w", kafkago.Error(f.ErrorCode))
	}
	return c.cluster.dialer.Connect(ctx, net.JoinHostPort(f.Host, strconv.Itoa(int(f.Port))))
}

// committedOffset is what the group has for a partition.
type committedOffset struct {
	offset int64 // -1 for none
	epoch  int32 // of the leader that wrote what is before it; -1 when unknown
	note   string
}

// committed returns the group's offsets.
func (c *coordinator) committed(ctx context.Context, tps []topicPartition) (map[topicPartition]committedOffset, error) {
	req := &offsetfetch.Request{GroupID: c.group}
	for topic, ids := range byTopic(tps) {
		req.Topics = append(req.Topics, offsetfetch.RequestTopic{Name: topic, PartitionIndexes: ids})
	}
	const withEpochs = 5
	epochs := false
	res, err := c.roundTrip(ctx, req, func(m protocol.Message) int16 {
		epochs = c.conn.Version(protocol.OffsetFetch) >= withEpochs
		r := m.(*offsetfetch.Response)
		if r.ErrorCode != 0 {
			return r.ErrorCode
		}
		for _, t := range r.Topics {
			for _, p := range t.Partitions {
				if p.ErrorCode != 0 {
					return p.ErrorCode // an unread offset must not pass for none
				}
			}
		}
		return 0
	})
	if err != nil {
		return nil, fmt.Errorf("read the group's offsets: %w", err)
	}
	offsets := make(map[topicPartition]committedOffset, len(tps))
	for _, t := range res.(*offsetfetch.Response).Topics {
		for _, p := range t.Partitions {
			o := committedOffset{offset: p.CommittedOffset, epoch: -1, note: p.Metadata}
			if epochs {
				o.epoch = p.ComittedLeaderEpoch
			}
			offsets[topicPartition{t.Name, p.PartitionIndex}] = o
		}
	}
	for _, tp := range tps {
		if _, ok := offsets[tp]; !ok {
			return nil, fmt.Errorf("read the group's offsets: the answer lacks %s", tp)
		}
	}
	return offsets, nil
}

// commit sends offsets, fenced by the epoch, and notes the answer for each
// in its item. The error is nil only when all were taken.
func (c *coordinator) commit(ctx context.Context, m epoch, items []commitItem) error {
	const broker = -1
	index := make(map[topicPartition]*commitItem, len(items))
	parts := make(map[string][]offsetcommit.RequestPartition)
	for i := range items {
		tp := items[i].part.topicPartition
		index[tp] = &items[i]
		parts[tp.topic] = append(parts[tp.topic], offsetcommit.RequestPartition{
			PartitionIndex: tp.id, CommittedOffset: items[i].offset,
			CommittedLeaderEpoch: items[i].epoch, CommittedMetadata: items[i].run.note,
		})
	}
	req := &offsetcommit.Request{GroupID: c.group, GenerationID: m.generation, MemberID: m.member, RetentionTimeMs: broker}
	for topic, p := range parts {
		req.Topics = append(req.Topics, offsetcommit.RequestTopic{Name: topic, Partitions: p})
	}
	answered := 0
	_, err := c.roundTrip(ctx, req, func(msg protocol.Message) (worst int16) {
		for _, t := range msg.(*offsetcommit.Response).Topics {
			for _, p := range t.Partitions {
				it := index[topicPartition{t.Name, p.PartitionIndex}]
				if it == nil {
					continue
				}
				answered++
				if p.ErrorCode != 0 {
					it.err = kafkago.Error(p.ErrorCode)
					worst = p.ErrorCode
				}
			}
		}
		return worst
	})
	switch {
	case err != nil && answered == 0:
		for i := range items {
			items[i].err = err
		}
	case answered != len(items):
		err = fmt.Errorf("the answer is about %d of %d partitions", answered, len(items))
	}
	return err
}

// heartbeat tells the coordinator that the member is there. A group that is
// rebalancing is no error; an error for which isOver holds says that the member
// has lost its place.
func (c *coordinator) heartbeat(ctx context.Context, m epoch) error {
	_, err := c.roundTrip(ctx, &heartbeat.Request{GroupID: c.group, GenerationID: m.generation, MemberID: m.member},
		func(msg protocol.Message) int16 {
			code := msg.(*heartbeat.Response).ErrorCode
			if kafkago.Error(code) == kafkago.RebalanceInProgress {
				return 0
			}
			return code
		})
	return err
}

// alive asks whether the coordinator can be used: a nil error says that it
// answered, whatever it thinks of the member.
func (c *coordinator) alive(ctx context.Context, m epoch) error {
	err := c.heartbeat(ctx, m)
	if isOver(err) || errors.Is(err, kafkago.GroupIdNotFound) {
		return nil
	}
	return err
}

// leave takes a member out of the group that will not come back.
func (c *coordinator) leave(ctx context.Context, member string) error {
	_, err := c.roundTrip(ctx, &leavegroup.Request{GroupID: c.group, Members: []leavegroup.RequestMember{{MemberID: member}}},
		func(msg protocol.Message) int16 { return msg.(*leavegroup.Response).ErrorCode })
	if errors.Is(err, kafkago.UnknownMemberId) {
		return nil
	}
	return err
}

func byTopic(tps []topicPartition) map[string][]int32 {
	m := make(map[string][]int32)
	for _, tp := range tps {
		m[tp.topic] = append(m[tp.topic], tp.id)
	}
	return m
}
