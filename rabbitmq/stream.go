package rabbitmq

import (
	"fmt"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Stream says where a source begins in a stream.
//
// Over AMQP 0.9.1 the broker keeps no offset for whoever reads. After a reconnect
// the source goes on with the first message that is not acked; a new source begins
// where Start says. Who wants to go on across restarts keeps Source.Position and
// begins at StreamOffset, or reads the stream again: what was handled before is
// recognised by its business key. Acks let the broker push more; they remove
// nothing.
type Stream struct {
	// Start says where to begin. Default StreamFirst.
	Start StreamStart
	// Offset is where to begin with StreamOffset.
	Offset int64
	// Time is where to begin with StreamTimestamp: with the chunk that was written
	// then, so messages that are somewhat older may come, too.
	Time time.Time
}

// StreamStart says where a source begins in a stream.
type StreamStart int

// Where to begin.
const (
	// StreamFirst begins with the oldest message that the stream has.
	StreamFirst StreamStart = iota
	// StreamLast begins with the last chunk that was written.
	StreamLast
	// StreamNext begins with the next message that is written.
	StreamNext
	// StreamOffset begins at an offset, or after it where it does not exist.
	StreamOffset
	// StreamTimestamp begins at a time.
	StreamTimestamp
)

func (s *Stream) validate() error {
	switch {
	case s == nil:
		return nil
	case s.Start < StreamFirst || s.Start > StreamTimestamp:
		return configError("Stream.Start", int(s.Start), "is not one of StreamFirst, StreamLast, StreamNext, StreamOffset, StreamTimestamp")
	case s.Offset < 0:
		return configError("Stream.Offset", s.Offset, "must not be negative")
	case s.Offset > 0 && s.Start != StreamOffset:
		return configError("Stream.Offset", s.Offset, "is for Start: StreamOffset only")
	case s.Start == StreamTimestamp && s.Time.IsZero():
		return configError("Stream.Time", s.Time, "must be set for Start: StreamTimestamp")
	case s.Start != StreamTimestamp && !s.Time.IsZero():
		return configError("Stream.Time", s.Time, "is for Start: StreamTimestamp only")
	}
	return nil
}

// arguments are those of a consumer. next is where to go on; -1: nothing was read
// yet, and since is when this source began to read; zero: it begins now.
func (s *Stream) arguments(next int64, since time.Time) amqp.Table {
	const name = "x-stream-offset"
	switch {
	case s == nil:
		return nil
	case next >= 0:
		return amqp.Table{name: next}
	case s.Start == StreamOffset:
		return amqp.Table{name: s.Offset}
	case s.Start == StreamTimestamp:
		return amqp.Table{name: s.Time}
	case s.Start == StreamFirst:
		return amqp.Table{name: "first"}
	case !since.IsZero():
		// What was written since then must not be skipped.
		return amqp.Table{name: since}
	case s.Start == StreamLast:
		return amqp.Table{name: "last"}
	}
	return amqp.Table{name: "next"}
}

// streamID names a message of a stream: "events/4711".
func streamID(queue string, offset int64) string { return fmt.Sprintf("%s/%d", queue, offset) }
