package sqs

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
)

// page is a server of the web that is no SQS.
func page(t testing.TB, status int, kind, text string) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	}))
	server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	t.Cleanup(server.Close)
	return server
}

// What only a person can mend is an error at once, which says what to do.
func TestOpenSaysWhatIsWrong(t *testing.T) {
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("AWS_CONFIG_FILE", "/dev/null")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	html := page(t, http.StatusOK, "text/html; charset=utf-8", "<html></html>")
	html.Start()
	missing := page(t, http.StatusNotFound, "text/html", "<html></html>")
	missing.Start()
	moved := page(t, http.StatusMovedPermanently, "text/html", "<html></html>")
	moved.Start()
	old := page(t, http.StatusOK, "text/xml", "<GetQueueUrlResponse/>")
	old.Start()
	other := page(t, http.StatusOK, "application/json", `{"hello":"world"}`)
	other.Start()
	secure := page(t, http.StatusOK, "text/html", "<html></html>")
	secure.StartTLS()
	const where = "check Config.Endpoint, AWS_ENDPOINT_URL"
	for _, row := range []struct {
		name, queue, endpoint, region string
		env                           map[string]string
		want                          error
		text                          string
	}{
		{name: "a page", endpoint: html.URL, want: ErrNotSQS, text: "HTTP 200 with text/html; charset=utf-8: " + where},
		{name: "no page", endpoint: missing.URL, want: ErrNotSQS, text: "HTTP 404 with text/html: " + where},
		{name: "a redirect", endpoint: moved.URL, want: ErrNotSQS, text: "HTTP 301 with text/html: " + where},
		{name: "the old protocol", endpoint: old.URL, want: ErrNotSQS, text: "HTTP 200 with text/xml: " + where},
		{name: "another JSON", endpoint: other.URL, want: ErrNotSQS, text: "without the URL of the queue: " + where},
		{name: "a URL to a page", queue: missing.URL + "/000000000000/orders", want: ErrNotSQS, text: "HTTP 404 with text/html: " + where},
		{name: "a strange certificate", endpoint: secure.URL, want: ErrNotSQS, text: "certificate cannot be verified: check the host"},
		{name: "TLS where there is none", endpoint: "https" + strings.TrimPrefix(html.URL, "http"), want: ErrNotSQS, text: "give the endpoint as http://"},
		{name: "no credentials", endpoint: html.URL, env: map[string]string{"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, want: ErrLogin, text: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"},
		{name: "an unknown profile", endpoint: html.URL, env: map[string]string{"AWS_PROFILE": "nobody"}, text: "load the AWS configuration: failed to get shared config profile, nobody"},
		{name: "an odd region", endpoint: html.URL, region: "eu west 1", text: `Region = "eu west 1": must be the name of a region`},
		{name: "an odd region around", env: map[string]string{"AWS_REGION": "eu_west_1"}, want: ErrNoRegion, text: `"eu_west_1" of the AWS configuration is none`},
		{name: "an odd region in an ARN", queue: "arn:aws:sqs:eu west 1:123456789012:orders", want: ErrMalformed, text: "the region must be the name"},
		{name: "FIFO in the middle", queue: "orders.fifo.x", want: ErrMalformed, text: ".fifo at the end"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Setenv("AWS_REGION", "us-east-1")
			for name, value := range row.env {
				t.Setenv(name, value)
			}
			queue := row.queue
			if queue == "" {
				queue = "orders"
			}
			s, err := Open(within(t, 20*time.Second), queue, &Config{Endpoint: row.endpoint, Region: row.region, Logger: quiet()})
			if err == nil {
				_ = closeNow(t, s)
			}
			if err == nil || row.want != nil && !errors.Is(err, row.want) || !strings.HasPrefix(err.Error(), "sqs: ") || !strings.Contains(err.Error(), row.text) || errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("got the error %v, want %v with %q", err, row.want, row.text)
			}
		})
	}
}

// A page of a proxy that says that the server is down is waited for, and so is a
// name that cannot be resolved.
func TestOpenWaitsForWhatPasses(t *testing.T) {
	t.Parallel()
	down := page(t, http.StatusServiceUnavailable, "text/html", "<html></html>")
	down.Start()
	for _, row := range []struct{ name, endpoint, text string }{
		{"a proxy's page", down.URL, "503"},
		{"no such host", "http://nobody.invalid:1", ""},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			_, err := Open(within(t, time.Second), "orders", &Config{Client: newTestClient(t, row.endpoint, nil), Logger: quiet()})
			if !errors.Is(err, context.DeadlineExceeded) || errors.Is(err, ErrNotSQS) || !strings.Contains(err.Error(), row.text) {
				t.Errorf("got the error %v, want one of the time, with %q", err, row.text)
			}
		})
	}
}

// A FIFO queue that is given without its suffix, and the other way round.
func TestOpenKnowsTheTwin(t *testing.T) {
	t.Parallel()
	client := newTestClient(t, serverURL(t), nil)
	fifo, _ := newQueue(t, client, true)
	standard, _ := newQueue(t, client, false)
	for name, text := range map[string]string{
		strings.TrimSuffix(fifo, fifoSuffix): fmt.Sprintf("there is a FIFO queue %q", fifo),
		standard + fifoSuffix:                fmt.Sprintf("there is a standard queue %q", standard),
	} {
		_, err := Open(within(t, time.Minute), name, &Config{Client: client, Logger: quiet()})
		if !errors.Is(err, ErrNoQueue) || !strings.Contains(err.Error(), text) {
			t.Errorf("%s: got the error %v, want one with %q", name, err, text)
		}
	}
}

// What AWS says when the key, the region that was signed for, or the permission of
// another call is wrong; Open and Receive say the same.
func TestPermissionIsTakenAway(t *testing.T) {
	t.Parallel()
	w := &wire{}
	w.answer = func(operation, _ string) (int, string, string) {
		switch operation {
		case "GetQueueUrl":
			return http.StatusOK, "", `{"QueueUrl":"http://127.0.0.1/1/orders"}`
		case "GetQueueAttributes":
			return http.StatusOK, "", `{}`
		}
		return http.StatusBadRequest, "", `{"__type":"com.amazon.coral.service#AccessDeniedException","message":"no"}`
	}
	s, err := openWire(t, w, Config{})
	if err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.finalAfter = time.Millisecond
	s.mu.Unlock()
	_, err = s.Receive(within(t, time.Minute), 1)
	if !errors.Is(err, ErrForbidden) || !strings.Contains(err.Error(), "sqs:ReceiveMessage") {
		t.Errorf("receive: %v, want %v", err, ErrForbidden)
	}
	if err := closeNow(t, s); err != nil {
		t.Error(err)
	}
}

// A certificate that a client does not trust is final with a ready client, too.
func TestClientWithStrangeCertificate(t *testing.T) {
	t.Parallel()
	secure := page(t, http.StatusOK, "text/html", "")
	secure.StartTLS()
	transport := &http.Transport{TLSClientConfig: &tls.Config{MinVersion: tls.VersionTLS12}}
	t.Cleanup(transport.CloseIdleConnections)
	client := awssqs.New(awssqs.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(secure.URL), HTTPClient: &http.Client{Transport: transport}, RetryMaxAttempts: 1,
	})
	_, err := Open(within(t, 20*time.Second), "orders", &Config{Client: client, Logger: quiet()})
	if !errors.Is(err, ErrNotSQS) {
		t.Errorf("got the error %v, want %v", err, ErrNotSQS)
	}
}
