package kafka

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kgo"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// case K9
func TestFramingStrip(t *testing.T) {
	t.Parallel()
	const none, avro, protobuf = FramingNone, FramingConfluent, FramingConfluentProtobuf
	id := func(v string) string { return HeaderSchemaID + "=" + v + " " }
	path := func(v string) string { return HeaderSchemaPath + "=" + v + " " }
	for _, tc := range []struct {
		framing Framing
		value   string
		want    string
		headers string
	}{
		{none, "\x00\x00\x00\x00\x0c{}", "\x00\x00\x00\x00\x0c{}", ""},
		{avro, "\x00\x00\x00\x00\x0c{}", "{}", id("12")},
		{avro, "\x00\xff\xff\xff\xff{}", "{}", id("4294967295")},
		{avro, "\x00\x00\x00\x00\x0c", "", id("12")},                                        // an empty payload
		{avro, "\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00", "\x00\x00\x00\x00\x00", id("0")}, // one frame
		{avro, "", "", ""},
		{avro, "{}", "{}", ""},
		{avro, "\x01\x00\x00\x00\x0c{}", "\x01\x00\x00\x00\x0c{}", ""},
		{avro, "\x00\x00\x00\x00", "\x00\x00\x00\x00", ""}, // cut off
		{avro, "\x00", "\x00", ""},
		{protobuf, "\x00\x00\x00\x00\x0c\x00p", "p", id("12") + path("0")},
		{protobuf, "\x00\x00\x00\x00\x0c\x02\x00p", "p", id("12") + path("0")},
		{protobuf, "\x00\x00\x00\x00\x0c\x04\x02\x00p", "p", id("12") + path("1,0")},
		{protobuf, "\x00\x00\x00\x00\x0c\x02\x80\x02p", "p", id("12") + path("128")},
		{protobuf, "\x00\x00\x00\x00\x0c\x00", "", id("12") + path("0")},
		// Broken paths: as it is, the id not taken off either.
		{protobuf, "\x00\x00\x00\x00\x0c", "\x00\x00\x00\x00\x0c", ""},
		{protobuf, "\x00\x00\x00\x00\x0c\x01p", "\x00\x00\x00\x00\x0c\x01p", ""},
		{protobuf, "\x00\x00\x00\x00\x0c\x04\x02", "\x00\x00\x00\x00\x0c\x04\x02", ""},
		{protobuf, "\x00\x00\x00\x00\x0c\x02\x01p", "\x00\x00\x00\x00\x0c\x02\x01p", ""},
		{protobuf, "\x00\x00\x00\x00\x0c\xff\xff\xff\xff\x0fp", "\x00\x00\x00\x00\x0c\xff\xff\xff\xff\x0fp", ""},
		{protobuf, "\x00\x00\x00\x00\x0c\x80", "\x00\x00\x00\x00\x0c\x80", ""},
	} {
		own := broker.Headers{{Name: "own", Value: []byte("1")}}
		r := &wire.Record{Value: []byte(tc.value), Headers: own}
		tc.framing.strip(r)
		var headers string
		for _, h := range r.Headers {
			headers += h.Name + "=" + string(h.Value) + " "
		}
		if string(r.Value) != tc.want || r.Value == nil || headers != tc.headers+"own=1 " {
			t.Errorf("framing %d of %q: got %q with %s, want %q with %s", tc.framing, tc.value, r.Value, headers, tc.want, tc.headers)
		}
		if len(own) != 1 {
			t.Error("the record's headers were changed in place")
		}
	}
	for _, f := range []Framing{none, avro, protobuf} {
		r := &wire.Record{}
		if f.strip(r); r.Value != nil || r.Headers != nil {
			t.Errorf("framing %d: null became %q with %v", f, r.Value, r.Headers)
		}
	}
}

// case K9
func TestFraming(t *testing.T) {
	t.Parallel()
	c := newFake(t, kfake.SeedTopics(1, "orders"))
	framedKey := []byte("\x00\x00\x00\x00\x0ckey")
	var records []*kgo.Record
	for _, v := range [][]byte{[]byte("\x00\x00\x00\x00\x0c{}"), []byte("{}"), nil, {}, []byte("\x00\x00"), []byte("last")} {
		records = append(records, &kgo.Record{Topic: "orders", Key: framedKey, Value: v})
	}
	produce(t, producer(t, c), records...)
	cfg := quick(t)
	cfg.Framing = FramingConfluent
	s := openSource(t, c, []string{"orders"}, cfg)
	ds := receive(t, s, len(records))
	if got := values(ds); !slices.Equal(got, []string{"{}", "{}", "", "", "\x00\x00", "last"}) {
		t.Errorf("got %q", got)
	}
	if ds[2].Message.Body != nil || ds[3].Message.Body == nil {
		t.Error("null and empty became the same")
	}
	for i, d := range ds {
		if !bytes.Equal(d.Message.Key, framedKey) || d.Lane != ds[0].Lane || d.Message.Position != broker.At(int64(i)) {
			t.Errorf("record %d: key %q in lane %q at %s", i, d.Message.Key, d.Lane, d.Message.Position)
		}
	}
	if id, ok := ds[0].Message.Headers.Get(HeaderSchemaID); !ok || string(id) != "12" {
		t.Errorf("schema id is %q", id)
	}
	if _, ok := ds[1].Message.Headers.Get(HeaderSchemaID); ok {
		t.Error("a body without a frame has a schema id")
	}
	ack(t, ds...)
	awaitCommitted(t, c, "orders", 0, int64(len(records)))
}

// Whatever the bytes are: what is handed out is the end of what came, and a
// header says how much is missing at its begin.
func FuzzFraming(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x0c{}"))
	f.Add([]byte("\x00\x00\x00\x00\x0c\x04\x02\x00p"))
	f.Add([]byte("\x00\x00\x00\x00\x0c\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, value []byte) {
		for _, framing := range []Framing{FramingNone, FramingConfluent, FramingConfluentProtobuf} {
			r := &wire.Record{Value: value}
			framing.strip(r)
			id, stripped := r.Headers.Get(HeaderSchemaID)
			if !stripped {
				if !bytes.Equal(r.Value, value) || len(r.Headers) != 0 {
					t.Fatalf("framing %d: %x became %x with %v", framing, value, r.Value, r.Headers)
				}
				continue
			}
			if framing == FramingNone || r.Value == nil || !bytes.HasSuffix(value, r.Value) || value[0] != 0 ||
				string(id) != fmt.Sprint(binary.BigEndian.Uint32(value[1:])) {
				t.Fatalf("framing %d: %x became %x with id %s", framing, value, r.Value, id)
			}
			if taken := len(value) - len(r.Value); framing == FramingConfluent && taken != framingPrefix {
				t.Fatalf("%d bytes of %x were taken", taken, value)
			}
		}
	})
}
