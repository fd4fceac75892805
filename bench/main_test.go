package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/ackafter/ackafter/integration_test/servers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// tiny is the smallest size; what it measures means nothing.
func tiny() options { return options{events: minEvents, reps: 2} }

func testServers(t *testing.T) addresses {
	t.Helper()
	return addresses{postgres: servers.PostgresDurable(t), brokers: servers.Kafka(t)}
}

// Every contestant does its work, and every one appears in the table and in the
// JSON, with figures.
func TestAllContestants(t *testing.T) {
	t.Parallel()
	var messages bytes.Buffer
	r, err := measure(t.Context(), testServers(t), tiny(), chains(), &messages)
	if err != nil {
		t.Fatalf("measure: %v\n%s", err, &messages)
	}
	var table, document bytes.Buffer
	if err := errors.Join(r.writeTable(&table), r.writeJSON(&document)); err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &table)
	var read report
	if err := json.Unmarshal(document.Bytes(), &read); err != nil {
		t.Fatal(err)
	}
	names := passNames(chains())
	if len(read.Results) != len(names) {
		t.Fatalf("%d results, want %d: %s", len(read.Results), len(names), &document)
	}
	for _, name := range names {
		of := read.result(name)
		switch {
		case of == nil:
			t.Errorf("%s: no result", name)
		case len(of.Runs) != 2 || of.Median.PerSecond <= 0 || of.Median.Seconds <= 0 || of.Median.Allocs <= 0 || of.Ratio <= 0:
			t.Errorf("%s: result %+v", name, of)
		case of.Name == of.Baseline && of.Ratio != 1:
			t.Errorf("%s: ratio to itself %v", name, of.Ratio)
		case !strings.Contains(table.String(), of.Title):
			t.Errorf("%s: not in the table", name)
		}
	}
	for _, text := range []string{"fsync=on", "synchronous_commit=on", "full_page_writes=on", "shared_buffers=", "400 messages"} {
		if !strings.Contains(table.String(), text) {
			t.Errorf("the table does not say %q", text)
		}
	}
}

func TestOnly(t *testing.T) {
	t.Parallel()
	folder := t.TempDir()
	o := options{events: minEvents, reps: 1, only: []string{"batch-replay"}, profile: folder}
	r, err := measure(t.Context(), testServers(t), o, chains(), t.Output())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Results) != 1 || r.Results[0].Name != "batch-replay" || r.Results[0].Ratio != 0 {
		t.Errorf("results %+v, want batch-replay alone, without a ratio", r.Results)
	}
	for _, name := range []string{"batch-replay.cpu.pprof", "batch-replay.allocs.pprof"} {
		if info, err := os.Stat(folder + "/" + name); err != nil || info.Size() == 0 {
			t.Errorf("profile %s: %v", name, err)
		}
	}
}

// A server that may lose commits is refused.
func TestNotDurable(t *testing.T) {
	t.Parallel()
	_, err := measure(t.Context(), addresses{postgres: servers.Postgres(t), brokers: servers.Kafka(t)}, tiny(), chains(), t.Output())
	if err == nil || !strings.Contains(err.Error(), "fsync is off") {
		t.Errorf("measure: %v, want that fsync is off", err)
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		args string
		want string // in the error; "": none
	}{
		{"", ""},
		{"-events 400 -reps 1 -json -only loop,batch-replay", ""},
		{"-only=,", ""},
		{"-events 399", "-events = 399: must be from 400"},
		{"-events -1", "-events = -1"},
		{"-events 5000001", "-events = 5000001"},
		{"-reps 0", "-reps = 0: must be from 1"},
		{"-reps -1", "-reps = -1"},
		{"-only loop,lop", `-only: unknown contestant "lop": there are loop,`},
		{"extra", `unknown argument "extra"`},
		{"-nothing", "-nothing"},
	} {
		_, err := parse(strings.Fields(row.args), t.Output())
		switch {
		case row.want == "" && err != nil:
			t.Errorf("parse %q: %v", row.args, err)
		case row.want != "" && (err == nil || !strings.Contains(err.Error(), row.want)):
			t.Errorf("parse %q: error %v, want %q", row.args, err, row.want)
		}
	}
	if _, err := parse([]string{"-h"}, t.Output()); !errors.Is(err, flag.ErrHelp) {
		t.Errorf("parse -h: %v", err)
	}
}
