package sqs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"

	"github.com/ackafter/ackafter/broker"
)

func within(t testing.TB, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	return ctx
}

// sendBodies sends messages with a client that is not ours.
func sendBodies(t testing.TB, client *awssqs.Client, url string, groupsAndBodies ...string) {
	t.Helper()
	for _, text := range groupsAndBodies {
		in := &awssqs.SendMessageInput{QueueUrl: &url, MessageBody: &text}
		if group, body, ok := strings.Cut(text, ":"); ok {
			in.MessageGroupId, in.MessageBody, in.MessageDeduplicationId = &group, &body, aws.String(fmt.Sprint(queues.Add(1)))
		}
		if _, err := client.SendMessage(within(t, time.Minute), in); err != nil {
			t.Fatal(err)
		}
	}
}

// A queue is found by name, URL and ARN, with the default configuration chain.
func TestOpenFindsTheQueue(t *testing.T) {
	address := serverURL(t)
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	t.Setenv("AWS_REGION", "")
	client := newTestClient(t, address, nil)
	name, url := newQueue(t, client, false)
	for _, row := range []struct {
		queue string
		cfg   Config
	}{
		{name, Config{Endpoint: address}},
		{name, Config{Endpoint: address, Region: "eu-west-1"}},
		{"arn:aws:sqs:us-east-1:000000000000:" + name, Config{Endpoint: address}},
		{url, Config{}},
	} {
		row.cfg.Logger, row.cfg.WaitTime = quiet(), time.Second
		s, err := Open(within(t, time.Minute), row.queue, &row.cfg)
		if err != nil {
			t.Errorf("%s: %v", row.queue, err)
			continue
		}
		sendBodies(t, client, url, "hello")
		ack(t, receive(t, s, 1)...)
		if err := closeNow(t, s); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenRefusesBadInput(t *testing.T) {
	address := serverURL(t)
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("AWS_REGION", "")
	t.Setenv("AWS_DEFAULT_REGION", "")
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	for _, row := range []struct {
		queue string
		cfg   Config
		want  error
		text  string
	}{
		{"missing", Config{Endpoint: address}, ErrNoQueue, "the region, the account"},
		{address + "/000000000000/missing", Config{}, ErrNoQueue, "check its name"},
		{"arn:aws:sqs:us-east-1:missing", Config{}, ErrMalformed, "has 5 parts"},
		{"arn:aws:sqs:us-east-1:123456789012:orders", Config{Region: "eu-west-1"}, ErrMalformed, "us-east-1"},
		{"orders", Config{}, ErrNoRegion, "AWS_REGION"},
	} {
		row.cfg.Logger = quiet()
		s, err := Open(within(t, time.Minute), row.queue, &row.cfg)
		if err == nil {
			_ = closeNow(t, s)
		}
		if !errors.Is(err, row.want) || !strings.HasPrefix(err.Error(), "sqs: open: ") || !strings.Contains(err.Error(), row.text) {
			t.Errorf("%s: got the error %v, want %v with %q", row.queue, err, row.want, row.text)
		}
	}
}

// While SQS cannot be reached, Open waits for it until its ctx ends.
func TestOpenWaits(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, "http://127.0.0.1:1", nil)
	_, err := Open(within(t, 300*time.Millisecond), "orders", &Config{Client: client, Logger: quiet()})
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "refused") {
		t.Errorf("got the error %v, want one of the time and of the connection", err)
	}
}

// wire is an HTTP server that speaks the JSON protocol as AWS does.
type wire struct {
	mu     sync.Mutex
	calls  []string // "OPERATION BODY"
	answer func(operation, body string) (status int, code, text string)
}

// ServeHTTP implements http.Handler.
func (w *wire) ServeHTTP(out http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	operation := strings.TrimPrefix(r.Header.Get("X-Amz-Target"), "AmazonSQS.")
	w.mu.Lock()
	w.calls = append(w.calls, operation+" "+string(body))
	w.mu.Unlock()
	status, code, text := w.answer(operation, string(body))
	if code != "" {
		out.Header().Set("x-amzn-query-error", code+";Sender")
	}
	out.Header().Set("Content-Type", "application/x-amz-json-1.0")
	out.WriteHeader(status)
	_, _ = io.WriteString(out, text)
}

func openWire(t testing.TB, w *wire, cfg Config) (*Source, error) {
	t.Helper()
	server := httptest.NewServer(w)
	t.Cleanup(server.Close)
	cfg.Client, cfg.Logger = newTestClient(t, server.URL, nil), quiet()
	return Open(within(t, time.Minute), "orders", &cfg)
}

// Errors as AWS sends them.
func TestErrorsOnTheWire(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		code, kind string
		want       error
		text       string
	}{
		{"AWS.SimpleQueueService.NonExistentQueue", "com.amazonaws.sqs#QueueDoesNotExist", ErrNoQueue, "check its name"},
		{"", "com.amazonaws.sqs#QueueDoesNotExist", ErrNoQueue, "check its name"},
		{"", "com.amazon.coral.service#AccessDeniedException", ErrForbidden, "sqs:ReceiveMessage"},
		{"", "com.amazon.coral.service#UnrecognizedClientException", ErrLogin, "access key"},
		{"", "com.amazon.coral.service#InvalidSignatureException", ErrLogin, "the region"},
		{"InvalidAddress", "com.amazonaws.sqs#InvalidAddress", ErrMalformed, "region"},
	} {
		w := &wire{answer: func(string, string) (int, string, string) {
			return http.StatusBadRequest, row.code, `{"__type":"` + row.kind + `","message":"no"}`
		}}
		_, err := openWire(t, w, Config{})
		if !errors.Is(err, row.want) || !strings.Contains(err.Error(), row.text) {
			t.Errorf("%s: got the error %v, want %v with %q", row.kind, err, row.want, row.text)
		}
	}
}

// A visibility of zero is on the wire: left out it would mean something else.
func TestZeroVisibilityOnTheWire(t *testing.T) {
	t.Parallel()
	given := make(chan struct{})
	var once sync.Once
	w := &wire{}
	w.answer = func(operation, _ string) (int, string, string) {
		switch operation {
		case "GetQueueUrl":
			return http.StatusOK, "", `{"QueueUrl":"http://127.0.0.1/1/orders"}`
		case "ReceiveMessage":
			text := `{}`
			once.Do(func() {
				text = `{"Messages":[{"MessageId":"1","ReceiptHandle":"h","Body":"x","MD5OfBody":"9dd4e461268c8034f5c8564e155c67a6"}]}`
			})
			return http.StatusOK, "", text
		case "ChangeMessageVisibility":
			close(given)
		}
		return http.StatusOK, "", `{}`
	}
	s, err := openWire(t, w, Config{})
	if err != nil {
		t.Fatal(err)
	}
	if err := receive(t, s, 1)[0].Nack(t.Context(), 0); err != nil {
		t.Error(err)
	}
	<-given
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if !slices.ContainsFunc(w.calls, func(c string) bool {
		return strings.HasPrefix(c, "ChangeMessageVisibility ") && strings.Contains(c, `"VisibilityTimeout":0`)
	}) {
		t.Errorf("the calls are %q, want one with a visibility of 0", w.calls)
	}
}

// openOn opens a source on a real server.
func openOn(t testing.TB, client *awssqs.Client, name string, cfg Config) *Source {
	t.Helper()
	cfg.Client, cfg.WaitTime = client, time.Second
	if cfg.Logger == nil {
		cfg.Logger = quiet()
	}
	s, err := Open(within(t, time.Minute), name, &cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		_ = s.Close(ctx)
	})
	return s
}

// case S3: a fails once, with a delay: b and d do not run before it, c does.
func TestGroupOrder(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	name, url := newQueue(t, client, true)
	sendBodies(t, client, url, "g1:a", "g1:b", "g2:c", "g1:d")
	s := openOn(t, client, name, Config{})
	var ran []string
	start := time.Now()
	for failed := false; len(ran) < 4; {
		for _, d := range receive(t, s, 1) {
			if string(d.Message.Body) == "a" && !failed {
				failed = true
				start = time.Now()
				if err := d.Nack(t.Context(), 2*time.Second); err != nil {
					t.Fatal(err)
				}
				continue
			}
			ran = append(ran, string(d.Message.Body))
			if string(d.Message.Body) == "a" && (d.Attempt != 2 || time.Since(start) < 2*time.Second) {
				t.Errorf("a came again after %v as attempt %d", time.Since(start), d.Attempt)
			}
			ack(t, d)
		}
	}
	group := slices.DeleteFunc(slices.Clone(ran), func(body string) bool { return body == "c" })
	if want := []string{"a", "b", "d"}; !slices.Equal(group, want) || ran[0] != "c" {
		t.Errorf("ran %v, want c first, and then a, b, d", ran)
	}
}

// case S1: a handler that takes longer than the visibility runs once.
func TestHeartbeatKeepsTheMessage(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	name, url := newQueue(t, client, true)
	sendBodies(t, client, url, "g:a")
	s := openOn(t, client, name, Config{VisibilityTimeout: 3 * time.Second})
	d := receive(t, s, 1)[0]
	ctx, cancel := context.WithTimeout(t.Context(), 7*time.Second) // the handler; meanwhile nothing may come
	defer cancel()
	if again, err := s.Receive(ctx, 10); err == nil {
		t.Errorf("it came again: %v", bodies(again))
	}
	ack(t, d)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Acks != 1 || st.Redelivered != 0 || st.Lost != 0 || st.Heartbeats == 0 {
		t.Errorf("got %+v", st)
	}
	if n := left(t, client, url); n != "0 0" {
		t.Errorf("in the queue and in flight are %s messages", n)
	}
}

// case S1: without the heartbeat it comes again; the old handle is refused and is no
// failure, the new one deletes.
func TestWithoutHeartbeatItComesAgain(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	name, url := newQueue(t, client, true)
	sendBodies(t, client, url, "g:a")
	r := newRefusals()
	s := openOn(t, client, name, Config{VisibilityTimeout: 2 * time.Second, Heartbeat: -1, Hooks: []Hook{r}})
	first := receive(t, s, 1)[0]
	second := receive(t, s, 1)[0]
	if err := first.Ack(t.Context()); !errors.Is(err, broker.ErrLost) || second.Attempt != 2 {
		t.Errorf("ack of the first delivery: %v; the second one is attempt %d", err, second.Attempt)
	}
	ack(t, second)
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
	if st := s.Stats(); st.Acks != 1 || st.Lost != 1 || st.StaleAcks != 1 {
		t.Errorf("got %+v", st)
	}
	if n := left(t, client, url); n != "0 0" {
		t.Errorf("in the queue and in flight are %s messages", n)
	}
}

// left tells how many messages are in the queue and in flight.
func left(t testing.TB, client *awssqs.Client, url string) string {
	t.Helper()
	answer, err := client.GetQueueAttributes(within(t, time.Minute), &awssqs.GetQueueAttributesInput{QueueUrl: &url, AttributeNames: []types.QueueAttributeName{"All"}})
	if err != nil {
		t.Fatal(err)
	}
	return answer.Attributes["ApproximateNumberOfMessages"] + " " + answer.Attributes["ApproximateNumberOfMessagesNotVisible"]
}
