// Package broker is the seam between ackafter's inbox and a message broker. It
// holds data and contracts only and depends on nothing but the standard
// library.
//
// Reading order: a [Message] is plain data; a [Delivery] is one hand-over of a
// message that can be settled (acked or nacked) once and can be lost; a
// [Source] is a broker adapter's receiving end. Adapters (packages kafka,
// broker/memory, ...) implement Source and [Settler]; package inbox drives
// them. Package brokertest holds the rules of this page as a test suite.
package broker

import (
	"strconv"
	"time"
)

// Message is one message as a broker delivered it. It is data only: nothing in
// it can settle the delivery. Once handed over by a [Source] it must not be
// changed; it may be read concurrently.
type Message struct {
	// ID is the broker's own id of the message ("orders/3/4711", an AMQP
	// message-id, an SQS MessageId). It is good for logs only: it changes when a
	// topic is replayed or the broker is changed. Empty when the broker has none.
	ID string

	// Source names the source partition that Position counts in, the broker
	// kind first: "kafka:orders/3", "rabbitmq:billing", "memory:orders". Empty
	// when the message comes from somewhere without a name.
	Source string

	// Position is the message's place within Source. The zero value means that
	// it has none.
	Position Position

	// Key is the broker's own key (Kafka record key, routing key, message
	// group). Nil when there is none; empty and nil differ.
	Key []byte

	// Headers are the headers in the broker's order, repeated names kept.
	Headers Headers

	// Body is the payload. Nil for a message without one (a Kafka tombstone);
	// nil and empty differ.
	Body []byte

	// Time is when the broker or the producer says the message was made. Zero
	// when unknown.
	Time time.Time
}

// Size returns the bytes that the message keeps in memory, roughly: body, key,
// headers and a fixed overhead for the message and for each header. The loop
// bounds its memory with it.
func (m *Message) Size() int {
	const overhead, perHeader = 256, 40
	n := overhead + perHeader*len(m.Headers) + len(m.Body) + len(m.Key) + len(m.ID) + len(m.Source)
	for _, h := range m.Headers {
		n += len(h.Name) + len(h.Value)
	}
	return n
}

// Position is a place in a source partition, ordered by Offset: a Kafka
// offset, a stream offset. The zero value means "no position".
type Position struct {
	// Offset counts within the message's Source.
	Offset int64
	// Known tells that Offset is set; 0 is a valid offset.
	Known bool
}

// At returns the known position offset.
func At(offset int64) Position { return Position{Offset: offset, Known: true} }

// String returns the offset in decimal, or "" when there is no position.
func (p Position) String() string {
	if !p.Known {
		return ""
	}
	return strconv.FormatInt(p.Offset, 10)
}

// Header is one header of a message.
type Header struct {
	Name  string
	Value []byte
}

// Headers keeps headers in order; names may repeat.
type Headers []Header

// Get returns the value of the first header called name, compared exactly, and
// whether there is one.
func (h Headers) Get(name string) ([]byte, bool) {
	for i := range h {
		if h[i].Name == name {
			return h[i].Value, true
		}
	}
	return nil, false
}

// Values returns the values of all headers called name, compared exactly, in
// order; nil when there is none.
func (h Headers) Values(name string) [][]byte {
	var values [][]byte
	for i := range h {
		if h[i].Name == name {
			values = append(values, h[i].Value)
		}
	}
	return values
}
