package brokertest

import (
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// check runs a rule on an adapter inside a bubble, where waiting takes no time.
func check(t *testing.T, h Harness, r rule) (result *recorder) {
	t.Helper()
	h, err := h.complete()
	if err != nil {
		t.Fatal(err)
	}
	synctest.Test(t, func(t *testing.T) {
		result = record(t, func(t testing.TB) { h.run(t, r) })
	})
	return result
}

func TestRightAdapterPasses(t *testing.T) {
	t.Parallel()
	for _, r := range rules {
		t.Run(r.name, func(t *testing.T) {
			t.Parallel()
			result := check(t, Harness{Setup: fault{}.setup}, r)
			if result.Failed() || result.skipped != "" {
				t.Errorf("failures %q, skipped %q; want a pass", result.failures, result.skipped)
			}
		})
	}
}

// Every rule runs on every broken adapter: those that should catch it do, and
// none hangs or panics.
func TestBrokenAdapterIsCaught(t *testing.T) {
	t.Parallel()
	for _, s := range sabotages() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			says := regexp.MustCompile(s.says)
			for _, r := range rules {
				result := check(t, Harness{Setup: s.fault().setup, Timing: Timing{Wait: 5 * time.Second}}, r)
				number, _, _ := strings.Cut(r.name, "-")
				if !slices.Contains(s.catches, number) {
					continue
				}
				if !result.Failed() {
					t.Errorf("rule %s did not catch an adapter that %s", r.name, s.name)
				} else if all := strings.Join(result.failures, "\n"); !says.MatchString(all) {
					t.Errorf("rule %s says %q, want %q in it", r.name, all, s.says)
				}
			}
		})
	}
}

// Every rule must be able to fail.
func TestEveryRuleCatchesSomething(t *testing.T) {
	t.Parallel()
	caught := make(map[string]bool)
	for _, s := range sabotages() {
		for _, number := range s.catches {
			caught[number] = true
		}
	}
	for _, r := range rules {
		number, _, _ := strings.Cut(r.name, "-")
		if !caught[number] {
			t.Errorf("no broken adapter shows that rule %s can fail", r.name)
		}
		delete(caught, number)
	}
	for number := range caught {
		t.Errorf("a broken adapter is to be caught by rule %s, which does not exist", number)
	}
}

func sabotages() []sabotage {
	return slices.Concat(receiveSabotages, settleSabotages, loseSabotages, closeSabotages, laneSabotages, messageSabotages, competeSabotages)
}
