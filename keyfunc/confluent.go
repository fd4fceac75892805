package keyfunc

import (
	"encoding/binary"
	"fmt"
)

// confluentHeader is the length of the registry's prefix: a zero byte and a
// schema id of four bytes.
const confluentHeader = 5

// ConfluentFrame is the prefix that schema registry serializers put before Avro
// and JSON Schema payloads: a zero byte and a schema id of four bytes. The
// schema id plays no part in the key.
//
// A body that begins with another byte has no frame (ErrMissing); one that is
// cut off in the prefix is invalid.
func ConfluentFrame() Frame {
	const name = "confluent"
	return &layer{name: name, body: func(body []byte) ([]byte, error) { return stripConfluent(name, body) }}
}

// ConfluentProtobufFrame is ConfluentFrame for Protobuf payloads, where the
// path to the message's type follows the schema id: a count and as many
// indexes, each a varint in zigzag coding; a single zero stands for the first
// type. The rest is binary Protobuf: take the key out of it with [Custom].
func ConfluentProtobufFrame() Frame {
	const name = "confluent-protobuf"
	return &layer{name: name, body: func(body []byte) ([]byte, error) {
		body, err := stripConfluent(name, body)
		if err != nil {
			return nil, err
		}
		const rule = "type index behind the schema id is broken"
		count, n := binary.Varint(body)
		if n <= 0 || count < 0 || count > int64(len(body)) {
			return nil, invalid(name, "", rule)
		}
		body = body[n:]
		for range count {
			index, n := binary.Varint(body)
			if n <= 0 || index < 0 {
				return nil, invalid(name, "", rule)
			}
			body = body[n:]
		}
		return body, nil
	}}
}

func stripConfluent(name string, body []byte) ([]byte, error) {
	if body[0] != 0 {
		return nil, missing(name, "", fmt.Sprintf("body has no registry frame: first byte is 0x%02x, not 0x00", body[0]))
	}
	if len(body) < confluentHeader {
		return nil, invalid(name, "", "registry frame is cut off")
	}
	return body[confluentHeader:], nil
}
