package wire

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segmentio/kafka-go/compress"

	"github.com/ackafter/ackafter/broker"
)

// testBatch is a batch to be encoded.
type testBatch struct {
	base      int64
	lastDelta int32
	attrs     int16
	producer  int64
	firstTime int64
	maxTime   int64
	records   []Record // Time is ignored
	count     int32    // 0: as many as there are records
	epoch     int32
}

func (b testBatch) encode(t testing.TB) []byte {
	t.Helper()
	var payload []byte
	for _, r := range b.records {
		payload = append(payload, encodeRecord(b.base, r)...)
	}
	if kind := compress.Compression(b.attrs & codecMask); kind != compress.None {
		var z bytes.Buffer
		w := kind.Codec().NewWriter(&z)
		if _, err := w.Write(payload); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		payload = z.Bytes()
	}
	count := b.count
	if count == 0 {
		count = int32(len(b.records))
	}
	be := binary.BigEndian
	body := be.AppendUint16(nil, uint16(b.attrs))
	body = be.AppendUint32(body, uint32(b.lastDelta))
	body = be.AppendUint64(body, uint64(b.firstTime))
	body = be.AppendUint64(body, uint64(b.maxTime))
	body = be.AppendUint64(body, uint64(b.producer))
	body = be.AppendUint16(body, 0)
	body = be.AppendUint32(body, 0)
	body = be.AppendUint32(body, uint32(count))
	body = append(body, payload...)

	out := be.AppendUint64(nil, uint64(b.base))
	out = be.AppendUint32(out, uint32(9+len(body)))
	out = be.AppendUint32(out, uint32(b.epoch))
	out = append(out, 2)
	out = be.AppendUint32(out, crc32.Checksum(body, castagnoli))
	return append(out, body...)
}

func encodeRecord(base int64, r Record) []byte {
	null := func(b, v []byte) []byte {
		if v == nil {
			return binary.AppendVarint(b, -1)
		}
		return append(binary.AppendVarint(b, int64(len(v))), v...)
	}
	b := []byte{0}
	b = binary.AppendVarint(b, 0)
	b = binary.AppendVarint(b, r.Offset-base)
	b = null(b, r.Key)
	b = null(b, r.Value)
	b = binary.AppendVarint(b, int64(len(r.Headers)))
	for _, h := range r.Headers {
		b = append(binary.AppendVarint(b, int64(len(h.Name))), h.Name...)
		b = null(b, h.Value)
	}
	return append(binary.AppendVarint(nil, int64(len(b))), b...)
}

// plain is a batch of records with the given offsets.
func plain(lastDelta int32, offsets ...int64) testBatch {
	b := testBatch{base: offsets[0], lastDelta: lastDelta, producer: -1}
	for _, o := range offsets {
		b.records = append(b.records, Record{Offset: o, Value: []byte("v")})
	}
	return b
}

func mark(offset, producer int64, kind byte) testBatch {
	return testBatch{
		base: offset, producer: producer, attrs: transactional | controlBit,
		records: []Record{{Offset: offset, Key: []byte{0, 0, 0, kind}, Value: []byte{0, 0, 0, 0, 0, 0}}},
	}
}

func abortMark(offset, producer int64) testBatch  { return mark(offset, producer, 0) }
func commitMark(offset, producer int64) testBatch { return mark(offset, producer, 1) }

func inTransaction(producer int64, b testBatch) testBatch {
	b.producer, b.attrs = producer, b.attrs|transactional
	return b
}

func encodeAll(t testing.TB, batches ...testBatch) []byte {
	t.Helper()
	var out []byte
	for _, b := range batches {
		out = append(out, b.encode(t)...)
	}
	return out
}

func offsetsOf(records []Record) []int64 {
	var offsets []int64
	for _, r := range records {
		offsets = append(offsets, r.Offset)
	}
	return offsets
}

func TestReadBatches(t *testing.T) {
	t.Parallel()
	two := func(producer int64, offsets ...int64) testBatch {
		return inTransaction(producer, plain(int32(len(offsets)-1), offsets...))
	}
	cut := encodeAll(t, plain(1, 0, 1), plain(0, 2))
	for _, tc := range []struct {
		name    string
		in      []byte
		wanted  int64
		aborted []abortedTransaction
		offsets []int64
		next    int64
	}{
		{name: "nothing", wanted: 5, next: 5},
		{name: "two batches", in: encodeAll(t, plain(1, 0, 1), plain(0, 2)), offsets: []int64{0, 1, 2}, next: 3},
		{name: "from the middle of a batch", in: encodeAll(t, plain(2, 0, 1, 2)), wanted: 1, offsets: []int64{1, 2}, next: 3},
		// case K8
		{name: "holes inside", in: encodeAll(t, plain(47, 3, 7, 50)), offsets: []int64{3, 7, 50}, next: 51},
		// case K8
		{name: "hole at the end of a batch", in: encodeAll(t, plain(99, 3, 7)), offsets: []int64{3, 7}, next: 103},
		{name: "only the hole is left", in: encodeAll(t, plain(99, 3, 7)), wanted: 8, next: 103},
		{name: "batch without records", in: encodeAll(t, testBatch{base: 10, lastDelta: 4, producer: 1}), wanted: 10, next: 15},
		{name: "batch below", in: encodeAll(t, plain(1, 0, 1), plain(0, 9)), wanted: 9, offsets: []int64{9}, next: 10},
		{name: "last batch is cut off", in: cut[:len(cut)-1], offsets: []int64{0, 1}, next: 2},
		{name: "not even a prefix", in: cut[:5], next: 0},
		// case K8
		{name: "committed transactions", in: encodeAll(t, two(1, 0), commitMark(1, 1), two(1, 2), commitMark(3, 1)), offsets: []int64{0, 2}, next: 4},
		{
			name: "aborted transaction", in: encodeAll(t, two(1, 0), plain(0, 1), abortMark(2, 1), plain(0, 3)),
			aborted: []abortedTransaction{{1, 0}}, offsets: []int64{1, 3}, next: 4,
		},
		{
			name: "a producer commits, aborts, commits", in: encodeAll(t, two(1, 0), commitMark(1, 1), two(1, 2), abortMark(3, 1), two(1, 4), commitMark(5, 1)),
			aborted: []abortedTransaction{{1, 2}}, offsets: []int64{0, 4}, next: 6,
		},
		{
			name: "two producers mixed, list not in order", in: encodeAll(t, two(1, 0), two(2, 1), two(1, 2), abortMark(3, 2), commitMark(4, 1), two(2, 5), commitMark(6, 2), two(1, 7), abortMark(8, 1)),
			aborted: []abortedTransaction{{1, 7}, {2, 1}}, offsets: []int64{0, 2, 5}, next: 9,
		},
		{
			name: "aborted transaction that began earlier", in: encodeAll(t, two(1, 10), abortMark(11, 1), plain(0, 12)), wanted: 10,
			aborted: []abortedTransaction{{1, 4}}, offsets: []int64{12}, next: 13,
		},
		{
			name: "records outside of transactions of an aborting producer", in: encodeAll(t, testBatch{base: 0, producer: 1, records: []Record{{Offset: 0}}}),
			aborted: []abortedTransaction{{1, 0}}, offsets: []int64{0}, next: 1,
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := readBatches(tc.in, tc.wanted, 0, tc.aborted)
			if err != nil {
				t.Fatal(err)
			}
			if offsets := offsetsOf(got.records); !slices.Equal(offsets, tc.offsets) || got.next != tc.next {
				t.Errorf("got %v and next %d, want %v and %d", offsets, got.next, tc.offsets, tc.next)
			}
		})
	}
}

// The epoch is that of the last batch that was read, whether its records count or
// not.
func TestReadBatchesEpoch(t *testing.T) {
	t.Parallel()
	first, second, third := plain(0, 0), plain(0, 1), abortMark(2, 1)
	first.epoch, second.epoch, third.epoch = 3, 4, 7
	whole := encodeAll(t, first, second, third)
	for _, tc := range []struct {
		in   []byte
		want int32
	}{{nil, -1}, {encodeAll(t, first), 3}, {encodeAll(t, first, second), 4}, {whole, 7}, {whole[:len(whole)-1], 4}} {
		if got, err := readBatches(tc.in, 0, 0, nil); err != nil || got.epoch != tc.want {
			t.Errorf("epoch %d, %v, want %d", got.epoch, err, tc.want)
		}
	}
	damaged := encodeAll(t, first)
	damaged[len(damaged)-1] ^= 1
	if got, err := readBatches(damaged, 0, 0, nil); err == nil || got.epoch != -1 {
		t.Errorf("damaged: epoch %d, %v", got.epoch, err)
	}
}

func TestReadBatchesErrors(t *testing.T) {
	t.Parallel()
	damaged := encodeAll(t, plain(0, 0))
	damaged[len(damaged)-1] ^= 1
	old := encodeAll(t, plain(0, 0))
	old[batchMagic] = 1
	whole := encodeAll(t, plain(0, 0))
	for _, tc := range []struct {
		name string
		in   []byte
		says string
	}{
		{"checksum", damaged, "checksum is"},
		{"old format", old, "record format 1 is not supported"},
		{"cut off", whole[:len(whole)-1], "of its"},
		{"more records than there are", encodeAll(t, testBatch{base: 0, lastDelta: 9, count: 5, records: []Record{{Offset: 0}}}), "cut off"},
		{"record beyond the batch", encodeAll(t, testBatch{base: 0, records: []Record{{Offset: 5}}}), "record has offset 5"},
		{"record twice", encodeAll(t, testBatch{base: 0, lastDelta: 9, records: []Record{{Offset: 5}, {Offset: 5}}}), "record has offset 5"},
		{"ends before it begins", encodeAll(t, testBatch{base: 5, lastDelta: -1}), "is before the first"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			got, err := readBatches(tc.in, 0, 0, nil)
			if err == nil || !strings.Contains(err.Error(), tc.says) || got.next != 0 {
				t.Errorf("got next %d, %v, want an error with %q", got.next, err, tc.says)
			}
			if tc.name == "cut off" {
				return
			}
			// Behind a batch that can be read, the damaged one is left for the next
			// time.
			first := encodeAll(t, plain(0, -1))
			got, err = readBatches(append(first, tc.in...), -1, 0, nil)
			if err != nil || len(got.records) != 1 || got.next != 0 {
				t.Errorf("behind another batch: got %d records, next %d, %v", len(got.records), got.next, err)
			}
		})
	}
}

// What does not fit is left for the next time, whatever it was packed to.
func TestReadBatchesLimit(t *testing.T) {
	t.Parallel()
	var in []byte
	for i := range int64(10) {
		b := plain(0, i)
		b.attrs = int16(compress.Zstd)
		b.records[0].Value = make([]byte, 100_000)
		in = append(in, b.encode(t)...)
	}
	got, err := readBatches(in, 0, 250_000, nil)
	if err != nil || len(got.records) != 3 || got.next != 3 || got.wire != 3*len(in)/10 || got.memory < 300_000 || got.memory > 310_000 {
		t.Errorf("got %d records, next %d, %d of %d bytes, memory %d, %v", len(got.records), got.next, got.wire, len(in), got.memory, err)
	}
	if got, err := readBatches(in, 3, 1, nil); err != nil || len(got.records) != 1 || got.next != 4 {
		t.Errorf("got %d records, next %d, %v, want one batch at least", len(got.records), got.next, err)
	}
}

func TestReadBatchesCodecs(t *testing.T) {
	t.Parallel()
	for _, kind := range []compress.Compression{compress.None, compress.Gzip, compress.Snappy, compress.Lz4, compress.Zstd} {
		t.Run(kind.String(), func(t *testing.T) {
			t.Parallel()
			b := plain(999, 0)
			b.attrs = int16(kind)
			b.records = nil
			for i := range int64(1000) {
				b.records = append(b.records, Record{Offset: i, Value: bytes.Repeat([]byte{byte(i)}, 100)})
			}
			got, err := readBatches(b.encode(t), 0, 0, nil)
			if err != nil || got.next != 1000 || len(got.records) != 1000 {
				t.Fatalf("got %d records, next %d, %v", len(got.records), got.next, err)
			}
			for i, r := range got.records {
				if !bytes.Equal(r.Value, bytes.Repeat([]byte{byte(i)}, 100)) {
					t.Fatalf("record %d is %x", i, r.Value)
				}
			}
		})
	}
	bad := plain(0, 0)
	in := bad.encode(t)
	in[batchAttributes+1] = 7
	binary.BigEndian.PutUint32(in[batchCRC:], crc32.Checksum(in[batchAttributes:], castagnoli))
	if _, err := readBatches(in, 0, 0, nil); err == nil || !strings.Contains(err.Error(), "compression codec 7 is not supported") {
		t.Errorf("codec 7: %v", err)
	}
}

func TestRecordFields(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 5, 4, 3, 2, 1, 7e6, time.UTC)
	want := []Record{
		{Offset: 0, Key: []byte("k"), Value: []byte("v"), Headers: broker.Headers{
			{Name: "a", Value: []byte("1")}, {Name: "a", Value: []byte("2")}, {Name: "", Value: []byte{}}, {Name: "null"},
		}},
		{Offset: 1},
		{Offset: 2, Key: []byte{}, Value: []byte{}},
		{Offset: 3, Value: []byte("\x00\x00\x00\x00\x0c{}")},
	}
	b := testBatch{lastDelta: 3, firstTime: at.UnixMilli(), maxTime: at.Add(time.Hour).UnixMilli(), records: want}
	read := func(b testBatch) []Record {
		t.Helper()
		in := b.encode(t)
		got, err := readBatches(in, 0, 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		for i := range in { // the response's memory is used again
			in[i] = 0xee
		}
		return got.records
	}
	records := read(b)
	for i, r := range records {
		if !r.Time.Equal(at) {
			t.Errorf("record %d: time is %v, want %v", i, r.Time, at)
		}
		r.Time = time.Time{}
		if !reflect.DeepEqual(r, want[i]) {
			t.Errorf("record %d is %#v, want %#v", i, r, want[i])
		}
		if r.Size() < len(r.Key)+len(r.Value) {
			t.Errorf("record %d: size is %d", i, r.Size())
		}
	}
	b.attrs = appendTimeBit
	if got := read(b)[0].Time; !got.Equal(at.Add(time.Hour)) {
		t.Errorf("append time is %v", got)
	}
	b.attrs, b.firstTime = 0, -1
	if got := read(b)[0].Time; !got.IsZero() {
		t.Errorf("time of a record without one is %v", got)
	}
}

func FuzzReadBatches(f *testing.F) {
	f.Add(encodeAll(f, plain(1, 0, 1), abortMark(2, 5)), int64(0))
	b := plain(9, 0, 5)
	b.attrs = int16(compress.Gzip)
	f.Add(encodeAll(f, b), int64(3))
	f.Fuzz(func(t *testing.T, in []byte, wanted int64) {
		// A right checksum, so that what is behind it is reached.
		if len(in) >= batchHead {
			in = slices.Clone(in)
			in[batchMagic] = 2
			binary.BigEndian.PutUint32(in[8:], uint32(len(in)-batchPrefix))
			binary.BigEndian.PutUint32(in[batchCRC:], crc32.Checksum(in[batchAttributes:], castagnoli))
		}
		got, err := readBatches(in, wanted, 0, []abortedTransaction{{5, 0}})
		records, next := got.records, got.next
		if next < wanted {
			t.Fatalf("next is %d, before %d", next, wanted)
		}
		if err != nil && (len(records) > 0 || next != wanted) {
			t.Fatalf("%d records and next %d with an error", len(records), next)
		}
		for i, r := range records {
			if r.Offset < wanted || r.Offset >= next || (i > 0 && r.Offset <= records[i-1].Offset) {
				t.Fatalf("record %d has offset %d: wanted %d, next %d", i, r.Offset, wanted, next)
			}
		}
	})
}
