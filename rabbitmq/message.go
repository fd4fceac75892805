package rabbitmq

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
)

// The names under which the properties of a message appear in Message.Headers,
// and under which a Publisher takes them from there. A property that is not set is
// left out. They come before the entries of the message's own header table, so
// that Headers.Get finds the property when the table has an entry of its name.
const (
	HeaderContentType     = "content-type"
	HeaderContentEncoding = "content-encoding"
	HeaderCorrelationID   = "correlation-id"
	HeaderReplyTo         = "reply-to"
	HeaderType            = "type"
	HeaderAppID           = "app-id"
	// HeaderUserID is checked by the broker: whoever published was logged in by
	// that name. An entry of the header table that is called the same is left out,
	// so that nobody can claim it.
	HeaderUserID     = "user-id"
	HeaderExpiration = "expiration"
	HeaderPriority   = "priority"
	// HeaderExchange is the exchange that the message was published to; left out
	// for the default one. A Publisher ignores it.
	HeaderExchange = "amqp-exchange"
)

// The header table's entries that the broker writes.
const (
	headerDeliveryCount = "x-delivery-count" // quorum queues: how often it came back
	headerStreamOffset  = "x-stream-offset"
)

// newMessage makes a message of a delivery. id is for one without a message-id.
func newMessage(d *amqp.Delivery, source, id string) *broker.Message {
	m := &broker.Message{
		ID:      d.MessageId,
		Source:  source,
		Headers: headers(d),
		Body:    d.Body,
		Time:    d.Timestamp,
	}
	if m.ID == "" {
		m.ID = id
	}
	if d.RoutingKey != "" {
		m.Key = []byte(d.RoutingKey)
	}
	if m.Body == nil {
		m.Body = []byte{}
	}
	return m
}

// headers are the properties that are set, and then the table, sorted by name.
func headers(d *amqp.Delivery) broker.Headers {
	h := make(broker.Headers, 0, len(d.Headers)+4)
	property := func(name, value string) {
		if value != "" {
			h = append(h, broker.Header{Name: name, Value: []byte(value)})
		}
	}
	property(HeaderContentType, d.ContentType)
	property(HeaderContentEncoding, d.ContentEncoding)
	property(HeaderCorrelationID, d.CorrelationId)
	property(HeaderReplyTo, d.ReplyTo)
	property(HeaderType, d.Type)
	property(HeaderAppID, d.AppId)
	property(HeaderUserID, d.UserId)
	property(HeaderExpiration, d.Expiration)
	if d.Priority > 0 {
		property(HeaderPriority, strconv.Itoa(int(d.Priority)))
	}
	property(HeaderExchange, d.Exchange)
	own := len(h)
	for name, value := range d.Headers {
		if name != HeaderUserID {
			h = append(h, broker.Header{Name: name, Value: text(value)})
		}
	}
	slices.SortFunc(h[own:], func(a, b broker.Header) int { return strings.Compare(a.Name, b.Name) })
	return h
}

// text writes a value of a header table: numbers in decimal, times as RFC 3339 in
// UTC, tables and arrays as JSON, strings and bytes as they are. The void value has
// no bytes, not even none: nil.
func text(value any) []byte {
	switch v := value.(type) {
	case nil:
		return nil
	case string:
		return []byte(v)
	case []byte:
		return append([]byte{}, v...) // not nil
	case bool:
		return strconv.AppendBool(nil, v)
	case float32:
		return strconv.AppendFloat(nil, float64(v), 'g', -1, 32)
	case float64:
		return strconv.AppendFloat(nil, v, 'g', -1, 64)
	case time.Time:
		return v.UTC().AppendFormat(nil, time.RFC3339)
	case amqp.Decimal:
		return []byte(decimal(v))
	case amqp.Table, []any:
		encoded, err := json.Marshal(jsonValue(v))
		if err != nil { // Cannot be: jsonValue leaves nothing that JSON has not.
			return fmt.Append(nil, v)
		}
		return encoded
	default: // The whole numbers.
		return fmt.Append(nil, v)
	}
}

// decimal writes a scaled number: 12345 with the scale 2 is 123.45.
func decimal(d amqp.Decimal) string {
	digits := strconv.FormatInt(int64(d.Value), 10)
	sign := ""
	if digits[0] == '-' {
		sign, digits = "-", digits[1:]
	}
	if d.Scale == 0 {
		return sign + digits
	}
	if missing := int(d.Scale) + 1 - len(digits); missing > 0 {
		digits = strings.Repeat("0", missing) + digits
	}
	point := len(digits) - int(d.Scale)
	return sign + digits[:point] + "." + digits[point:]
}

// jsonValue is a value as encoding/json takes it. Bytes that are not UTF-8 become
// Base64; numbers that JSON does not have become text.
func jsonValue(value any) any {
	switch v := value.(type) {
	case amqp.Table:
		object := make(map[string]any, len(v))
		for name, value := range v {
			object[name] = jsonValue(value)
		}
		return object
	case []any:
		array := make([]any, len(v))
		for i, value := range v {
			array[i] = jsonValue(value)
		}
		return array
	case []byte:
		if !utf8.Valid(v) {
			return base64.StdEncoding.EncodeToString(v)
		}
		return string(v)
	case float32:
		return jsonFloat(float64(v))
	case float64:
		return jsonFloat(v)
	case time.Time:
		return v.UTC().Format(time.RFC3339)
	case amqp.Decimal:
		return json.Number(decimal(v))
	default: // nil, string, bool, the whole numbers
		return v
	}
}

func jsonFloat(f float64) any {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		return strconv.FormatFloat(f, 'g', -1, 64)
	}
	return f
}

// wholeNumber reads a whole number of a header table.
func wholeNumber(value any) (int64, bool) {
	switch v := value.(type) {
	case int64:
		return v, true
	case int32:
		return int64(v), true
	case int16:
		return int64(v), true
	case int8:
		return int64(v), true
	case int:
		return int64(v), true
	case uint8:
		return int64(v), true
	case uint16:
		return int64(v), true
	case uint32:
		return int64(v), true
	}
	return 0, false
}
