package kafka

import (
	"encoding/binary"
	"slices"
	"strconv"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// Framing says what stands before the payload in the value of a record.
type Framing int

// The framings.
const (
	// FramingNone hands out values as they are.
	FramingNone Framing = iota
	// FramingConfluent takes off the prefix that schema registry serializers put
	// before Avro and JSON Schema payloads: a zero byte and a schema id of four
	// bytes. The id becomes the header HeaderSchemaID.
	FramingConfluent
	// FramingConfluentProtobuf is FramingConfluent for Protobuf payloads, where
	// the path to the message's type in its schema follows the id; the path becomes
	// the header HeaderSchemaPath.
	FramingConfluentProtobuf
)

// The headers that tell what was taken off; see Config.Framing. They come before
// the record's own.
const (
	// HeaderSchemaID holds the schema id in decimal: "12".
	HeaderSchemaID = "ackafter-schema-id"
	// HeaderSchemaPath holds the indexes of the message's type in decimal,
	// separated by commas: "0" is the first type of the schema, "1,0" the first one
	// that is nested in the second.
	HeaderSchemaPath = "ackafter-schema-path"
)

const (
	framingMagic  = 0
	framingPrefix = 5 // the magic byte and the id
	// maxSchemaPath is how deep a type may be nested; nobody comes near.
	maxSchemaPath = 64
)

// strip takes the frame off a record's value. A value that has none, or a broken
// one, stays as it is and gets no header: whether that is an error is for whoever
// reads the payload to say.
func (f Framing) strip(r *wire.Record) {
	if f == FramingNone || len(r.Value) < framingPrefix || r.Value[0] != framingMagic {
		return
	}
	id := binary.BigEndian.Uint32(r.Value[1:])
	payload := r.Value[framingPrefix:]
	told := broker.Headers{{Name: HeaderSchemaID, Value: strconv.AppendUint(nil, uint64(id), 10)}}
	if f == FramingConfluentProtobuf {
		path, rest, ok := readSchemaPath(payload)
		if !ok {
			return
		}
		payload = rest
		told = append(told, broker.Header{Name: HeaderSchemaPath, Value: path})
	}
	r.Value = payload
	r.Headers = slices.Concat(told, r.Headers)
}

// readSchemaPath takes the path to a type off a payload: how many indexes there
// are and the indexes, zigzag varints all. A single zero stands for the path "0".
func readSchemaPath(b []byte) (path, rest []byte, ok bool) {
	count, n := binary.Varint(b)
	if n <= 0 || count < 0 || count > maxSchemaPath {
		return nil, nil, false
	}
	b = b[n:]
	if count == 0 {
		return []byte("0"), b, true
	}
	for i := range count {
		index, n := binary.Varint(b)
		if n <= 0 || index < 0 {
			return nil, nil, false
		}
		if i > 0 {
			path = append(path, ',')
		}
		path = strconv.AppendInt(path, index, 10)
		b = b[n:]
	}
	return path, b, true
}
