package keyfunc

import (
	"testing"

	"github.com/ackafter/ackafter/broker"
)

// structured is an event in structured mode.
func structured(contentType, body string) *broker.Message {
	m := headers("Content-Type", contentType)
	m.Body = []byte(body)
	return m
}

func TestCloudEventsModes(t *testing.T) {
	t.Parallel()
	const key = `/my context/ü%\|1|a` // has what the HTTP binding encodes, and a separator
	for name, m := range map[string]*broker.Message{
		"structured":            structured("application/cloudevents+json", `{"specversion":"1.0","source":"/my context/ü%|1","id":"a","type":"t","data":{"id":"other","source":7}}`),
		"structured parameters": structured(" Application/CloudEvents+JSON ; charset=utf-8", `{"id":"a","source":"/my context/\u00fc%|1"}`),
		"structured and headers": {
			Headers: append(headers("ce_id", "not this", "ce_source", "s").Headers, structured("application/cloudevents+json", "").Headers...),
			Body:    []byte(`{"id":"a","source":"/my context/ü%|1"}`),
		},
		"kafka":           headers("ce_specversion", "1.0", "ce_id", "a", "ce_source", "/my context/ü%|1", "content-type", "application/json"),
		"kafka case":      headers("CE_ID", "a", "Ce_Source", "/my context/ü%|1"),
		"http":            headers("Ce-Id", "a", "Ce-Source", "/my%20context/%C3%bc%25|1"),
		"http needless":   headers("ce-id", "%61", "ce-source", "%2Fmy%20context/%c3%BC%25%7C1"),
		"http quoted":     headers("ce-id", `"a"`, "ce-source", `"/my context/\%C3%BC%25|1"`),
		"amqp":            headers("cloudEvents:id", "a", "cloudEvents:source", "/my context/ü%|1"),
		"amqp underscore": headers("cloudEvents_id", "a", "cloudEvents_source", "/my context/ü%|1"),
		"others around":   headers("cloud", "x", "ce_", "x", "ce", "x", "ce_idx", "x", "ce_id", "a", "id", "x", "ce_source", "/my context/ü%|1", "ce_time", "x"),
	} {
		if got := mustKey(t, CloudEvents(), m); got != key {
			t.Errorf("%s: key %q, want %q", name, got, key)
		}
	}
	plain := JSON("source", "id")
	if got := mustKey(t, plain, jsonBody(`{"id":"a","source":"/my context/ü%|1"}`)); got != key {
		t.Errorf("JSON: key %q, want %q", got, key)
	}
}

func TestCloudEventsNotTrusted(t *testing.T) {
	t.Parallel()
	f := CloudEvents()
	const ce = "application/cloudevents+json"
	tests := []struct {
		name string
		m    *broker.Message
		want error
		text string
	}{
		{"no event", jsonBody(`{"id":"a","source":"s"}`), ErrMissing, "not a CloudEvent"},
		{"no event, JSON", structured("application/json", `{"id":"a","source":"s"}`), ErrMissing, "not a CloudEvent"},
		{"no event, other extension", headers("ce_traceparent", "x"), ErrMissing, "not a CloudEvent"},
		{"binary without id", headers("ce_source", "s"), ErrInvalid, `"id": is missing`},
		{"binary without source", headers("ce_id", "a"), ErrInvalid, `"source": is missing`},
		{"binary with neither", headers("ce_specversion", "1.0"), ErrInvalid, `"source": is missing`},
		{"binary with type only", headers("ce-type", "t"), ErrInvalid, `"source": is missing`},
		{"binary blank", headers("ce_id", " ", "ce_source", "s"), ErrInvalid, `"id": is blank`},
		{"binary blank encoded", headers("ce-id", "%20", "ce-source", "s"), ErrInvalid, `"id": is blank`},
		{"binary repeated", headers("ce_id", "a", "ce_id", "a", "ce_source", "s"), ErrInvalid, `"id": is repeated`},
		{"binary two prefixes", headers("ce_id", "a", "ce-id", "a", "ce_source", "s"), ErrInvalid, `"id": is repeated`},
		{"binary NUL", headers("ce-id", "a%00", "ce-source", "s"), ErrInvalid, "NUL"},
		{"overlong", headers("ce-id", "a%C0%A0", "ce-source", "s"), ErrInvalid, "UTF-8"},
		{"broken percent", headers("ce-id", "a%2", "ce-source", "s"), ErrInvalid, "percent"},
		{"percent text", headers("ce-id", "a%zz", "ce-source", "s"), ErrInvalid, "percent"},
		{"open quote", headers("ce-id", `"a`, "ce-source", "s"), ErrInvalid, "quoted string"},
		{"open escape", headers("ce-id", `"a\`, "ce-source", "s"), ErrInvalid, "quoted string"},
		{"text behind quote", headers("ce-id", `"a"b`, "ce-source", "s"), ErrInvalid, "quoted string"},
		{"empty quotes", headers("ce-id", `""`, "ce-source", "s"), ErrInvalid, "is blank"},
		{"structured without id", structured(ce, `{"source":"s"}`), ErrInvalid, `"id": is missing`},
		{"structured without body", &broker.Message{Headers: headers("content-type", ce).Headers}, ErrInvalid, "no body"},
		{"structured null", structured(ce, `{"source":"s","id":null}`), ErrInvalid, "is null, must be a string"},
		{"structured number", structured(ce, `{"source":"s","id":1}`), ErrInvalid, "is a number, must be a string"},
		{"structured repeated", structured(ce, `{"source":"s","id":"1","id":"1"}`), ErrInvalid, "is repeated"},
		{"structured not JSON", structured(ce, `hello`), ErrInvalid, "first byte is 0x68"},
		{"structured array", structured(ce, `[{"source":"s","id":"1"}]`), ErrInvalid, "body is an array"},
		{"batch", structured("application/cloudevents-batch+json", `[]`), ErrInvalid, "batch"},
		{"other format", structured("application/cloudevents+avro", `x`), ErrInvalid, "event format"},
		{"two content types", &broker.Message{Headers: headers("content-type", ce, "Content-Type", "text/plain").Headers, Body: []byte(`{"source":"s","id":"1"}`)}, ErrInvalid, "is repeated"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			wantError(t, f, tt.m, tt.want, tt.text)
		})
	}
	if key := mustKey(t, First(f, JSON("id")), jsonBody(`{"id":"a"}`)); key != "a" {
		t.Errorf("key = %q", key)
	}
}
