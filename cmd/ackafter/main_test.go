package main

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// The program itself: exit codes, and a signal ends it in order.
func TestSignal(t *testing.T) {
	t.Parallel()
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		t.Run(signal.String(), func(t *testing.T) {
			t.Parallel()
			address, accepted := silentServer(t)
			command, stderr := programCommand(t, "migrate", "status")
			command.Env = append(command.Env, environmentURL+"=postgres://app:hunter2@"+address+"/shop?sslmode=disable")
			if err := command.Start(); err != nil {
				t.Fatal(err)
			}
			select {
			case <-accepted:
			case <-t.Context().Done():
			}
			if err := command.Process.Signal(signal); err != nil {
				t.Fatal(err)
			}
			code := exitCodeOf(t, command.Wait())
			if code != exitFailure || !strings.Contains(stderr.String(), "interrupted") || strings.Contains(stderr.String(), "hunter2") {
				t.Errorf("exit code %d, stderr %q", code, stderr)
			}
		})
	}
}

func TestProgramExitCodes(t *testing.T) {
	t.Parallel()
	file := "sqlite:" + t.TempDir() + "/inbox.db"
	for _, row := range []struct {
		args []string
		code int
	}{
		{[]string{"show", "K"}, exitFailure},
		{[]string{"migrate", "up"}, exitOK},
		{[]string{"show", "K"}, exitNotFound},
		{[]string{"dead", "show", "1"}, exitNotFound},
		{[]string{"dead", "list"}, exitOK},
		{[]string{"show"}, exitUsage},
	} {
		command, stderr := programCommand(t, row.args...)
		command.Env = append(command.Env, environmentURL+"="+file)
		if code := exitCodeOf(t, command.Run()); code != row.code {
			t.Errorf("%v: exit code %d, want %d\n%s", row.args, code, row.code, stderr)
		}
	}
}

// programCommand returns the program with args, not started, and what it will
// have written to standard error.
func programCommand(t *testing.T, args ...string) (*exec.Cmd, *strings.Builder) {
	t.Helper()
	command := exec.CommandContext(t.Context(), os.Args[0], args...)
	command.Env = append(os.Environ(), asProgram+"=1")
	stderr := new(strings.Builder)
	command.Stderr = stderr
	return command, stderr
}

func exitCodeOf(t *testing.T, err error) int {
	t.Helper()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	if exit == nil {
		return exitOK
	}
	return exit.ExitCode()
}
