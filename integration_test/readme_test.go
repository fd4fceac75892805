package integration_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The code of README.md compiles as it is printed, and nothing was left to be
// filled in.
func TestReadme(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../README.md")
	if err != nil {
		t.Fatal(err)
	}
	if i := strings.Index(string(text), "@@"); i >= 0 {
		t.Errorf("README.md has a placeholder: %.20q", text[i:])
	}
	code := regexp.MustCompile("(?s)```go\n(.*?)```").FindStringSubmatch(string(text))
	if code == nil {
		t.Fatal("README.md has no Go code")
	}
	const head = `package main

import (
	"context"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

func main() {}

func run(ctx context.Context, pool *pgxpool.Pool) error {
`
	dir, err := os.MkdirTemp(".", "readme") //nolint:usetesting // It has to be inside the module.
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	source := head + code[1] + "\treturn err\n}\n"
	if err := os.WriteFile(filepath.Join(dir, "main.go"), []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	build(t, "./"+dir)
}
