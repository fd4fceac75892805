package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// fakeServices are scripts in the place of those of integration_test, which
// write down how they were called. kafka runs already, pgdurable does not.
func fakeServices(t *testing.T) (calls func() string) {
	t.Helper()
	root := t.TempDir()
	services := filepath.Join(root, "integration_test", "services")
	if err := os.MkdirAll(services, 0o755); err != nil {
		t.Fatal(err)
	}
	log := filepath.Join(root, "calls")
	for name, script := range map[string]string{
		"pgdurable": `exit 1`,
		"kafka":     `exit 0`,
		"up":        `echo "up $*" >>` + log + `; [ "$1" != "$FAKE_BROKEN" ] || exit "$FAKE_CODE"`,
		"down":      `echo "down $*" >>` + log,
		"env":       `case $1 in pgdurable) echo "export ` + envPostgres + `='postgres://there/x'";; kafka) echo "export ` + envKafka + `='a:1, b:2'";; esac`,
	} {
		if err := os.WriteFile(filepath.Join(services, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	below := filepath.Join(root, "bench")
	if err := os.Mkdir(below, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Chdir(below)
	t.Setenv(envPostgres, "")
	t.Setenv(envKafka, "")
	return func() string {
		b, err := os.ReadFile(log)
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		return strings.ReplaceAll(strings.TrimSpace(string(b)), "\n", "; ")
	}
}

//nolint:paralleltest // It changes the environment and the current folder.
func TestFindServersStartsWhatIsMissing(t *testing.T) {
	calls := fakeServices(t)
	s, stop, err := findServers(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if s.postgres != "postgres://there/x" || strings.Join(s.brokers, "|") != "a:1|b:2" {
		t.Errorf("servers %+v", s)
	}
	if got := calls(); got != "up pgdurable; up kafka" {
		t.Errorf("calls %q", got)
	}
	stop()
	if got := calls(); got != "up pgdurable; up kafka; down pgdurable" {
		t.Errorf("calls %q: what ran before must go on, what was started must end", got)
	}
}

func TestFindServersInTheEnvironment(t *testing.T) {
	calls := fakeServices(t)
	t.Setenv(envPostgres, "postgres://mine/x")
	t.Setenv(envKafka, "mine:1")
	s, stop, err := findServers(t.Context(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	stop()
	if got := calls(); s.postgres != "postgres://mine/x" || len(s.brokers) != 1 || s.brokers[0] != "mine:1" || got != "" {
		t.Errorf("servers %+v, calls %q", s, got)
	}
}

//nolint:paralleltest // It changes the environment and the current folder.
func TestFindServersThatDoNotStart(t *testing.T) {
	for code, want := range map[string]string{"1": "exit status 1", "3": "this machine cannot run it"} {
		calls := fakeServices(t)
		t.Setenv("FAKE_BROKEN", "kafka")
		t.Setenv("FAKE_CODE", code)
		_, _, err := findServers(t.Context(), t.Output())
		if err == nil || !strings.Contains(err.Error(), envKafka) || !strings.Contains(err.Error(), want) {
			t.Errorf("code %s: error %v, want %s and %q", code, err, envKafka, want)
		}
		if got := calls(); got != "up pgdurable; up kafka; down pgdurable" {
			t.Errorf("code %s: calls %q: what was started must end", code, got)
		}
	}
	t.Chdir(t.TempDir())
	if _, _, err := findServers(t.Context(), t.Output()); err == nil || !strings.Contains(err.Error(), "run it from the repository") {
		t.Errorf("outside of the repository: %v", err)
	}
}
