package main

import (
	"fmt"
	"time"
)

// moment writes t in UTC together with its distance from now; "" when t is zero.
func moment(t, now time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf("%s (%s)", t.UTC().Format("2006-01-02 15:04:05 UTC"), distance(t, now))
}

// distance says how far t is from now, in the largest unit that fits: "3m ago",
// "in 6d", "now".
func distance(t, now time.Time) string {
	d := now.Sub(t)
	if d.Abs() < time.Second {
		return "now"
	}
	if d < 0 {
		return "in " + span(-d)
	}
	return span(d) + " ago"
}

func span(d time.Duration) string {
	const day = 24 * time.Hour
	switch {
	case d < time.Minute:
		return fmt.Sprintf("%ds", d/time.Second)
	case d < time.Hour:
		return fmt.Sprintf("%dm", d/time.Minute)
	case d < day:
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dd", d/day)
}

// jsonTime is t for JSON: in UTC, null when unknown.
func jsonTime(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}
