package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// ids returns the ids that "dead list" gives with args.
func (term *terminal) ids(args ...string) (all []int64) {
	term.t.Helper()
	var list struct{ Parked []struct{ ID int64 } }
	if err := json.Unmarshal([]byte(term.must(append([]string{"dead", "list", "--json"}, args...)...)), &list); err != nil {
		term.t.Fatal(err)
	}
	for _, p := range list.Parked {
		all = append(all, p.ID)
	}
	return all
}

func TestDeadListFilters(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		shop(t, term)
		for line, want := range map[string][]int64{
			"":                 {11, 12, 14, 15, 16, 17, 18, 31, 32, 33},
			"--error currency": {11, 12, 14},
			"--error 100%":     nil,
			"--since 100m":     {16, 17, 18, 31, 32, 33},
			"--before 4h":      {11},
			"--since 2026-03-10T08:00:00Z --before 3h": {12},
			"--failure c0ffee11c0ffee11":               {15},
			"--failure c0ffee":                         nil,
			"--state waiting":                          {22, 23},
			"--all --error route":                      {21, 24},
			"--all --consumer shipping":                {21, 22, 23, 24},
			"--all --key A9|paid":                      {21},
			"--state retry --limit 1":                  {21},
			"--tenant acme --all":                      nil,
			"--reason conflict --since 1d":             {15},
			"--state discarded":                        nil,
		} {
			if got := term.ids(strings.Fields(line)...); !slices.Equal(got, want) {
				t.Errorf("dead list %s: %v, want %v", line, got, want)
			}
		}
		o := term.run("dead", "list", "--group", "--limit", "1")
		o.expect(t, exitOK, "3      ", "There are 4 more groups: --limit")
		term.run("dead", "list", "--group", "--consumer", "nobody").expect(t, exitOK, "no parked messages in state dead")
		var groups struct {
			Groups []struct {
				Count   int
				Failure string
			}
		}
		err := json.Unmarshal([]byte(term.must("dead", "list", "--group", "--json", "--error", "currency")), &groups)
		if err != nil || len(groups.Groups) != 1 || groups.Groups[0].Count != 3 || groups.Groups[0].Failure != "5f0c9a2be1d34c77" {
			t.Errorf("%+v, %v", groups, err)
		}
		term.run("dead", "list", "--all", "--consumer", "shipping").expect(t, exitOK, "NEXT", "LEASED", "due", "in 1m")
	})
}

// The commands change what they say they change, and nothing else.
func TestRetryAndDiscard(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		shop(t, term)
		term.run("dead", "retry", "--all", "--dry-run").expect(t, exitOK, "would be retried: 8 messages")
		term.run("dead", "discard", "--all", "--dry-run").expect(t, exitOK, "would be discarded: 10 messages")
		if got := term.ids(); len(got) != 10 {
			t.Fatalf("after dry runs: %v", got)
		}
		term.run("dead", "retry", "--all").expect(t, exitOK, "retried 8 messages\n", "passed over 1: conflict", "passed over 1: effects unknown")
		if got := term.ids("--state", "retry"); !slices.Equal(got, []int64{11, 12, 14, 17, 18, 21, 24, 31, 32, 33}) {
			t.Errorf("in state retry: %v", got)
		}
		term.run("dead", "retry", "21", "22").expect(t, exitOK, "retried 1 message\n", "passed over 1: in state waiting")
		term.run("dead", "discard", "15", "22", "--note", "jo: agreed with the partner").expect(t, exitOK, "discarded 2 messages\n")
		if got := term.ids("--state", "discarded"); !slices.Equal(got, []int64{15, 22}) {
			t.Errorf("discarded: %v", got)
		}
		for _, id := range []string{"15", "22"} {
			o := term.run("dead", "show", id, "--body")
			o.expect(t, exitOK, "discarded", "jo: agreed with the partner", "no body")
			o.lacks(t, "orderId")
		}
		term.run("dead", "retry", "15").expect(t, exitNotFound, "passed over 1: in state discarded")
		term.run("dead", "discard", "15", "--note", "jo: again").expect(t, exitNotFound, "passed over 1: discarded already")
		term.run("dead", "show", "15").lacks(t, "jo: again")
		if got := term.ids(); !slices.Equal(got, []int64{16}) {
			t.Errorf("dead: %v", got)
		}
	})
}

// Ctrl-C ends the program between two batches, and it says how far it came.
func TestRetrySignal(t *testing.T) {
	t.Parallel()
	term := onSQLite(t)
	term.must("migrate", "up")
	for id := int64(1); id <= 3; id++ {
		term.insertParked(parkedRow{id: id, consumer: "billing", key: fmt.Sprint("K", id), state: "dead", reason: "permanent error", parked: ago(time.Hour)})
	}
	command, stderr := programCommand(t, "dead", "retry", "--all", "--rate", "1/h")
	command.Env = append(command.Env, environmentURL+"="+term.url)
	stdout := new(strings.Builder)
	command.Stdout = stdout
	if err := command.Start(); err != nil {
		t.Fatal(err)
	}
	for len(term.ids("--state", "retry")) == 0 {
		select {
		case <-time.After(10 * time.Millisecond):
		case <-t.Context().Done():
			t.Fatal("nothing was retried")
		}
	}
	if err := command.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	code := exitCodeOf(t, command.Wait())
	if code != exitFailure || stdout.String() != "retried 1 message\n" || !strings.Contains(stderr.String(), "interrupted") ||
		!strings.Contains(stderr.String(), "stopped after 1 message; the same command with --after 1 does the rest") {
		t.Errorf("exit code %d, stdout %q, stderr %q", code, stdout, stderr)
	}
	if got := term.ids(); !slices.Equal(got, []int64{2, 3}) {
		t.Errorf("left: %v", got)
	}
}
