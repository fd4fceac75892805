package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

// The victims are this binary again.
func TestMain(m *testing.M) {
	if os.Getenv(envFile) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

func TestQuickstart(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if err := show(t.Context(), &out); err != nil {
		t.Fatalf("%v\n%s", err, out.String())
	}
	if !strings.Contains(out.String(), "10 orders, 10 charges") {
		t.Errorf("output:\n%s", out.String())
	}
}

// A check that cannot fail would be worth nothing.
func TestTableNoticesWrongNumbers(t *testing.T) {
	t.Parallel()
	db, err := open(t.Context(), t.TempDir()+"/x.db")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var out bytes.Buffer
	tab := &table{out: &out, db: db}
	if err := tab.row(t.Context(), "step", numbers{first: 1}, numbers{first: 2}); err != nil {
		t.Fatal(err)
	}
	if err := tab.end(t.Context()); err == nil || !strings.Contains(out.String(), "expected") {
		t.Errorf("end = %v\n%s", err, out.String())
	}
}
