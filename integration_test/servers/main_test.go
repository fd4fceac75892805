package servers_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/ackafter/ackafter/integration_test/servers"
)

func TestMain(m *testing.M) {
	code := m.Run()
	if err := servers.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	os.Exit(code)
}
