// Withcontainers starts the servers of the tests in containers, runs a command
// with their addresses in its environment, and stops them:
//
//	go run ./servers/withcontainers make test-modules
//
// It exits with the command's exit code, or with 3 when no Docker daemon
// answers.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/ackafter/ackafter/integration_test/servers"
)

func main() { os.Exit(run(os.Args[1:])) }

func run(arguments []string) int {
	if len(arguments) == 0 {
		fmt.Fprintln(os.Stderr, "usage: withcontainers COMMAND [ARGUMENT]...")
		return 2
	}
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	environment, err := servers.Containers()
	code := 0
	switch {
	case errors.Is(err, servers.ErrUnavailable):
		fmt.Fprintln(os.Stderr, "withcontainers:", err)
		code = 3
	case err != nil:
		fmt.Fprintln(os.Stderr, "withcontainers:", err)
		code = 1
	default:
		code = execute(ctx, arguments, environment)
	}
	if err := servers.Stop(); err != nil {
		fmt.Fprintln(os.Stderr, "withcontainers:", err)
		code = max(code, 1)
	}
	return code
}

func execute(ctx context.Context, arguments, environment []string) int {
	command := exec.CommandContext(ctx, arguments[0], arguments[1:]...)
	command.Env = append(os.Environ(), environment...)
	command.Stdin, command.Stdout, command.Stderr = os.Stdin, os.Stdout, os.Stderr
	command.Cancel = func() error { return command.Process.Signal(syscall.SIGTERM) }
	err := command.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return exit.ExitCode()
	default:
		fmt.Fprintln(os.Stderr, "withcontainers:", err)
		return 1
	}
}
