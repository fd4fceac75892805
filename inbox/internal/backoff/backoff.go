// Package backoff computes the time to wait between attempts.
package backoff

import (
	"math/rand/v2"
	"time"
)

// Step returns the longest time before the attempt that follows n failed ones
// (n >= 1): base, doubled with every further failure, capped at limit. Zero base:
// none.
func Step(n int, base, limit time.Duration) time.Duration {
	switch {
	case base <= 0 || n < 1:
		return 0
	// Shifting further than the bits of a Duration would overflow.
	case n <= 40 && base <= limit>>(n-1):
		return base << (n - 1)
	}
	return limit
}

// Jitter returns a random time, more than nothing and at most d, so that what
// failed together does not come back together. Zero or negative d: none.
func Jitter(d time.Duration) time.Duration {
	if d <= 0 {
		return 0
	}
	return 1 + rand.N(d) //nolint:gosec // G404: jitter needs no secret.
}

// Delay is a Step of which the first half is certain and the second random: for one
// client that must not come back at once.
func Delay(n int, base, limit time.Duration) time.Duration {
	d := Step(n, base, limit)
	return d/2 + Jitter(d-d/2)
}
