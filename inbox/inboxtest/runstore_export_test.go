package inboxtest

import (
	"testing"
	"time"
)

// TryRule runs one rule of RunStore by its name and reports through tb. It tells
// whether there is such a rule.
func TryRule[Tx any](tb testing.TB, h *StoreHarness[Tx], name string, timeout time.Duration) bool {
	for _, r := range storeRules[Tx]() {
		if r.name == name {
			r.timeout = timeout
			r.try(tb, h, "")
			return true
		}
	}
	return false
}

// FeedRules returns the names of the rules for stores with StoreHarness.Parking.
func FeedRules[Tx any]() []string {
	var names []string
	for _, rules := range [][]storeRule[Tx]{feedRules[Tx](), fedRules[Tx](), laneRules[Tx](), feedRaceRules[Tx](), undertakeRules[Tx]()} {
		for _, r := range rules {
			names = append(names, r.name)
		}
	}
	return names
}
