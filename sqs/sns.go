package sqs

import (
	"encoding/base64"
	"encoding/json"
	"strings"

	"github.com/ackafter/ackafter/broker"
)

// The headers that hold what an SNS notification says besides its attributes.
const (
	HeaderSNSTopic     = "AWS.SNS.TopicArn"
	HeaderSNSMessageID = "AWS.SNS.MessageId"
	HeaderSNSSubject   = "AWS.SNS.Subject"
)

// unwrapSNS replaces a message that is an SNS notification by what is in it; others
// stay as they are. Names are compared exactly.
func unwrapSNS(m *broker.Message) {
	var fields map[string]json.RawMessage
	if json.Unmarshal(m.Body, &fields) != nil {
		return
	}
	kind, _ := textField(fields, "Type")
	topic, _ := textField(fields, "TopicArn")
	body, ok := textField(fields, "Message")
	if kind != "Notification" || !strings.HasPrefix(topic, "arn:") || !ok {
		return
	}
	m.Body = []byte(body)
	m.Headers = append(m.Headers, snsAttributes(fields["MessageAttributes"])...)
	for _, f := range []struct{ field, header string }{
		{"TopicArn", HeaderSNSTopic}, {"MessageId", HeaderSNSMessageID}, {"Subject", HeaderSNSSubject},
	} {
		if v, ok := textField(fields, f.field); ok {
			m.Headers = append(m.Headers, broker.Header{Name: f.header, Value: []byte(v)})
		}
	}
}

// textField returns a field that is a string.
func textField(fields map[string]json.RawMessage, name string) (string, bool) {
	raw := fields[name]
	var text string
	if len(raw) == 0 || raw[0] != '"' || json.Unmarshal(raw, &text) != nil {
		return "", false
	}
	return text, true
}

// snsAttributes returns the attributes of a notification, sorted by name. Values of
// type Binary are base64.
func snsAttributes(raw json.RawMessage) broker.Headers {
	var attributes map[string]map[string]json.RawMessage
	if json.Unmarshal(raw, &attributes) != nil {
		return nil
	}
	var headers broker.Headers
	for _, name := range sortedNames(attributes) {
		text, ok := textField(attributes[name], "Value")
		if !ok {
			continue
		}
		value := []byte(text)
		if kind, _ := textField(attributes[name], "Type"); kind == "Binary" {
			if decoded, err := base64.StdEncoding.DecodeString(text); err == nil {
				value = decoded
			}
		}
		headers = append(headers, broker.Header{Name: name, Value: value})
	}
	return headers
}
