package main

import (
	"encoding/json"
	"strings"
	"testing"
	"time"
)

func TestCheck(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		term.run("check").expect(t, exitFailure, "ackafter migrate up")
		term.must("migrate", "up")
		term.insertConsumer("billing", "json:orderId;v1")
		if term.schema == "" {
			term.exec("pragma journal_mode = delete")
			term.run("check").expect(t, exitOK, "journal_mode", "info")
			term.exec("pragma journal_mode = wal")
		}
		// The test's PostgreSQL is made for speed: what it has acked does not survive a crash.
		want := exitOK
		if term.schema != "" {
			want = exitFailure
		}
		o := term.run("check", "--consumer", "billing")
		o.expect(t, want)
		if want == exitOK != strings.Contains(o.stdout, "Nothing was found.") || want != exitOK && !strings.Contains(o.stdout, "fsync") {
			t.Errorf("printed %s", o.stdout)
		}
		term.insertParked(parkedRow{
			id: 1, consumer: "billing", key: "K", state: "retry", reason: "attempt failed", body: []byte{}, next: time.Now().Add(-time.Hour),
		})
		term.run("check", "--consumer", "billing").expect(t, want, "parked_overdue", "1 due", "To do:")
		if o := term.run("check"); strings.Contains(o.stdout, "parked_overdue") {
			t.Errorf("without --consumer: %s", o.stdout)
		}
		term.run("check", "--consumer", "biling").expect(t, exitNotFound, `no consumer "biling"`)

		o = term.run("check", "--consumer", "billing", "--json")
		var got struct {
			Findings []map[string]string `json:"findings"`
		}
		if err := json.Unmarshal([]byte(o.stdout), &got); err != nil || o.code != want {
			t.Fatalf("exit code %d, %v: %s", o.code, err, o.stdout)
		}
		found := false
		for i, f := range got.Findings {
			found = found || f["code"] == "parked_overdue" && f["severity"] == "warning" && f["value"] == "1 due"
			if i > 0 && got.Findings[i-1]["severity"] != "error" && f["severity"] == "error" {
				t.Errorf("the worst is not first: %s", o.stdout)
			}
		}
		if !found {
			t.Errorf("printed %s", o.stdout)
		}
	})
}

// The settings are those of the connections that the URL makes.
func TestCheckURL(t *testing.T) {
	t.Parallel()
	term := onPostgres(t)
	term.must("migrate", "up")
	plain := term.url
	separator := "?"
	if strings.Contains(plain, "?") {
		separator = "&"
	}
	term.url = plain + separator + "statement_timeout=20s"
	term.run("check").expect(t, exitFailure, "statement_timeout", "20s")
	if o := term.run("check", "--handler-timeout", "15s"); strings.Contains(o.stdout, "statement_timeout") {
		t.Errorf("with shorter handlers: %s", o.stdout)
	}
	term.url = plain + separator + "default_transaction_read_only=on"
	term.run("check").expect(t, exitFailure, "read_only", "the promise does not hold")
	term.url = plain // To clean up.
}
