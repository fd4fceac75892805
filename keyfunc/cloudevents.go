package keyfunc

import (
	"bytes"
	"errors"
	"strings"

	"github.com/ackafter/ackafter/broker"
)

// CloudEvents makes the key of a CloudEvent's source and id, which together
// name one event, and gives the same key for both modes:
//
//   - structured: a header content-type (in any case) of
//     application/cloudevents+json, with or without parameters. source and id
//     are read from the JSON body and must be strings there. Attributes that
//     are in headers as well are not looked at.
//   - binary: the headers ce_source and ce_id (Kafka), ce-source and ce-id (HTTP
//     and NATS; their values are unquoted and percent-decoded once, as those
//     bindings demand), or the same after "cloudEvents:" or "cloudEvents_" (AMQP).
//     The case of names does not matter.
//
// A message that is neither is ErrMissing. One that is a CloudEvent, because of
// its content-type or of one header id, source, type or specversion with such a
// prefix, but lacks its source or id, has one twice (also under two prefixes),
// comes in another event format, or is a batch of events, is invalid. A
// structured event without the content-type header is not recognised: for those,
// JSON("source", "id") gives the same key.
func CloudEvents() Func {
	structured, err := newJSONPart("cloudevents", []string{"source", "id"}, true)
	if err != nil {
		return failed(err)
	}
	return newFunc("cloudevents", cloudEventsPart{structured: structured})
}

type cloudEventsPart struct{ structured *jsonPart }

func (p cloudEventsPart) text() string { return "cloudevents" }
func (p cloudEventsPart) arity() int   { return 2 }

func (p cloudEventsPart) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	structured, err := isStructured(m.Headers)
	switch {
	case err != nil:
		return dst, err
	case !structured:
		return appendBinaryEvent(dst, m.Headers)
	}
	dst, err = p.structured.appendKey(dst, m)
	if err != nil {
		return dst, notAbsent(err)
	}
	return dst, nil
}

// notAbsent makes of ErrMissing a mere ErrInvalid: a CloudEvent that lacks an
// attribute is broken, and First must not go on.
func notAbsent(err error) error {
	if own := (*Error)(nil); errors.Is(err, ErrMissing) && errors.As(err, &own) {
		return invalid(own.Func, own.Field, own.Rule)
	}
	return err
}

// isStructured tells whether the content type is that of an event in JSON.
func isStructured(headers broker.Headers) (bool, error) {
	var structured bool
	var count int
	for i := range headers {
		if !equalASCII(headers[i].Name, "content-type") {
			continue
		}
		count++
		media, _, _ := strings.Cut(lowerASCII(string(headers[i].Value)), ";")
		media = strings.Trim(media, " \t")
		if !strings.HasPrefix(media, "application/cloudevents") {
			continue
		}
		if media != "application/cloudevents+json" {
			return false, invalid("cloudevents", "content-type", "is an event format other than application/cloudevents+json, or a batch")
		}
		structured = true
	}
	if structured && count > 1 {
		return false, invalid("cloudevents", "content-type", "is repeated")
	}
	return structured, nil
}

// attribute is what headers say about one attribute.
type attribute struct {
	value []byte
	http  bool // in the coding of the HTTP binding
	count int
}

// appendBinaryEvent appends source and id from headers.
func appendBinaryEvent(dst []byte, headers broker.Headers) ([]byte, error) {
	var source, id attribute
	event := false
	for i := range headers {
		name, http := trimEventPrefix(headers[i].Name)
		var a *attribute
		switch {
		case name == "":
			continue
		case equalASCII(name, "source"):
			a = &source
		case equalASCII(name, "id"):
			a = &id
		case equalASCII(name, "type") || equalASCII(name, "specversion"):
			event = true
			continue
		default:
			continue
		}
		*a = attribute{value: headers[i].Value, http: http, count: a.count + 1}
	}
	if !event && source.count == 0 && id.count == 0 {
		return dst, missing("cloudevents", "", "message is not a CloudEvent: it has no such content-type and no ce headers")
	}
	dst, err := source.appendTo(dst, "source")
	if err != nil {
		return dst, err
	}
	return id.appendTo(append(dst, separator), "id")
}

func (a attribute) appendTo(dst []byte, name string) ([]byte, error) {
	switch {
	case a.count == 0:
		return dst, invalid("cloudevents", name, "is missing")
	case a.count > 1:
		return dst, invalid("cloudevents", name, "is repeated")
	case !a.http:
		return appendText(dst, "cloudevents", name, a.value)
	}
	start := len(dst)
	dst, rule := appendHTTPValue(dst, a.value)
	if rule == "" {
		dst, rule = finish(dst, start)
	}
	if rule != "" {
		return dst, invalid("cloudevents", name, rule)
	}
	return dst, nil
}

// trimEventPrefix returns the attribute that a header of one of the bindings is
// for, "" for any other header, and whether its value has the coding of HTTP.
func trimEventPrefix(header string) (attribute string, http bool) {
	for _, prefix := range [...]string{"ce_", "ce-", "cloudevents:", "cloudevents_"} {
		if len(header) > len(prefix) && equalASCII(header[:len(prefix)], prefix) {
			return header[len(prefix):], prefix == "ce-"
		}
	}
	return "", false
}

// appendHTTPValue appends an attribute in the coding of the HTTP binding: first a
// quoted string is taken out of its quotes, then one round of percent-decoding.
func appendHTTPValue(dst, value []byte) (_ []byte, rule string) {
	if bytes.HasPrefix(value, []byte(`"`)) {
		var ok bool
		if value, ok = unquoteHTTP(value); !ok {
			return dst, "is a broken quoted string"
		}
	}
	for {
		n := bytes.IndexByte(value, '%')
		if n < 0 {
			return append(dst, value...), ""
		}
		if len(value) < n+3 || !isHex(value[n+1]) || !isHex(value[n+2]) {
			return dst, "has a percent sign without two hex digits"
		}
		dst = append(dst, value[:n]...)
		dst = append(dst, nibble(value[n+1])<<4|nibble(value[n+2]))
		value = value[n+3:]
	}
}

// unquoteHTTP returns the text of a quoted string that begins with a quote.
func unquoteHTTP(quoted []byte) (text []byte, ok bool) {
	for i := 1; i < len(quoted); i++ {
		switch quoted[i] {
		case '"':
			return text, i == len(quoted)-1
		case '\\':
			if i++; i == len(quoted) {
				return nil, false
			}
		}
		text = append(text, quoted[i])
	}
	return nil, false
}

func isHex(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}
