package servers

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/url"
	"os"
	"testing"
)

// SecureKafka is a Kafka broker that asks for TLS, a login and permissions.
type SecureKafka struct {
	// Broker is its address, "host:port".
	Broker string
	// User and Password are the login of the super user, by SASL PLAIN.
	User, Password string
	// CAFile holds the certificate, in PEM, of the authority that signed the
	// broker's.
	CAFile string
}

// KafkaSecure returns a Kafka broker that asks for TLS, for a login by PLAIN,
// SCRAM-SHA-256 or SCRAM-SHA-512, and for permissions. Other tests use it too:
// topics, groups and users need names of their own, see [Name]. There is a user
// "app" with the password "app-secret" for PLAIN, who may do nothing until a test
// allows it. Topics are not made on first use.
func KafkaSecure(t testing.TB) *SecureKafka {
	t.Helper()
	s, err := parseSecureKafka(find(t, kafkaSecure))
	if err != nil {
		t.Fatalf("servers: %s: %v", EnvKafkaSecure, err)
	}
	checkReachable(t, EnvKafkaSecure, s.Broker)
	return s
}

func parseSecureKafka(address string) (*SecureKafka, error) {
	u, err := url.Parse(address)
	if err != nil || u.Scheme != "kafka" || u.Port() == "" || u.User == nil || u.Query().Get("ca") == "" {
		// The address holds a password: it is not shown.
		return nil, errors.New("must be a URL kafka://user:password@host:port?ca=FILE")
	}
	password, _ := u.User.Password()
	return &SecureKafka{Broker: u.Host, User: u.User.Username(), Password: password, CAFile: u.Query().Get("ca")}, nil
}

// TLS returns a configuration that trusts the broker's certificate.
func (s *SecureKafka) TLS(t testing.TB) *tls.Config {
	t.Helper()
	pem, err := os.ReadFile(s.CAFile)
	if err != nil {
		t.Fatalf("servers: %s: %v", EnvKafkaSecure, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		t.Fatalf("servers: %s: no certificate in %s", EnvKafkaSecure, s.CAFile)
	}
	return &tls.Config{RootCAs: pool}
}
