package main

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// exportedLine is a line of an export.
type exportedLine struct {
	ID      int64
	Content *struct {
		Body    struct{ Text, Base64 *string }
		Headers []struct{ Name string }
	}
}

func exportedLines(t *testing.T, text string) (all []exportedLine) {
	t.Helper()
	for line := range strings.Lines(text) {
		var l exportedLine
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		all = append(all, l)
	}
	return all
}

// Bodies come only on request, one line a message, in pages.
func TestExport(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(1100, func(r *inbox.ParkedRecord) {
		r.Message = &broker.Message{Body: []byte("secret\n"), Headers: broker.Headers{{Name: "trace", Value: []byte("secret")}}}
		if r.ID == 2 {
			r.Message.Body = []byte("secret\xff")
		}
	})...)
	o := term.run("dead", "export")
	lines := exportedLines(t, o.must(t))
	if len(lines) != 1100 || lines[0].ID != 1 || lines[1099].ID != 1100 || lines[0].Content != nil {
		t.Errorf("%d lines, the first is %+v", len(lines), lines[0])
	}
	o.lacks(t, "secret", "trace")
	if n := slices.Max(fake.pages); n > pageSize {
		t.Errorf("a page of %d", n)
	}
	lines = exportedLines(t, term.must("dead", "export", "--bodies", "--limit", "3"))
	if len(lines) != 3 || *lines[0].Content.Body.Text != "secret\n" || *lines[1].Content.Body.Base64 != "c2VjcmV0/w==" || lines[0].Content.Headers[0].Name != "trace" {
		t.Errorf("%+v", lines)
	}
	if out := term.must("dead", "export", "--consumer", "nobody"); out != "" {
		t.Errorf("an export of nothing: %q", out)
	}
}

func TestExportToAFile(t *testing.T) {
	t.Parallel()
	term, _ := onFake(t, parkedRows(3, nil)...)
	path := filepath.Join(t.TempDir(), "dead.jsonl")
	term.run("dead", "export", "--output", path).expect(t, exitOK, "3 messages written to "+path)
	content, err := os.ReadFile(path)
	if err != nil || len(exportedLines(t, string(content))) != 3 {
		t.Errorf("%v\n%s", err, content)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
	term.run("dead", "export", "--output", path).expect(t, exitFailure, "make the file", "exists")
}

// A message that is handled meanwhile is left out.
func TestExportInterrupted(t *testing.T) {
	t.Parallel()
	term, fake := onFake(t, parkedRows(4, nil)...)
	ctx, cancel := context.WithCancel(t.Context())
	term.ctx = ctx
	gone := false
	term.watch = func(store keeper) keeper {
		fake.keeper = store
		return getHook{fake, func(id int64) {
			switch {
			case id == 2 && !gone:
				gone = true
				fake.rows = slices.Delete(fake.rows, 1, 2)
			case id == 3:
				cancel()
			}
		}}
	}
	o := term.run("dead", "export", "--bodies")
	o.expect(t, exitFailure, "interrupted", "stopped after 1 message; the same command with --after 1 writes the rest")
	if lines := exportedLines(t, o.stdout); len(lines) != 1 {
		t.Errorf("%+v", lines)
	}
	term.ctx = nil
	if lines := exportedLines(t, term.must("dead", "export", "--bodies", "--after", "1")); len(lines) != 2 || lines[0].ID != 3 {
		t.Errorf("%+v", lines)
	}
}

// getHook calls got before every GetParked.
type getHook struct {
	*fakeKeeper
	got func(id int64)
}

func (h getHook) GetParked(ctx context.Context, id int64) (*inbox.ParkedRecord, error) {
	h.got(id)
	return h.fakeKeeper.GetParked(ctx, id)
}

// must returns the standard output of a command that succeeded.
func (o output) must(t *testing.T) string {
	t.Helper()
	o.expect(t, exitOK)
	return o.stdout
}
