package sqs

import (
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/internal/lanename"
)

// The headers that hold attributes of the system. The names of a sender's
// attributes cannot begin with "AWS.".
const (
	HeaderGroupID         = "AWS.MessageGroupId"
	HeaderDeduplicationID = "AWS.MessageDeduplicationId"
	HeaderSequenceNumber  = "AWS.SequenceNumber"
	HeaderTrace           = "AWS.TraceHeader"              // what X-Ray wants: AWSTraceHeader
	HeaderDeadLetterFrom  = "AWS.DeadLetterQueueSourceArn" // of a message in a dead letter queue
)

// systemHeaders says which attribute of the system becomes which header, in order.
var systemHeaders = []struct {
	attribute types.MessageSystemAttributeName
	header    string
}{
	{types.MessageSystemAttributeNameMessageGroupId, HeaderGroupID},
	{types.MessageSystemAttributeNameMessageDeduplicationId, HeaderDeduplicationID},
	{types.MessageSystemAttributeNameSequenceNumber, HeaderSequenceNumber},
	{types.MessageSystemAttributeNameAWSTraceHeader, HeaderTrace},
	{types.MessageSystemAttributeNameDeadLetterQueueSourceArn, HeaderDeadLetterFrom},
}

// toEntry makes an entry of what was received.
func (s *Source) toEntry(m *types.Message, now time.Time) *entry {
	message := &broker.Message{ID: aws.ToString(m.MessageId), Source: s.name, Body: []byte(aws.ToString(m.Body))}
	for _, name := range sortedNames(m.MessageAttributes) {
		a := m.MessageAttributes[name]
		message.Headers = append(message.Headers, broker.Header{Name: name, Value: attributeValue(&a)})
	}
	for _, h := range systemHeaders {
		if v, ok := m.Attributes[string(h.attribute)]; ok {
			message.Headers = append(message.Headers, broker.Header{Name: h.header, Value: []byte(v)})
		}
	}
	e := &entry{message: message, id: message.ID, handle: aws.ToString(m.ReceiptHandle), received: now}
	if ms, err := strconv.ParseInt(m.Attributes[string(types.MessageSystemAttributeNameSentTimestamp)], 10, 64); err == nil {
		message.Time = time.UnixMilli(ms)
	}
	if n, err := strconv.Atoi(m.Attributes[string(types.MessageSystemAttributeNameApproximateReceiveCount)]); err == nil && n > 0 {
		e.attempt = n
	}
	if group, ok := m.Attributes[string(types.MessageSystemAttributeNameMessageGroupId)]; ok {
		message.Key = []byte(group)
		if s.fifo {
			e.lane = lanename.Of(s.queue.name, []byte(group))
		}
	}
	if s.cfg.UnwrapSNS {
		unwrapSNS(message)
	}
	return e
}

// sortedNames returns the names of attributes; SQS keeps no order.
func sortedNames[V any](attributes map[string]V) []string {
	names := make([]string, 0, len(attributes))
	for name := range attributes {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// attributeValue is the text of a String or Number, the bytes of a Binary.
func attributeValue(a *types.MessageAttributeValue) []byte {
	if strings.HasPrefix(aws.ToString(a.DataType), "Binary") {
		return a.BinaryValue
	}
	return []byte(aws.ToString(a.StringValue))
}
