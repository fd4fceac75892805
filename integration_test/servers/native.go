package servers

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	// nativeTimeout bounds the start of a server through its script, with all
	// that it may have to install.
	nativeTimeout = 8 * time.Minute
	// nativeUnavailable is the exit code of a script on a machine that cannot
	// run the service.
	nativeUnavailable = 3
)

// startNative starts a server through its script in integration_test/services.
func startNative(name, variable string) starter {
	return func() (string, error) {
		folder, err := scriptFolder()
		if err != nil {
			return "", err
		}
		ctx, cancel := context.WithTimeout(context.Background(), nativeTimeout)
		defer cancel()
		if _, err := runScript(ctx, folder, "up", name); err != nil {
			return "", err
		}
		lines, err := runScript(ctx, folder, "env", name)
		if err != nil {
			return "", err
		}
		address, ok := parseExport(lines, variable)
		if !ok {
			return "", fmt.Errorf("services/env %s did not print %s", name, variable)
		}
		return address, nil
	}
}

// scriptFolder looks for integration_test/services in the folders above the
// current one, which in a test is that of its package.
func scriptFolder() (string, error) {
	start, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the service scripts: %w", err)
	}
	for folder := start; ; folder = filepath.Dir(folder) {
		scripts := filepath.Join(folder, "integration_test", "services")
		if _, err := os.Stat(filepath.Join(scripts, "up")); err == nil {
			return scripts, nil
		}
		if folder == filepath.Dir(folder) {
			return "", fmt.Errorf("%w: integration_test/services is not above %s", ErrUnavailable, start)
		}
	}
}

// runScript runs a script and returns what it printed; its errors carry what it
// said on standard error.
func runScript(ctx context.Context, folder, script, name string) (string, error) {
	return runProgram(ctx, nil, filepath.Join(folder, script), name)
}

// runProgram is runScript with more variables in the environment.
func runProgram(ctx context.Context, environment []string, program string, arguments ...string) (string, error) {
	command := exec.CommandContext(ctx, program, arguments...)
	command.Env = append(os.Environ(), environment...)
	var out, messages bytes.Buffer
	command.Stdout, command.Stderr = &out, &messages
	// A daemon that kept a pipe open must not keep us waiting.
	command.WaitDelay = 5 * time.Second
	err := command.Run()
	said := strings.TrimSpace(messages.String())
	var exit *exec.ExitError
	switch {
	case err == nil:
		return out.String(), nil
	case errors.As(err, &exit) && exit.ExitCode() == nativeUnavailable:
		return "", fmt.Errorf("%w: %s", ErrUnavailable, said)
	case errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist):
		// No bash.
		return "", fmt.Errorf("%w: %w", ErrUnavailable, err)
	default:
		return "", fmt.Errorf("services/%s %s: %w: %s", filepath.Base(program), strings.Join(arguments, " "), err, said)
	}
}

// parseExport finds the line "export VARIABLE='value'".
func parseExport(lines, variable string) (string, bool) {
	for line := range strings.Lines(lines) {
		value, ok := strings.CutPrefix(strings.TrimSpace(line), "export "+variable+"=")
		if ok {
			return strings.Trim(value, "'"), true
		}
	}
	return "", false
}
