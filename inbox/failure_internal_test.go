package inbox

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
)

// Failures that a person would call the same have one hash.
func TestFailureOf(t *testing.T) {
	t.Parallel()
	for _, same := range [][]string{
		{`order 17 is not there`, `order 4711 is not there`},
		{`key "a" is taken`, `key "b c" is taken`, `key 'b' is taken`, "key `x` is taken"},
		{`dial tcp 10.0.0.1:5432: refused`, `dial tcp 10.0.0.2:5433: refused`},
		{`no row for 0190a1b2-aaaa-7bbb-8ccc-0123456789ab`, `no row for 0190a1b2-ffff-7eee-8ddd-ba9876543210`},
		{`at 2026-01-02T03:04:05Z: late`, `at 2027-11-12T13:14:15.678+01:00: late`},
	} {
		for _, text := range same[1:] {
			if failureOf(ReasonFailed, errors.New(same[0])) != failureOf(ReasonFailed, errors.New(text)) {
				t.Errorf("%q and %q differ", same[0], text)
			}
		}
	}
	seen := map[string]string{}
	for _, reason := range []Reason{ReasonFailed, ReasonAttempts, ReasonPermanent} {
		for _, text := range []string{"", "refused", "timed out", "refused: timed out", "no row for key", "no rows for key"} {
			name := fmt.Sprint(reason, "/", text)
			hash := failureOf(reason, errors.New(text))
			if other, ok := seen[hash]; ok {
				t.Errorf("%q and %q are the same", name, other)
			}
			seen[hash] = name
		}
	}
	if failureOf(ReasonFailed, nil) == "" {
		t.Error("no hash without an error")
	}
	start := time.Now()
	_ = failureOf(ReasonFailed, errors.New(strings.Repeat(`"x1 \xff`, 1<<20)))
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("a huge error took %v", took)
	}
}
