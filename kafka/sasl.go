package kafka

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/segmentio/kafka-go/sasl"
	"github.com/segmentio/kafka-go/sasl/plain"
	"github.com/segmentio/kafka-go/sasl/scram"
)

// SASL is how a Source or a Publisher logs in.
type SASL struct {
	// Mechanism is one of SASLPlain, SASLScram256, SASLScram512. Required. There is
	// no OAUTHBEARER and no GSSAPI (Kerberos): the client library has none. Client
	// certificates need no SASL: they are in Config.TLS.
	Mechanism string

	// Credentials returns the user and the password. It is asked for every
	// connection that is opened, so that a changed password is used from the next
	// reconnect on; it may be called concurrently and must obey its context.
	// Required. For fixed ones: StaticCredentials.
	Credentials func(ctx context.Context) (user, password string, err error)
}

// The SASL mechanisms.
const (
	SASLPlain    = "PLAIN"
	SASLScram256 = "SCRAM-SHA-256"
	SASLScram512 = "SCRAM-SHA-512"
)

// StaticCredentials are credentials that do not change.
func StaticCredentials(user, password string) func(context.Context) (string, string, error) {
	return func(context.Context) (string, string, error) { return user, password, nil }
}

func (s *SASL) validate() error {
	switch {
	case s == nil:
		return nil
	case s.Mechanism != SASLPlain && s.Mechanism != SASLScram256 && s.Mechanism != SASLScram512:
		return configError("SASL.Mechanism", strconv.Quote(s.Mechanism),
			fmt.Sprintf("is not one of %s, %s, %s", SASLPlain, SASLScram256, SASLScram512))
	case s.Credentials == nil:
		return configError("SASL.Credentials", nil, "must be set")
	}
	return nil
}

// mechanism returns the library's form of s; nil for none.
func (s *SASL) mechanism() sasl.Mechanism {
	if s == nil {
		return nil
	}
	return &freshMechanism{name: s.Mechanism, credentials: s.Credentials}
}

// freshMechanism asks for the credentials at every login.
type freshMechanism struct {
	name        string
	credentials func(ctx context.Context) (user, password string, err error)

	// The last mechanism is kept while the credentials stay the same: deriving
	// SCRAM keys takes milliseconds, and there is a connection per partition.
	mu             sync.Mutex
	user, password string
	last           sasl.Mechanism
}

// Name implements sasl.Mechanism.
func (m *freshMechanism) Name() string { return m.name }

// Start implements sasl.Mechanism.
func (m *freshMechanism) Start(ctx context.Context) (sasl.StateMachine, []byte, error) {
	user, password, err := m.credentials(ctx)
	if err != nil {
		return nil, nil, fmt.Errorf("get credentials: %w", err)
	}
	if user == "" {
		return nil, nil, errors.New("get credentials: the user is empty")
	}
	mechanism, err := m.of(user, password)
	if err != nil {
		return nil, nil, err
	}
	return mechanism.Start(ctx)
}

func (m *freshMechanism) of(user, password string) (sasl.Mechanism, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.last != nil && m.user == user && m.password == password {
		return m.last, nil
	}
	var last sasl.Mechanism
	var err error
	switch m.name {
	case SASLScram256:
		last, err = scram.Mechanism(scram.SHA256, user, password)
	case SASLScram512:
		last, err = scram.Mechanism(scram.SHA512, user, password)
	default:
		last = plain.Mechanism{Username: user, Password: password}
	}
	if err != nil {
		return nil, err
	}
	m.user, m.password, m.last = user, password, last
	return last, nil
}
