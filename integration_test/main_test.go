package integration_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"testing"

	"github.com/ackafter/ackafter/integration_test/servers"
)

// children are the main functions of this binary when a test starts it again as
// a process of its own, by the value of ACKAFTER_CHILD.
var children = map[string]func(context.Context) error{
	"chaos":     chaosChild,
	"k1":        k1Child,
	"fatal":     fatalChild,
	"killpoint": killpointChild,
	"siblings":  siblingsChild,
	"storm":     stormChild,
	"toxiproxy": toxiproxyChild,
}

func TestMain(m *testing.M) {
	for name, value := range sqsEnvironment {
		if err := os.Setenv(name, value); err != nil { // no test runs yet
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	child, ok := children[os.Getenv("ACKAFTER_CHILD")]
	if !ok {
		code := m.Run()
		if err := servers.Stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(code)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	if err := child(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}
