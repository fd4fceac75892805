package wire

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
)

// EpochEnd asks a partition's leader up to which offset its log agrees with the
// one in which the given leader epoch was the newest. -1: the leader does not
// know, or is too old to be asked (before Kafka 2.3).
//
// A reader whose position is beyond that offset has read what is not in the log
// any more.
func (c *Conn) EpochEnd(ctx context.Context, topic string, partition, epoch int32) (int64, error) {
	const version = 3 // 4 brought the flexible encoding; before 3 it was for brokers
	end := int64(-1)
	var answer kafkago.Error
	err := c.exchange(ctx, 0, func() error {
		if _, err := c.versions.pick(protocol.OffsetForLeaderEpoch, version, version); err != nil {
			return err
		}
		body, err := c.raw(protocol.OffsetForLeaderEpoch, version, false, epochRequest(topic, partition, epoch))
		if err != nil {
			return err
		}
		end, err = readEpochEnd(body, topic, partition)
		if errors.As(err, &answer) {
			return nil // the connection is fine
		}
		return err
	})
	if answer != 0 {
		err = answer
	}
	switch {
	case errors.Is(err, ErrVersion):
		return -1, nil
	case err != nil:
		return -1, fmt.Errorf("OffsetForLeaderEpoch request to %s: %w", c.address, err)
	}
	return end, nil
}

func epochRequest(topic string, partition, epoch int32) []byte {
	be := binary.BigEndian
	const noReplica, unknown = ^uint32(0), ^uint32(0)
	b := be.AppendUint32(nil, noReplica)
	b = be.AppendUint32(b, 1)
	b = appendString(b, topic)
	b = be.AppendUint32(b, 1)
	b = be.AppendUint32(b, uint32(partition))
	b = be.AppendUint32(b, unknown) // the leader's current epoch
	return be.AppendUint32(b, uint32(epoch))
}

func readEpochEnd(body []byte, topic string, partition int32) (int64, error) {
	r := &reader{b: body}
	r.int32() // throttle time
	for range r.length() {
		name := r.string()
		for range r.length() {
			code, id := r.int16(), r.int32()
			r.int32() // the epoch that the answer is about
			end := r.int64()
			if name != topic || id != partition || r.err != nil {
				continue
			}
			if code != 0 {
				return -1, kafkago.Error(code)
			}
			return end, nil
		}
	}
	if r.err != nil {
		return -1, r.err
	}
	return -1, fmt.Errorf("response without %s/%d", topic, partition)
}
