package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// The environment variables that name the servers, and their scripts.
const (
	envPostgres = "ACKAFTER_TEST_POSTGRES_DURABLE"
	envKafka    = "ACKAFTER_TEST_KAFKA"

	scriptPostgres = "pgdurable"
	scriptKafka    = "kafka"
)

const (
	// startTimeout bounds the start of a server with all that it may have to
	// install.
	startTimeout = 10 * time.Minute
	stopTimeout  = time.Minute
	// cannotRun is the exit code of a script on a machine that cannot run the
	// service.
	cannotRun = 3
)

// addresses are the addresses of the servers.
type addresses struct {
	postgres string // URL
	brokers  []string
}

// findServers returns the servers that the environment names, and starts those
// that it does not; stop ends what was started.
func findServers(ctx context.Context, messages io.Writer) (found addresses, stop func(), err error) {
	var started []string
	folder := ""
	stop = func() { stopServices(ctx, folder, started, messages) }
	address := func(variable, script string) (string, error) {
		if a := os.Getenv(variable); a != "" {
			return a, nil
		}
		if folder == "" {
			if folder, err = scriptFolder(); err != nil {
				return "", fmt.Errorf("%s is not set, and %w", variable, err)
			}
		}
		if runScript(ctx, filepath.Join(folder, script), nil, io.Discard, "running") != nil {
			started = append(started, script)
		}
		a, err := startService(ctx, folder, script, variable, messages)
		if err != nil {
			return "", fmt.Errorf("%s is not set, and the service did not start: %w", variable, err)
		}
		return a, nil
	}
	if found.postgres, err = address(envPostgres, scriptPostgres); err != nil {
		stop()
		return addresses{}, nil, err
	}
	brokers, err := address(envKafka, scriptKafka)
	if err != nil {
		stop()
		return addresses{}, nil, err
	}
	for b := range strings.SplitSeq(brokers, ",") {
		found.brokers = append(found.brokers, strings.TrimSpace(b))
	}
	return found, stop, nil
}

// scriptFolder looks for integration_test/services in the folders above the
// current one.
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
			return "", fmt.Errorf("integration_test/services is not above %s: run it from the repository", start)
		}
	}
}

// startService starts a service unless it runs, and returns its address.
func startService(ctx context.Context, folder, script, variable string, messages io.Writer) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err := runScript(ctx, filepath.Join(folder, "up"), nil, messages, script)
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == cannotRun {
		return "", errors.New("this machine cannot run it; where Docker answers, `make bench` uses containers")
	}
	if err != nil {
		return "", err
	}
	var lines bytes.Buffer
	if err := runScript(ctx, filepath.Join(folder, "env"), &lines, messages, script); err != nil {
		return "", err
	}
	for line := range strings.Lines(lines.String()) {
		if value, ok := strings.CutPrefix(strings.TrimSpace(line), "export "+variable+"="); ok {
			return strings.Trim(value, "'"), nil
		}
	}
	return "", fmt.Errorf("services/env %s did not print %s", script, variable)
}

// stopServices stops what was started.
func stopServices(ctx context.Context, folder string, started []string, messages io.Writer) {
	if len(started) == 0 {
		return
	}
	// The servers have to go after an interrupt too.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
	defer cancel()
	if err := runScript(ctx, filepath.Join(folder, "down"), nil, messages, started...); err != nil {
		fmt.Fprintln(messages, "bench: stop the services:", err)
	}
}

func runScript(ctx context.Context, path string, out, messages io.Writer, args ...string) error {
	command := exec.CommandContext(ctx, path, args...)
	command.Stdout, command.Stderr = out, messages
	// A daemon that kept a pipe open must not keep us waiting.
	command.WaitDelay = 5 * time.Second
	if err := command.Run(); err != nil {
		return fmt.Errorf("%s %s: %w", filepath.Base(path), strings.Join(args, " "), err)
	}
	return nil
}
