package sqs

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/aws/smithy-go"

	"github.com/ackafter/ackafter/broker"
)

func TestParseQueue(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		queue string
		want  address
		fifo  bool
		wrong string // part of the error
	}{
		{"orders", address{name: "orders"}, false, ""},
		{"orders_2-a.fifo", address{name: "orders_2-a.fifo"}, true, ""},
		{"arn:aws:sqs:eu-central-1:123456789012:orders.fifo", address{name: "orders.fifo", region: "eu-central-1", account: "123456789012"}, true, ""},
		{"https://sqs.eu-west-1.amazonaws.com/123456789012/orders", address{name: "orders", region: "eu-west-1", url: "https://sqs.eu-west-1.amazonaws.com/123456789012/orders"}, false, ""},
		{"https://sqs.cn-north-1.amazonaws.com.cn/123456789012/orders", address{name: "orders", region: "cn-north-1", url: "https://sqs.cn-north-1.amazonaws.com.cn/123456789012/orders"}, false, ""},
		{"http://127.0.0.1:9324/000000000000/orders", address{name: "orders", url: "http://127.0.0.1:9324/000000000000/orders", endpoint: "http://127.0.0.1:9324"}, false, ""},
		{"https://eu-west-1.queue.amazonaws.com/123456789012/orders", address{name: "orders", region: "eu-west-1", url: "https://eu-west-1.queue.amazonaws.com/123456789012/orders"}, false, ""},

		{"", address{}, false, "must not be empty"},
		{".fifo", address{}, false, "must not be empty"},
		{"my orders", address{}, false, "letters, digits"},
		{"a.b", address{}, false, "letters, digits"},
		{strings.Repeat("a", 81), address{}, false, "at most 80"},
		{"arn:aws:sqs:eu-central-1:orders", address{}, false, "has 5 parts"},
		{"arn:aws:sns:eu-central-1:123456789012:orders", address{}, false, `service "sns"`},
		{"arn:aws:sqs::123456789012:orders", address{}, false, "names no region"},
		{"arn:aws:sqs:eu-central-1:12345:orders", address{}, false, "12 digits"},
		{"arn::sqs:eu-central-1:123456789012:orders", address{}, false, "no partition"},
		{"arn:aws:sqs:eu-central-1:123456789012:a b", address{}, false, "letters, digits"},
		{"https://host/orders", address{}, false, "no account or no name"},
		{"ftp://host/1/orders", address{}, false, "not an http(s) URL"},
		{"https://host/1/orders?x=1", address{}, false, "more than a host"},
	} {
		got, err := parseQueue(row.queue)
		if row.wrong != "" {
			if !errors.Is(err, ErrMalformed) || !strings.Contains(err.Error(), row.wrong) {
				t.Errorf("%q: got the error %v, want one with %q", row.queue, err, row.wrong)
			}
			continue
		}
		if err != nil || got != row.want || got.fifo() != row.fifo {
			t.Errorf("%q: got %+v, %v; want %+v", row.queue, got, err, row.want)
		}
	}
}

func TestConfig(t *testing.T) {
	t.Parallel()
	var none *Config
	d := none.withDefaults()
	if err := d.validate(); err != nil {
		t.Error(err)
	}
	if d.VisibilityTimeout != 30*time.Second || d.Heartbeat != 10*time.Second || d.WaitTime != 5*time.Second || d.Pollers != 8 || d.AckDelay != 100*time.Millisecond {
		t.Errorf("defaults are %+v", d)
	}
	for field, c := range map[string]Config{
		"VisibilityTimeout": {VisibilityTimeout: -1},
		"whole seconds":     {VisibilityTimeout: 1500 * time.Millisecond},
		"12h":               {VisibilityTimeout: 13 * time.Hour},
		"WaitTime":          {WaitTime: 21 * time.Second},
		"Heartbeat":         {Heartbeat: 20 * time.Second},
		"Pollers":           {Pollers: -1},
		"AckDelay":          {AckDelay: time.Hour},
		"RequestTimeout":    {RequestTimeout: -1},
		"CloseTimeout":      {CloseTimeout: -1},
		"MaxBackoff":        {MaxBackoff: -1},
		"Endpoint":          {Endpoint: "localhost:9324"},
		"Hooks[0]":          {Hooks: []Hook{struct{}{}}},
	} {
		if err := c.withDefaults().validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%s: got the error %v", field, err)
		}
	}
	for _, c := range []Config{{Heartbeat: -1}, {AckDelay: -1}, {Endpoint: "http://localhost:9324"}} {
		if err := c.withDefaults().validate(); err != nil {
			t.Errorf("%+v: %v", c, err)
		}
	}
}

func TestExplain(t *testing.T) {
	t.Parallel()
	api := func(code string) error { return &smithy.GenericAPIError{Code: code, Message: "text"} }
	for _, row := range []struct {
		err, want error
	}{
		{&types.QueueDoesNotExist{}, ErrNoQueue},
		{api("AWS.SimpleQueueService.NonExistentQueue"), ErrNoQueue},
		{api("AccessDenied"), ErrForbidden},
		{api("AccessDeniedException"), ErrForbidden},
		{&types.KmsAccessDenied{}, ErrForbidden},
		{api("InvalidClientTokenId"), ErrLogin},
		{api("com.amazonaws.sqs#SignatureDoesNotMatch"), ErrLogin},
	} {
		got := explain(row.err)
		if !errors.Is(got, row.want) || !errors.Is(got, row.err) || !isFinal(got) {
			t.Errorf("%v: explained as %v", row.err, got)
		}
	}
	for _, err := range []error{errors.New("connection refused"), api("ThrottlingException"), &types.OverLimit{}} {
		if got := explain(err); isFinal(got) || !errors.Is(got, err) {
			t.Errorf("%v: explained as %v", err, got)
		}
	}
	if explain(nil) != nil {
		t.Error("no error is explained")
	}
}

// case S4
func TestSNSEnvelope(t *testing.T) {
	t.Parallel()
	quote := func(s string) string {
		b, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	const order = `{"orderId":"A1"}`
	const topic = `"TopicArn":"arn:aws:sns:us-east-1:123456789012:orders"`
	envelope := `{"Type":"Notification","MessageId":"7",` + topic + `,"Message":` + quote(order)
	for name, row := range map[string]struct {
		body, want string
		headers    map[string]string
	}{
		"raw":          {order, order, nil},
		"wrapped":      {envelope + "}", order, map[string]string{HeaderSNSMessageID: "7", HeaderSNSTopic: "arn:aws:sns:us-east-1:123456789012:orders"}},
		"attributes":   {envelope + `,"MessageAttributes":{"kind":{"Type":"String","Value":"new"},"raw":{"Type":"Binary","Value":"AAE="},"n":{"Type":"Number","Value":"5"}}}`, order, map[string]string{"kind": "new", "raw": "\x00\x01", "n": "5"}},
		"text":         {"hello", "hello", nil},
		"no type":      {`{"Message":"x",` + topic + `}`, `{"Message":"x",` + topic + `}`, nil},
		"business":     {`{"Message":"x"}`, `{"Message":"x"}`, nil},
		"other case":   {`{"type":"Notification","topicArn":"arn:x","message":"x"}`, `{"type":"Notification","topicArn":"arn:x","message":"x"}`, nil},
		"no string":    {`{"Type":"Notification",` + topic + `,"Message":{"a":1}}`, `{"Type":"Notification",` + topic + `,"Message":{"a":1}}`, nil},
		"null message": {`{"Type":"Notification",` + topic + `,"Message":null}`, `{"Type":"Notification",` + topic + `,"Message":null}`, nil},
		"other type":   {`{"Type":"SubscriptionConfirmation",` + topic + `,"Message":"x"}`, `{"Type":"SubscriptionConfirmation",` + topic + `,"Message":"x"}`, nil},
		"array":        {`[1]`, `[1]`, nil},
	} {
		m := &broker.Message{Body: []byte(row.body)}
		unwrapSNS(m)
		if string(m.Body) != row.want {
			t.Errorf("%s: the body is %s, want %s", name, m.Body, row.want)
		}
		for header, want := range row.headers {
			if got, ok := m.Headers.Get(header); !ok || string(got) != want {
				t.Errorf("%s: header %s is %q, want %q", name, header, got, want)
			}
		}
		if row.headers == nil && m.Headers != nil {
			t.Errorf("%s: it has the headers %q", name, m.Headers)
		}
	}
}

func TestMessage(t *testing.T) {
	t.Parallel()
	raw := &types.Message{
		MessageId: aws.String("id"), ReceiptHandle: aws.String("handle"), Body: aws.String("body"),
		MessageAttributes: map[string]types.MessageAttributeValue{
			"z":    {DataType: aws.String("Number"), StringValue: aws.String("5")},
			"text": {DataType: aws.String("String.custom"), StringValue: aws.String("ä")},
			"b":    {DataType: aws.String("Binary"), BinaryValue: []byte{0, 255}},
		},
		Attributes: map[string]string{
			"SentTimestamp": "1700000000123", "ApproximateReceiveCount": "3", "MessageGroupId": "g1", "MessageDeduplicationId": "d",
			"AWSTraceHeader": "Root=1", "SequenceNumber": "18849496460467696128",
		},
	}
	s := &Source{cfg: (&Config{}).withDefaults(), queue: address{name: "orders.fifo"}, name: "sqs:orders.fifo", fifo: true}
	e := s.toEntry(raw, time.Now())
	m := e.message
	if m.ID != "id" || m.Source != "sqs:orders.fifo" || string(m.Body) != "body" || string(m.Key) != "g1" || e.lane != "orders.fifo/g1" ||
		e.attempt != 3 || e.handle != "handle" || !m.Time.Equal(time.UnixMilli(1700000000123)) || m.Position.Known {
		t.Errorf("got %+v, %+v", e, m)
	}
	var names []string
	for _, h := range m.Headers {
		names = append(names, h.Name+"="+string(h.Value))
	}
	want := "b=\x00\xff text=ä z=5 AWS.MessageGroupId=g1 AWS.MessageDeduplicationId=d AWS.SequenceNumber=18849496460467696128 AWS.TraceHeader=Root=1"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("the headers are %q, want %q", got, want)
	}
	s.fifo = false
	if e := s.toEntry(raw, time.Now()); e.lane != "" || string(e.message.Key) != "g1" {
		t.Errorf("a message of a standard queue has the lane %q and the key %q", e.lane, e.message.Key)
	}
	bare := s.toEntry(&types.Message{MessageId: aws.String("id"), Body: aws.String("b")}, time.Now())
	if bare.attempt != 0 || bare.message.Key != nil || bare.message.Headers != nil || !bare.message.Time.IsZero() {
		t.Errorf("a bare message is %+v, %+v", bare, bare.message)
	}
}

func TestSeconds(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, row := range []struct {
		delay, age time.Duration
		want       int32
	}{
		{0, 0, 0},
		{-time.Hour, 0, 0},
		{time.Millisecond, 0, 1},
		{time.Second, 0, 1},
		{1001 * time.Millisecond, 0, 2},
		{24 * time.Hour, 0, 12*3600 - 1},
		{24 * time.Hour, 11 * time.Hour, 3600 - 1},
		{24 * time.Hour, 13 * time.Hour, 0},
	} {
		if got := seconds(&entry{received: now.Add(-row.age), due: now.Add(row.delay)}, now); got != row.want {
			t.Errorf("a delay of %v at the age of %v takes %d s, want %d", row.delay, row.age, got, row.want)
		}
	}
}
