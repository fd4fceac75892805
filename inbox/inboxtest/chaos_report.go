package inboxtest

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// The bounds of looking for a shorter schedule.
const (
	shrinkTries = 300
	shrinkTime  = 10 * time.Second
)

// report returns all that a person needs to know about a seed that failed.
func (c *chaos[Tx]) report(seed uint64, s *schedule, finding string, e *roundEnd) string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %s\n", seed, finding)
	again := false
	for range 3 {
		if f, _ := c.fails(s); f != "" {
			again = true
			break
		}
	}
	if again {
		short, shortFinding, shortEnd, done := c.shrink(s)
		if short.steps() < s.steps() || len(short.entries) < len(s.entries) {
			b.Reset()
			fmt.Fprintf(&b, "seed %d: %s\n", seed, shortFinding)
			fmt.Fprintf(&b, "the shortest schedule found that shows it (the seed's own has %d faults):\n", s.steps())
			if !done {
				b.WriteString("  (it may not be the shortest: looking for it took too long)\n")
			}
			s, e = short, shortEnd
		} else {
			b.WriteString("the schedule:\n")
		}
	} else {
		b.WriteString("it did not fail again in 3 runs of the same schedule: it also depends on timing. The schedule:\n")
	}
	for _, line := range c.describe(s) {
		fmt.Fprintf(&b, "  - %s\n", line)
	}
	b.WriteString(e.story())
	fmt.Fprintf(&b, "\nto run this seed alone: inboxtest.ChaosConfig{Seed: %d, Rounds: 1}", seed)
	return b.String()
}

// shrink drops what is not needed for a schedule to fail. done tells that it
// tried everything.
func (c *chaos[Tx]) shrink(s *schedule) (short *schedule, finding string, e *roundEnd, done bool) {
	finding, e = c.fails(s)
	tries, deadline := 0, time.Now().Add(shrinkTime)
	for progress := true; progress; {
		progress = false
		for _, drop := range c.drops(s) {
			smaller := s.clone()
			if !drop(smaller) || len(smaller.entries) == 0 {
				continue
			}
			if tries++; tries > shrinkTries || time.Now().After(deadline) {
				return s, finding, e, false
			}
			if f, end := c.fails(smaller); f != "" {
				s, finding, e, progress = smaller, f, end, true
			}
		}
	}
	return s, finding, e, true
}

// drops returns the ways to drop one thing from a schedule, the largest things
// first. Each reports whether there was something to drop.
func (c *chaos[Tx]) drops(s *schedule) []func(d *schedule) bool {
	var all []func(d *schedule) bool
	for i := range c.messages {
		all = append(all, func(d *schedule) bool { return d.dropMessage(i) })
	}
	for _, f := range s.faults {
		all = append(all, func(d *schedule) bool {
			n := slices.Index(d.faults, f)
			if n >= 0 {
				d.faults = slices.Delete(d.faults, n, n+1)
			}
			return n >= 0
		})
	}
	all = append(all, func(d *schedule) bool {
		was := d.poison
		d.poison = -1
		return was >= 0
	})
	for _, e := range s.entries {
		all = append(all, func(d *schedule) bool {
			n := slices.Index(d.entries, e)
			if n >= 0 && e.copy != original {
				d.entries = slices.Delete(d.entries, n, n+1)
				return true
			}
			return false
		})
	}
	return append(all, func(d *schedule) bool {
		if d.inOrder() {
			return false
		}
		slices.SortStableFunc(d.entries, func(a, b entry) int { return a.message - b.message })
		return true
	}, func(d *schedule) bool {
		if slices.Equal(d.batches, []int{1}) {
			return false
		}
		d.batches = []int{1}
		return true
	})
}

// dropMessage leaves a message out, with all that is about it.
func (s *schedule) dropMessage(i int) bool {
	if s.absent[i] || i == s.poison {
		return false
	}
	s.absent[i] = true
	s.entries = withoutMessages(s.entries, s.absent)
	s.faults = slices.DeleteFunc(s.faults, func(f fault) bool { return f.message == i })
	return true
}
