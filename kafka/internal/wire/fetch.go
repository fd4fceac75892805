package wire

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
)

// FetchRequest asks for the records of one partition.
type FetchRequest struct {
	Topic     string
	Partition int32
	// Offset is the first one that is wanted.
	Offset int64
	// MaxBytes bounds the response; one batch of records comes whatever its
	// size. MaxWait is how long the broker waits for a first record.
	MaxBytes int32
	MaxWait  time.Duration
	// MaxMemory bounds what the records take in memory, unpacked: the batches
	// after the one that exceeds it are left for the next fetch. 0: no bound.
	MaxMemory int
	// Committed leaves out the records of open and of aborted transactions.
	Committed bool
}

// FetchResult is the answer.
type FetchResult struct {
	// Err is what the broker says about the partition, a kafka-go Error; nil if
	// nothing is wrong.
	Err error
	// HighWatermark is the offset after the last replicated record. It, and
	// LogStart, are -1 when the broker does not say.
	HighWatermark int64
	LogStart      int64
	// Records are those from the wanted offset on.
	Records []Record
	// Epoch is that of the leader that wrote the last of what came; -1 when nothing
	// came or it is unknown.
	Epoch int32
	// Next is the offset to fetch from next. It is past all that came, records
	// or not: holes that compaction left, and the marks of transactions.
	Next int64
	// Wire is how many bytes the records took that were read, Memory how many
	// they take now.
	Wire, Memory int
}

// Fetch asks for records; they are the caller's.
func (c *Conn) Fetch(ctx context.Context, req *FetchRequest) (*FetchResult, error) {
	var res *FetchResult
	err := c.exchange(ctx, req.MaxWait, func() error {
		// Version 4 brought isolation levels, 12 the flexible encoding.
		version, err := c.versions.pick(protocol.Fetch, 4, 11)
		if err != nil {
			return err
		}
		body, err := c.raw(protocol.Fetch, version, false, req.encode(version))
		if err != nil {
			return err
		}
		res, err = req.decode(version, body)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("Fetch request to %s: %w", c.address, err)
	}
	return res, nil
}

func (q *FetchRequest) encode(version int16) []byte {
	be := binary.BigEndian
	const noReplica, noSession, unknown = ^uint32(0), ^uint32(0), ^uint32(0)
	b := be.AppendUint32(nil, noReplica)
	b = be.AppendUint32(b, uint32(q.MaxWait.Milliseconds())) //nolint:gosec // at most a day
	b = be.AppendUint32(b, 1)                                // answer with the first byte
	b = be.AppendUint32(b, uint32(q.MaxBytes))
	if q.Committed {
		b = append(b, 1)
	} else {
		b = append(b, 0)
	}
	if version >= 7 {
		b = be.AppendUint32(b, 0)         // session id
		b = be.AppendUint32(b, noSession) // session epoch
	}
	b = be.AppendUint32(b, 1)
	b = appendString(b, q.Topic)
	b = be.AppendUint32(b, 1)
	b = be.AppendUint32(b, uint32(q.Partition))
	if version >= 9 {
		b = be.AppendUint32(b, unknown) // leader epoch
	}
	b = be.AppendUint64(b, uint64(q.Offset))
	if version >= 5 {
		b = be.AppendUint64(b, ^uint64(0)) // log start, for followers
	}
	b = be.AppendUint32(b, uint32(q.MaxBytes))
	if version >= 7 {
		b = be.AppendUint32(b, 0) // forgotten topics
	}
	if version >= 11 {
		b = appendString(b, "") // rack
	}
	return b
}

func (q *FetchRequest) decode(version int16, body []byte) (*FetchResult, error) {
	r := &reader{b: body}
	r.int32() // throttle time
	if version >= 7 {
		if code := r.int16(); code != 0 {
			return &FetchResult{Err: kafkago.Error(code), HighWatermark: -1, LogStart: -1, Epoch: -1, Next: q.Offset}, nil
		}
		r.int32() // session id
	}
	for range r.length() {
		topic := r.string()
		for range r.length() {
			partition := r.int32()
			res := q.decodePartition(version, r)
			if topic != q.Topic || partition != q.Partition || r.err != nil {
				continue
			}
			var err error
			if res.Err == nil {
				err = q.fill(res)
			}
			return res.FetchResult, err
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	return nil, fmt.Errorf("response without %s/%d", q.Topic, q.Partition)
}

// partitionResponse is the part of a response that is about one partition.
type partitionResponse struct {
	*FetchResult
	aborted []abortedTransaction
	batches []byte
}

func (q *FetchRequest) decodePartition(version int16, r *reader) partitionResponse {
	p := partitionResponse{FetchResult: &FetchResult{Next: q.Offset, LogStart: -1, Epoch: -1}}
	if code := r.int16(); code != 0 {
		p.Err = kafkago.Error(code)
	}
	p.HighWatermark = r.int64()
	r.int64() // last stable offset
	if version >= 5 {
		p.LogStart = r.int64()
	}
	for range r.length() {
		p.aborted = append(p.aborted, abortedTransaction{producer: r.int64(), first: r.int64()})
	}
	if version >= 11 {
		r.int32() // preferred replica
	}
	if n := r.int32(); n > 0 {
		p.batches = r.take(int(n))
	}
	return p
}

// fill reads the batches into the result.
func (q *FetchRequest) fill(p partitionResponse) error {
	if !q.Committed {
		p.aborted = nil // some brokers list them all the same
	}
	got, err := readBatches(p.batches, q.Offset, q.MaxMemory, p.aborted)
	p.Records, p.Epoch, p.Next, p.Wire, p.Memory = got.records, got.epoch, got.next, got.wire, got.memory
	return err
}
