package integration_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/rabbitmq"
)

// The address is that of a server that is no broker: the error says so, or what it
// may be, and neither it nor the log shows the password.
func TestRabbitAtAnotherServer(t *testing.T) {
	t.Parallel()
	host := func(address string) string {
		u, err := url.Parse(address)
		if err != nil {
			t.Fatal(err)
		}
		return u.Host
	}
	broker := servers.RabbitMQ(t)
	for _, row := range []struct {
		name, url string
		final     bool
		words     []string
	}{
		// It waits for the end of a request that never comes.
		{"management", "amqp://guest:s3cret@" + host(broker.Management), false, []string{"nothing was answered", "port for AMQP"}},
		{"postgres", "amqp://guest:s3cret@" + host(servers.Postgres(t)), false, []string{"nothing was answered", "port for AMQP"}},
		{"a broker without TLS", "amqps://guest:s3cret@" + host(broker.URL), true, []string{"does not speak TLS", "amqp://"}},
		{"management, with TLS", "amqps://guest:s3cret@" + host(broker.Management), true, []string{"does not speak TLS", "amqp://"}},
		{"nobody", "amqp://guest:s3cret@127.0.0.1:1", false, []string{"connection refused", "127.0.0.1:1"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			var log bytes.Buffer
			cfg := &rabbitmq.Config{DialTimeout: 1500 * time.Millisecond, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			ctx, cancel := context.WithTimeout(t.Context(), 3500*time.Millisecond)
			defer cancel()
			began := time.Now()
			_, err := rabbitmq.Open(ctx, []string{row.url}, "orders", cfg)
			if took := time.Since(began); took > 20*time.Second {
				t.Errorf("Open returned after %v", took)
			}
			if err == nil || !says(err, row.words...) || errors.Is(err, rabbitmq.ErrNotAMQP) != row.final || errors.Is(err, context.DeadlineExceeded) == row.final {
				t.Errorf("Open = %v", err)
			}
			if !row.final && !holds(log.String(), "level=WARN", row.words[0]) {
				t.Errorf("the log does not say so:\n%s", log.String())
			}
			if err != nil && strings.Contains(err.Error()+log.String(), "s3cret") {
				t.Errorf("the password is shown: %v\n%s", err, log.String())
			}
			t.Log(err)
		})
	}
}

// The user is deleted while it consumes: tried again for 30 s, as it may be a change
// under way, then Run ends and says why. What it had not done is done by others.
func TestRabbitUserDeleted(t *testing.T) {
	t.Parallel()
	if !soak() {
		t.Skip("takes 30 s; ACKAFTER_TEST_SOAK=1 runs it")
	}
	r := newRabbitLine(t, "quorum")
	u, err := url.Parse(r.server.URL)
	if err != nil {
		t.Fatal(err)
	}
	r.api(http.MethodPut, "users/"+r.queue, map[string]string{"password": "s3cret", "tags": ""}, nil)
	t.Cleanup(func() { _ = r.tryAPI(http.MethodDelete, "users/"+r.queue, nil, nil) })
	r.api(http.MethodPut, "permissions/%2F/"+r.queue, map[string]string{"configure": "^$", "write": "^$", "read": ".*"}, nil)
	u.User = url.UserPassword(r.queue, "s3cret")
	server := *r.server
	server.URL = u.String()
	other := r.in(t)
	other.server = &server
	c := other.start(effect, nil, &rabbitmq.Config{ClientID: r.queue})
	r.publish(0, 3)
	eventually(t, time.Minute, "all are done", func() bool { return c.count(inbox.FirstAttempt) == 3 })
	r.api(http.MethodDelete, "users/"+r.queue, nil, nil)
	_ = r.tryAPI(http.MethodDelete, "connections/username/"+r.queue, nil, nil) // newer brokers do so by themselves
	gone := time.Now()
	r.publish(3, 3)
	err = c.ended(t, 2*time.Minute)
	if took := time.Since(gone); took < 25*time.Second || took > time.Minute {
		t.Errorf("Run ended after %v", took)
	}
	if !errors.Is(err, rabbitmq.ErrLogin) || !says(err, "check the user and the password") || holds(err.Error()+c.tail(), "s3cret") {
		t.Errorf("Run = %v", err)
	}
	t.Log(err)
	c = r.start(effect, nil, nil)
	eventually(t, time.Minute, "the rest is done", func() bool { return c.count(inbox.FirstAttempt) == 3 })
	c.stop(t)
	onceEach(t, r.pool, 6)
	r.empty()
}
