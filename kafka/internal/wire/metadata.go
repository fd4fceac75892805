package wire

import (
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"strconv"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/metadata"
)

// TopicID is the cluster's own id of a topic; zero when the broker is too old
// to have one (before Kafka 2.8).
type TopicID [16]byte

// Topic is what the cluster says about a topic.
type Topic struct {
	ID TopicID
	// Err is why nothing is known about it; an unknown topic is
	// kafka-go's UnknownTopicOrPartition.
	Err error
	// Leaders are the brokers to fetch the partitions from; -1 while a
	// partition has none.
	Leaders map[int32]int32
	// Operations is what this client may do with the topic, a bit for each
	// operation of Kafka's access control lists; negative when the broker was not
	// asked or does not say.
	Operations int32
}

// MayWrite tells whether records may be written to the topic. It is true when the
// broker does not say.
func (t *Topic) MayWrite() bool {
	const write = 4
	return t.Operations < 0 || t.Operations&(1<<write) != 0
}

// Metadata is what a broker knows about the cluster.
type Metadata struct {
	// Brokers are the addresses of the brokers by their ids.
	Brokers map[int32]string
	Topics  map[string]Topic
}

// Metadata asks for the topics; it never creates one.
func (c *Conn) Metadata(ctx context.Context, topics []string) (*Metadata, error) {
	return c.metadata(ctx, topics, false)
}

// Permissions is Metadata that also asks what may be done with the topics.
func (c *Conn) Permissions(ctx context.Context, topics []string) (*Metadata, error) {
	return c.metadata(ctx, topics, true)
}

func (c *Conn) metadata(ctx context.Context, topics []string, operations bool) (*Metadata, error) {
	version, err := c.versions.pick(protocol.Metadata, 10, 12)
	if err != nil {
		return c.oldMetadata(ctx, topics)
	}
	var m *Metadata
	err = c.exchange(ctx, 0, func() error {
		body, err := c.raw(protocol.Metadata, version, true, metadataRequest(version, topics, operations))
		if err != nil {
			return err
		}
		m, err = readMetadata(body)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("Metadata request to %s: %w", c.address, err)
	}
	return m, nil
}

// metadataRequest encodes versions 10 to 12.
func metadataRequest(version int16, topics []string, operations bool) []byte {
	b := binary.AppendUvarint(nil, uint64(len(topics))+1)
	for _, name := range topics {
		b = append(b, make([]byte, 16)...) // by name, not by id
		b = appendCompactString(b, name)
		b = append(b, 0)
	}
	b = append(b, 0) // never create a topic
	if version == 10 {
		b = append(b, 0) // no authorized operations of the cluster
	}
	if operations {
		return append(b, 1, 0) // those of the topics; no tagged fields
	}
	return append(b, 0, 0)
}

// readMetadata decodes what all of the versions 10 to 12 begin with.
func readMetadata(body []byte) (*Metadata, error) {
	r := &reader{b: body}
	m := &Metadata{Brokers: make(map[int32]string), Topics: make(map[string]Topic)}
	r.int32() // throttle time
	for range r.compactLength() {
		id, host, port := r.int32(), r.compactString(), r.int32()
		r.compactString() // rack
		r.skipTags()
		m.Brokers[id] = net.JoinHostPort(host, strconv.Itoa(int(port)))
	}
	r.compactString() // cluster id
	r.int32()         // controller
	for range r.compactLength() {
		code, name := r.int16(), r.compactString()
		t := Topic{Leaders: make(map[int32]int32)}
		copy(t.ID[:], r.take(len(t.ID)))
		if code != 0 {
			t.Err = kafkago.Error(code)
		}
		r.take(1) // internal
		for range r.compactLength() {
			r.int16() // the error repeats itself in the leader
			partition, leader := r.int32(), r.int32()
			r.int32() // leader epoch
			for range 3 {
				r.take(4 * r.compactLength()) // replicas, in sync, offline
			}
			r.skipTags()
			t.Leaders[partition] = leader
		}
		t.Operations = r.int32()
		r.skipTags()
		m.Topics[name] = t
	}
	return m, r.err
}

// oldMetadata is for brokers without topic ids.
func (c *Conn) oldMetadata(ctx context.Context, topics []string) (*Metadata, error) {
	res, err := c.RoundTrip(ctx, &metadata.Request{TopicNames: topics})
	if err != nil {
		return nil, err
	}
	m := &Metadata{Brokers: make(map[int32]string), Topics: make(map[string]Topic)}
	for _, b := range res.(*metadata.Response).Brokers {
		m.Brokers[b.NodeID] = net.JoinHostPort(b.Host, strconv.Itoa(int(b.Port)))
	}
	for _, t := range res.(*metadata.Response).Topics {
		topic := Topic{Leaders: make(map[int32]int32), Operations: -1}
		if t.ErrorCode != 0 {
			topic.Err = kafkago.Error(t.ErrorCode)
		}
		for _, p := range t.Partitions {
			topic.Leaders[p.PartitionIndex] = p.LeaderID
		}
		m.Topics[t.Name] = topic
	}
	return m, nil
}
