package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/integration_test/orders"
)

const (
	partitions = 8
	// bodySize is what a message's body has in bytes, give or take the digits of
	// its numbers.
	bodySize = 300
	seed     = 1

	kafkaTimeout   = 30 * time.Second
	groupTimeout   = time.Minute
	produceTimeout = 5 * time.Minute
)

// topic is the topic that every contestant reads.
type topic struct {
	name    string
	brokers []string
	client  *kafka.Client
	// events is how many messages it has, distinct how many keys.
	events, distinct int
}

// makeTopic makes the topic and fills it.
func makeTopic(ctx context.Context, brokers []string, name string, events int) (*topic, error) {
	messages, distinct, err := generate(events)
	if err != nil {
		return nil, err
	}
	t := &topic{
		name: name, brokers: brokers, events: events, distinct: distinct,
		client: &kafka.Client{Addr: kafka.TCP(brokers...), Timeout: kafkaTimeout, Transport: &kafka.Transport{}},
	}
	r, err := t.client.CreateTopics(ctx, &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{{
		Topic: name, NumPartitions: partitions, ReplicationFactor: 1,
	}}})
	if err == nil {
		err = r.Errors[name]
	}
	if err != nil {
		t.close()
		return nil, fmt.Errorf("create topic %s: %w", name, err)
	}
	if err := t.produce(ctx, messages); err != nil {
		t.remove(ctx)
		return nil, err
	}
	return t, nil
}

// generate makes the messages. An order goes to the partition that has the
// fewest messages at its first event, so that all partitions are equally long
// and no contestant ends with a single one that is left over.
func generate(events int) ([]kafka.Message, int, error) {
	stream, err := orders.Generate(orders.Config{Events: events, Seed: seed})
	if err != nil {
		return nil, 0, err
	}
	r := rand.New(rand.NewPCG(seed, partitions))
	var load [partitions]int
	home := map[string]int{}
	messages := make([]kafka.Message, 0, len(stream.Lines))
	for _, line := range stream.Lines {
		p, known := home[line.Key]
		if !known {
			p = slices.Index(load[:], slices.Min(load[:]))
			home[line.Key] = p
		}
		load[p]++
		body, err := pad(line.Body, r)
		if err != nil {
			return nil, 0, err
		}
		messages = append(messages, kafka.Message{Key: []byte(line.Key), Value: body, WriterData: p})
	}
	return messages, stream.Distinct, nil
}

// pad makes the body as long as those of real events, with text that does not
// compress to nothing.
func pad(body []byte, r *rand.Rand) ([]byte, error) {
	var e orders.Event
	if err := json.Unmarshal(body, &e); err != nil {
		return nil, fmt.Errorf("read a generated body: %w", err)
	}
	note := make([]byte, max(0, bodySize-len(body)))
	for i := range note {
		note[i] = "abcdefghijklmnopqrstuvwxyz ABCDE"[r.IntN(32)]
	}
	e.Note += string(note)
	return json.Marshal(e)
}

// produce writes the messages, those of a partition in their order.
func (t *topic) produce(ctx context.Context, messages []kafka.Message) error {
	ctx, cancel := context.WithTimeout(ctx, produceTimeout)
	defer cancel()
	w := &kafka.Writer{
		Addr: kafka.TCP(t.brokers...), Topic: t.name, Transport: t.client.Transport,
		Balancer: kafka.BalancerFunc(func(m kafka.Message, _ ...int) int {
			p, _ := m.WriterData.(int)
			return p
		}),
		BatchSize: 500, BatchTimeout: 10 * time.Millisecond, RequiredAcks: kafka.RequireAll,
	}
	err := w.WriteMessages(ctx, messages...)
	if closeErr := w.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("fill topic %s: %w", t.name, err)
	}
	return nil
}

// waitAssigned waits until the group is stable and has members with one
// partition each, so that a rebalance at the start is not measured.
func (t *topic) waitAssigned(ctx context.Context, group string, members int) error {
	ctx, cancel := context.WithTimeout(ctx, groupTimeout)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	last := "unknown"
	for {
		r, err := t.client.DescribeGroups(ctx, &kafka.DescribeGroupsRequest{GroupIDs: []string{group}})
		switch {
		case err != nil:
			last = err.Error()
		case len(r.Groups) == 1:
			g := r.Groups[0]
			if g.GroupState == "Stable" && len(g.Members) == members && !slices.ContainsFunc(g.Members, notOnePartition) {
				return nil
			}
			last = fmt.Sprintf("%s with %d members", g.GroupState, len(g.Members))
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("group %s has not got its %d members (it is %s): %w", group, members, last, context.Cause(ctx))
		}
	}
}

func notOnePartition(m kafka.DescribeGroupsResponseMember) bool {
	n := 0
	for _, t := range m.MemberAssignments.Topics {
		n += len(t.Partitions)
	}
	return n != 1
}

// lag returns how many messages the group has not committed.
func (t *topic) lag(ctx context.Context, group string) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, kafkaTimeout)
	defer cancel()
	var ends []kafka.OffsetRequest
	var ids []int
	for p := range partitions {
		ends, ids = append(ends, kafka.LastOffsetOf(p)), append(ids, p)
	}
	last, err := t.client.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{t.name: ends}})
	if err != nil {
		return 0, fmt.Errorf("list offsets of %s: %w", t.name, err)
	}
	done, err := t.client.OffsetFetch(ctx, &kafka.OffsetFetchRequest{GroupID: group, Topics: map[string][]int{t.name: ids}})
	if err == nil {
		err = done.Error
	}
	if err != nil {
		return 0, fmt.Errorf("fetch offsets of group %s: %w", group, err)
	}
	var lag int64
	for _, p := range last.Topics[t.name] {
		if p.Error != nil {
			return 0, fmt.Errorf("list offsets of %s: partition %d: %w", t.name, p.Partition, p.Error)
		}
		lag += p.LastOffset
	}
	for _, p := range done.Topics[t.name] {
		if p.Error != nil {
			return 0, fmt.Errorf("fetch offsets of group %s: partition %d: %w", group, p.Partition, p.Error)
		}
		lag -= max(p.CommittedOffset, 0)
	}
	return lag, nil
}

// forget deletes a group; what is left of one does no harm.
func (t *topic) forget(ctx context.Context, group string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), kafkaTimeout)
	defer cancel()
	_, _ = t.client.DeleteGroups(ctx, &kafka.DeleteGroupsRequest{GroupIDs: []string{group}})
}

// remove deletes the topic.
func (t *topic) remove(ctx context.Context) {
	defer t.close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), kafkaTimeout)
	defer cancel()
	_, _ = t.client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{t.name}})
}

func (t *topic) close() {
	if transport, ok := t.client.Transport.(*kafka.Transport); ok {
		transport.CloseIdleConnections()
	}
}
