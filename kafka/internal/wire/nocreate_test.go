package wire

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// sink is a connection that keeps what is written.
type sink struct {
	net.Conn
	b bytes.Buffer
}

func (s *sink) Write(b []byte) (int, error) { return s.b.Write(b) }

// encodeRequest encodes a request as another client does.
func encodeRequest(r kmsg.Request) []byte {
	f := kmsg.NewRequestFormatter(kmsg.FormatterClientID("test"))
	return f.AppendRequest(nil, r, 7)
}

func TestNeverCreate(t *testing.T) {
	t.Parallel()
	metadata := func(version int16) *kmsg.MetadataRequest {
		r := kmsg.NewPtrMetadataRequest()
		topic := kmsg.NewMetadataRequestTopic()
		topic.Topic = kmsg.StringPtr("orders")
		r.Version, r.Topics, r.AllowAutoTopicCreation = version, append(r.Topics, topic), true
		return r
	}
	other := kmsg.NewPtrHeartbeatRequest() // ends with a byte that must stay
	other.Version, other.Group, other.MemberID = 0, "g", "\x01"
	var in, want []byte
	for version := int16(1); version <= 7; version++ {
		r := metadata(version)
		in = append(append(in, encodeRequest(r)...), encodeRequest(other)...)
		r.AllowAutoTopicCreation = false
		want = append(append(want, encodeRequest(r)...), encodeRequest(other)...)
	}
	if bytes.Equal(in, want) {
		t.Fatal("nothing would change")
	}
	kept := bytes.Clone(in)
	for size := 1; size <= len(in); size++ { // in pieces of every size
		s := &sink{}
		c := NeverCreate(s)
		for at := 0; at < len(in); at += size {
			piece := in[at:min(at+size, len(in))]
			if n, err := c.Write(piece); err != nil || n != len(piece) {
				t.Fatalf("wrote %d of %d: %v", n, len(piece), err)
			}
		}
		if got := s.b.Bytes(); !bytes.Equal(got, want) {
			t.Fatalf("in pieces of %d: got %x, want %x", size, got, want)
		}
		if !bytes.Equal(in, kept) {
			t.Fatal("the caller's bytes were changed")
		}
	}
}

// Whatever is written arrives, and only the last byte of a request may differ.
func FuzzNeverCreate(f *testing.F) {
	r := kmsg.NewPtrMetadataRequest()
	r.Version, r.AllowAutoTopicCreation = 6, true
	f.Add(encodeRequest(r), uint8(3))
	f.Add(binary.BigEndian.AppendUint32(nil, 0), uint8(1))
	f.Fuzz(func(t *testing.T, in []byte, size uint8) {
		s := &sink{}
		c := NeverCreate(s)
		kept := bytes.Clone(in)
		for at, step := 0, int(size)+1; at < len(in); at += step {
			if _, err := c.Write(in[at:min(at+step, len(in))]); err != nil {
				t.Fatal(err)
			}
		}
		got := s.b.Bytes()
		if len(got) != len(in) || !bytes.Equal(in, kept) {
			t.Fatalf("%d bytes became %d", len(in), len(got))
		}
		for i := range got {
			if got[i] != in[i] && got[i] != 0 {
				t.Fatalf("byte %d became %x", i, got[i])
			}
		}
	})
}
