package rabbitmq

import (
	"crypto/rand"
	"errors"
	"fmt"
	"strconv"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
)

// maxShort is how long a short string of the protocol may be.
const maxShort = 255

// notPublished are headers that a message has when it comes from a queue, and that
// must not travel on: the broker checks the user's name, would drop a message of
// its age, counts by itself, and would send copies to the keys of CC and BCC.
var notPublished = map[string]bool{
	HeaderUserID: true, HeaderExpiration: true, HeaderExchange: true, headerDeliveryCount: true, headerStreamOffset: true,
	"CC": true, "BCC": true,
}

// newPublishing makes of a message what is published, and its routing key.
func (c *PublisherConfig) newPublishing(m *broker.Message) (p amqp.Publishing, key string, err error) {
	if m == nil {
		return p, "", errors.New("it is nil")
	}
	if len(m.Body) > c.MaxMessageBytes {
		return p, "", fmt.Errorf("%w: its body has %d bytes, PublisherConfig.MaxMessageBytes allows %d", ErrTooLarge, len(m.Body), c.MaxMessageBytes)
	}
	key = c.RoutingKey
	if key == "" {
		key = string(m.Key)
	}
	if len(key) > maxShort {
		return p, "", fmt.Errorf("%w: its key has %d bytes, a routing key at most %d", ErrTooLarge, len(key), maxShort)
	}
	p = amqp.Publishing{Body: m.Body, Timestamp: m.Time, DeliveryMode: amqp.Persistent, MessageId: m.ID}
	if p.MessageId == "" || len(p.MessageId) > maxShort {
		p.MessageId = rand.Text()
	}
	for _, h := range m.Headers {
		switch {
		case notPublished[h.Name] || setProperty(&p, h):
		case len(h.Name) > maxShort:
			return p, "", fmt.Errorf("%w: a header's name has %d bytes, at most %d are allowed", ErrTooLarge, len(h.Name), maxShort)
		default:
			addEntry(&p, h)
		}
	}
	if n := propertyBytes(&p); n > maxPropertyBytes {
		return p, "", fmt.Errorf("%w: its headers have %d bytes, at most %d are allowed", ErrTooLarge, n, maxPropertyBytes)
	}
	return p, key, nil
}

// maxPropertyBytes is what properties and headers may have together: they travel in
// one frame, and the broker ends the connection of whoever sends a larger one. What
// a frame says besides them takes 22 bytes.
const maxPropertyBytes = frameSize - 22

// propertyBytes is how many bytes properties and headers take in a frame.
func propertyBytes(p *amqp.Publishing) int {
	n := 1 + 1 + 8 // Delivery mode, priority, timestamp.
	for _, s := range []string{p.ContentType, p.ContentEncoding, p.CorrelationId, p.ReplyTo, p.MessageId, p.Type, p.AppId} {
		n += 1 + len(s)
	}
	return n + valueBytes(p.Headers)
}

// valueBytes is how many bytes a value that addEntry makes takes, its kind not
// counted.
func valueBytes(value any) int {
	const length = 4
	n := length
	switch v := value.(type) {
	case nil:
		return 0
	case string:
		n += len(v)
	case []byte:
		n += len(v)
	case []any:
		for _, e := range v {
			n += 1 + valueBytes(e)
		}
	case amqp.Table:
		for name, e := range v {
			n += 1 + len(name) + 1 + valueBytes(e)
		}
	}
	return n
}

// setProperty sets the property that a header stands for. It tells whether it did:
// the second header of a name, and a value that no property takes, go into the
// table.
func setProperty(p *amqp.Publishing, h broker.Header) bool {
	if h.Name == HeaderPriority {
		n, err := strconv.ParseUint(string(h.Value), 10, 8)
		if err != nil || p.Priority > 0 {
			return false
		}
		p.Priority = uint8(n)
		return true
	}
	property := map[string]*string{
		HeaderContentType: &p.ContentType, HeaderContentEncoding: &p.ContentEncoding, HeaderCorrelationID: &p.CorrelationId,
		HeaderReplyTo: &p.ReplyTo, HeaderType: &p.Type, HeaderAppID: &p.AppId,
	}[h.Name]
	if property == nil || *property != "" || len(h.Value) == 0 || len(h.Value) > maxShort {
		return false
	}
	*property = string(h.Value)
	return true
}

// addEntry puts a header into the table: text as a string, other bytes as bytes,
// and several of one name as a list.
func addEntry(p *amqp.Publishing, h broker.Header) {
	var value any
	switch {
	case h.Value == nil:
	case utf8.Valid(h.Value):
		value = string(h.Value)
	default:
		value = h.Value
	}
	if p.Headers == nil {
		p.Headers = amqp.Table{}
	}
	before, again := p.Headers[h.Name]
	list, isList := before.([]any)
	switch {
	case !again:
		p.Headers[h.Name] = value
	case isList:
		p.Headers[h.Name] = append(list, value)
	default:
		p.Headers[h.Name] = []any{before, value}
	}
}
