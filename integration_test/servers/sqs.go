package servers

import (
	"net/url"
	"testing"
)

// EnvSQS is the base URL of a server that speaks the protocol of Amazon SQS,
// "http://host:port". It takes any login.
const EnvSQS = "ACKAFTER_TEST_SQS"

var elasticMQ = newServer("elasticmq", EnvSQS, nil)

// SQS returns the base URL of a server for the protocol of Amazon SQS that other
// tests use too: queues need names of their own, see [Name]. A FIFO queue's ends
// in ".fifo".
func SQS(t testing.TB) string {
	t.Helper()
	address := find(t, elasticMQ)
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "http" || u.Port() == "" {
		t.Fatalf("servers: %s = %q: must be a URL http://host:port", EnvSQS, address)
	}
	checkReachable(t, EnvSQS, u.Host)
	return address
}
