package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
	"time"

	"github.com/segmentio/kafka-go/compress"

	"github.com/ackafter/ackafter/broker"
)

// Record is one record of a partition. A nil key or value is null in Kafka,
// an empty one is not.
type Record struct {
	Offset  int64
	Time    time.Time // zero when the record has none
	Key     []byte
	Value   []byte
	Headers broker.Headers
}

// Size returns roughly the memory that the record takes, with what the adapter
// keeps for it (measured: 370 bytes beside key and value).
func (r *Record) Size() int {
	const overhead, perHeader = 384, 48
	n := overhead + len(r.Key) + len(r.Value)
	for _, h := range r.Headers {
		n += perHeader + len(h.Name) + len(h.Value)
	}
	return n
}

// abortedTransaction says that a producer's records from an offset on, up to
// its next abort mark, do not count.
type abortedTransaction struct{ producer, first int64 }

// The layout of a batch of records, format 2.
const (
	batchPrefix     = 12 // base offset and length, not counted in the length
	batchEpoch      = 12
	batchMagic      = 16
	batchCRC        = 17
	batchAttributes = 21 // what the CRC covers begins here
	batchHead       = 61 // the records begin here

	codecMask     = 0b0111
	appendTimeBit = 1 << 3
	transactional = 1 << 4
	controlBit    = 1 << 5

	// maxUnpacked is the size beyond which a compressed batch is refused.
	maxUnpacked = 512 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// batch is a batch of records whose head has been read.
type batch struct {
	base, last int64
	attributes int16
	firstTime  int64
	maxTime    int64
	producer   int64
	count      int32
	packed     []byte
}

// batches is what was read of a sequence of batches.
type batches struct {
	records []Record
	epoch   int32 // of the leader that wrote the last batch; -1 when unknown
	next    int64 // the offset to go on from
	wire    int   // bytes that were read
	memory  int   // bytes that the records take
}

// readBatches returns the records with offsets from wanted on, and stops after
// the batch with which they take more than limit bytes (0: no limit). A batch
// that is cut off at the end is left for the next time. An error is returned
// only when nothing could be read before it.
func readBatches(b []byte, wanted int64, limit int, aborted []abortedTransaction) (batches, error) {
	got := batches{next: wanted, epoch: -1}
	skip := abortedFilter{pending: aborted}
	for len(b) >= batchPrefix && (limit == 0 || got.memory < limit) {
		size := batchPrefix + int(binary.BigEndian.Uint32(b[8:]))
		if size > len(b) {
			if got.wire == 0 {
				return batches{next: wanted, epoch: -1}, fmt.Errorf("batch at offset %d: %d of its %d bytes came", offsetOf(b), len(b), size)
			}
			break
		}
		records, last, err := readBatch(b[:size], wanted, &skip)
		if err != nil {
			if got.next == wanted {
				return batches{next: wanted, epoch: -1}, fmt.Errorf("batch at offset %d: %w", offsetOf(b), err)
			}
			break
		}
		for i := range records {
			got.memory += records[i].Size()
		}
		got.records = append(got.records, records...)
		got.epoch = int32(binary.BigEndian.Uint32(b[batchEpoch:]))
		got.next = max(got.next, last+1)
		got.wire += size
		b = b[size:]
	}
	return got, nil
}

func offsetOf(b []byte) int64 { return int64(binary.BigEndian.Uint64(b)) }

// readBatch returns the records of a batch that count, and its last offset.
func readBatch(b []byte, wanted int64, skip *abortedFilter) ([]Record, int64, error) {
	h, err := parseBatch(b)
	if err != nil {
		return nil, 0, err
	}
	if h.attributes&controlBit != 0 {
		abort, err := h.isAbort()
		if err != nil {
			return nil, 0, err
		}
		skip.mark(h, abort)
		return nil, h.last, nil
	}
	if skip.covers(h) || h.last < wanted {
		return nil, h.last, nil
	}
	records, err := h.records(wanted)
	return records, h.last, err
}

// parseBatch reads the head and checks the sum.
func parseBatch(b []byte) (*batch, error) {
	if len(b) <= batchMagic {
		return nil, errShort
	}
	if magic := b[batchMagic]; magic != 2 {
		return nil, fmt.Errorf("record format %d is not supported, only 2 (Kafka 0.11 and later)", magic)
	}
	if len(b) < batchHead {
		return nil, errShort
	}
	want := binary.BigEndian.Uint32(b[batchCRC:])
	if got := crc32.Checksum(b[batchAttributes:], castagnoli); got != want {
		return nil, fmt.Errorf("checksum is %08x, must be %08x", got, want)
	}
	r := &reader{b: b[batchAttributes:]}
	h := &batch{base: offsetOf(b)}
	h.attributes = r.int16()
	h.last = h.base + int64(r.int32())
	h.firstTime = r.int64()
	h.maxTime = r.int64()
	h.producer = r.int64()
	r.int16() // producer epoch
	r.int32() // sequence
	h.count = r.int32()
	h.packed = r.b
	if h.last < h.base {
		return nil, fmt.Errorf("last offset %d is before the first", h.last)
	}
	return h, r.err
}

// unpack returns the records' bytes.
func (h *batch) unpack() ([]byte, error) {
	kind := compress.Compression(h.attributes & codecMask)
	if kind == compress.None {
		return h.packed, nil
	}
	codec := kind.Codec()
	if codec == nil {
		return nil, fmt.Errorf("compression codec %d is not supported", kind)
	}
	z := codec.NewReader(bytes.NewReader(h.packed))
	b, err := io.ReadAll(io.LimitReader(z, maxUnpacked+1))
	if closeErr := z.Close(); err == nil {
		err = closeErr
	}
	if err == nil && len(b) > maxUnpacked {
		err = fmt.Errorf("more than %d bytes", maxUnpacked)
	}
	if err != nil {
		return nil, fmt.Errorf("decompress %s: %w", codec.Name(), err)
	}
	return b, nil
}

// records returns those from wanted on.
func (h *batch) records(wanted int64) ([]Record, error) {
	b, err := h.unpack()
	if err != nil {
		return nil, err
	}
	r := &reader{b: b}
	if int64(h.count) > int64(len(b)) || h.count < 0 {
		return nil, fmt.Errorf("%d records in %d bytes", h.count, len(b))
	}
	records := make([]Record, 0, h.count)
	previous := h.base - 1
	for range h.count {
		size := r.varint()
		if size < 0 {
			r.fail()
		}
		one := &reader{b: r.bytesOf(uint64(size))}
		if r.err != nil {
			return nil, r.err
		}
		rec := h.record(one, wanted)
		if one.err != nil {
			return nil, one.err
		}
		if rec.Offset <= previous || rec.Offset > h.last {
			return nil, fmt.Errorf("record has offset %d, must be from %d to %d", rec.Offset, previous+1, h.last)
		}
		previous = rec.Offset
		if rec.Offset >= wanted {
			records = append(records, rec)
		}
	}
	return records, nil
}

// record reads one record. What it returns does not share the response's
// memory: a slow message must not keep its whole batch alive.
func (h *batch) record(r *reader, wanted int64) Record {
	r.take(1) // attributes, unused
	timestamp := h.firstTime + r.varint()
	rec := Record{Offset: h.base + r.varint()}
	if rec.Offset < wanted || r.err != nil {
		return rec
	}
	if h.attributes&appendTimeBit != 0 {
		timestamp = h.maxTime
	}
	if timestamp >= 0 {
		rec.Time = time.UnixMilli(timestamp)
	}
	own := make([]byte, 0, len(r.b))
	rec.Key, own = keep(own, r)
	rec.Value, own = keep(own, r)
	count := r.varint()
	if count < 0 || count > int64(len(r.b)) {
		r.fail()
		return rec
	}
	if count > 0 {
		rec.Headers = make(broker.Headers, count)
	}
	for i := range rec.Headers {
		n := r.varint()
		if n < 0 {
			r.fail()
			return rec
		}
		rec.Headers[i].Name = string(r.bytesOf(uint64(n)))
		rec.Headers[i].Value, own = keep(own, r)
	}
	return rec
}

// keep copies a nullable byte string to the end of own and returns it, and
// own with it.
func keep(own []byte, r *reader) (value, rest []byte) {
	n := r.varint()
	if n < 0 {
		return nil, own
	}
	at := len(own)
	own = append(own, r.bytesOf(uint64(n))...)
	return own[at:len(own):len(own)], own
}

// isAbort tells an abort mark from a commit mark.
func (h *batch) isAbort() (bool, error) {
	marks, err := h.records(h.base)
	if err != nil {
		return false, err
	}
	const abort = 0
	for _, m := range marks {
		if len(m.Key) < 4 {
			return false, errors.New("control record without a type")
		}
		if binary.BigEndian.Uint16(m.Key[2:]) == abort {
			return true, nil
		}
	}
	return false, nil
}

// abortedFilter knows which batches belong to aborted transactions. It must
// see the batches in order.
type abortedFilter struct {
	pending []abortedTransaction // not begun yet, by first offset
	active  map[int64]struct{}   // producers in an aborted transaction
}

// reach begins the transactions whose first offset is not after the batch.
func (f *abortedFilter) reach(h *batch) {
	if f.active == nil && len(f.pending) > 0 {
		slices.SortFunc(f.pending, func(a, b abortedTransaction) int { return int(min(max(a.first-b.first, -1), 1)) })
		f.active = make(map[int64]struct{})
	}
	for len(f.pending) > 0 && f.pending[0].first <= h.last {
		f.active[f.pending[0].producer] = struct{}{}
		f.pending = f.pending[1:]
	}
}

// covers tells whether the batch's records do not count.
func (f *abortedFilter) covers(h *batch) bool {
	f.reach(h)
	_, ok := f.active[h.producer]
	return ok && h.attributes&transactional != 0
}

// mark ends a producer's transaction.
func (f *abortedFilter) mark(h *batch, abort bool) {
	f.reach(h)
	if abort {
		delete(f.active, h.producer)
	}
}
