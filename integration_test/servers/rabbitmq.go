package servers

import (
	"net/url"
	"os"
	"testing"
)

const (
	// EnvRabbitMQ is the URL of a RabbitMQ server, "amqp://user:password@host:port/".
	// The user must be an administrator.
	EnvRabbitMQ = "ACKAFTER_TEST_RABBITMQ"
	// EnvRabbitMQManagement is the base URL of its management API,
	// "http://user:password@host:port".
	EnvRabbitMQManagement = "ACKAFTER_TEST_RABBITMQ_MANAGEMENT"
)

var rabbitMQ = newServer("rabbitmq", EnvRabbitMQ, nil)

// RabbitMQServer is a RabbitMQ server with its management plugin.
type RabbitMQServer struct {
	// URL is its address with a login, "amqp://user:password@host:port/".
	URL string
	// Management is the base URL of its management API with a login; empty when
	// only the server was named.
	Management string
}

// RabbitMQ returns a RabbitMQ server that other tests use too: queues, exchanges,
// users and virtual hosts need names of their own, see [Name]. Alarms and the
// acknowledgement timeout concern all tests on it.
func RabbitMQ(t testing.TB) *RabbitMQServer {
	t.Helper()
	s := &RabbitMQServer{URL: find(t, rabbitMQ), Management: os.Getenv(EnvRabbitMQManagement)}
	u, err := url.Parse(s.URL)
	if err != nil || u.Scheme != "amqp" || u.Port() == "" {
		// The address holds a password: it is not shown.
		t.Fatalf("servers: %s: must be a URL amqp://user:password@host:port/", EnvRabbitMQ)
	}
	checkReachable(t, EnvRabbitMQ, u.Host)
	if s.Management == "" {
		s.Management = managementOf(t, s.URL)
	}
	return s
}

// managementOf returns the management API of the server that the script runs, if
// address is that one's.
func managementOf(t testing.TB, address string) string {
	folder, err := scriptFolder()
	if err != nil {
		return ""
	}
	lines, err := runScript(t.Context(), folder, "env", "rabbitmq")
	if here, _ := parseExport(lines, EnvRabbitMQ); err != nil || here != address {
		return ""
	}
	management, _ := parseExport(lines, EnvRabbitMQManagement)
	return management
}
