package servers

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"sync"
	"time"
)

// tb is what this package needs of a test. It is narrow so that skipping and
// failing can be tested.
type tb interface {
	Helper()
	Name() string
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Skipf(format string, args ...any)
	Fatalf(format string, args ...any)
	Cleanup(func())
	Context() context.Context
}

// starter starts a server and returns its address. An error that wraps
// ErrUnavailable says that this way of starting it does not exist here; any
// other error is a failure.
type starter func() (string, error)

// ErrUnavailable is wrapped by the error of [Containers] when no Docker daemon
// answers: this machine lacks that way of starting a server.
var ErrUnavailable = errors.New("servers: not available on this machine")

// once makes a starter run at most once, whatever came of it.
func once(start starter) starter { return sync.OnceValues(start) }

// find returns the address of a server, or ends the test.
func find(t tb, s *server) string {
	t.Helper()
	if address := os.Getenv(s.variable); address != "" {
		return address
	}
	reasons := []string{s.variable + " is not set"}
	for _, way := range []struct {
		name  string
		start starter
	}{{"container", s.container}, {"native", s.native}} {
		if way.start == nil {
			reasons = append(reasons, way.name+": there is none")
			continue
		}
		address, err := way.start()
		if err == nil {
			return address
		}
		if !errors.Is(err, ErrUnavailable) {
			t.Fatalf("servers: %s: %s: %v", s.name, way.name, err)
			return ""
		}
		reasons = append(reasons, way.name+": "+err.Error())
	}
	skip(t, s.name, reasons)
	return ""
}

// skip ends a test that cannot have its server.
func skip(t tb, name string, reasons []string) {
	t.Helper()
	if os.Getenv(EnvRequire) == "1" {
		t.Fatalf("servers: no %s, and %s=1 allows no skipping: %s", name, EnvRequire, strings.Join(reasons, "; "))
		return
	}
	t.Skipf("servers: no %s: %s", name, strings.Join(reasons, "; "))
}

// checkReachable fails the test when nobody listens at address.
func checkReachable(t tb, variable, address string) {
	t.Helper()
	dialer := net.Dialer{Timeout: 5 * time.Second}
	connection, err := dialer.DialContext(t.Context(), "tcp", address)
	if err != nil {
		t.Fatalf("servers: %s: %q does not answer: %v", variable, address, err)
		return
	}
	if err := connection.Close(); err != nil {
		t.Logf("servers: %s: close %q: %v", variable, address, err)
	}
}
