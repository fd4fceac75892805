package keyfunc

import "github.com/ackafter/ackafter/broker"

// BrokerKey takes the broker's own key (broker.Message.Key): a Kafka record key,
// an AMQP routing key, an SQS message group. It is a business key only if the
// producer sets another one for every event; where it merely says what belongs
// together (all events of one customer), Join it with what tells the events
// apart.
//
// A nil key is ErrMissing, an empty one is invalid. A binary key (a number in
// eight bytes, an Avro record) is mostly not UTF-8 or holds a NUL: use [Custom]
// to write it out in hex.
func BrokerKey() Func { return newFunc("broker-key", brokerKeyPart{}) }

type brokerKeyPart struct{}

func (brokerKeyPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	if m.Key == nil {
		return dst, missing("broker-key", "", "message has no broker key")
	}
	return appendText(dst, "broker-key", "", m.Key)
}

func (brokerKeyPart) text() string { return "broker-key" }
func (brokerKeyPart) arity() int   { return 1 }

// MessageID takes the broker's own id of the message (broker.Message.ID). It is
// the last resort: it tells redeliveries of one publication apart from other
// messages and nothing more. When a topic is replayed into another, mirrored or
// moved to another broker, or when a producer publishes again because it never
// saw the answer, the same event has a new id and is handled again. Prefer any
// key that the producer puts into the message.
//
// An empty ID is ErrMissing.
func MessageID() Func { return newFunc("message-id", messageIDPart{}) }

type messageIDPart struct{}

func (messageIDPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	if m.ID == "" {
		return dst, missing("message-id", "", "message has no id")
	}
	return appendText(dst, "message-id", "", m.ID)
}

func (messageIDPart) text() string { return "message-id" }
func (messageIDPart) arity() int   { return 1 }
