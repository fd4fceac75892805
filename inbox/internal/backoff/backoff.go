// Package backoff computes the time to wait between attempts.
package backoff

import (
	"math/rand/v2"
	"time"
)

// Delay returns the time before the attempt that follows n failed ones (n >= 1):
// base, doubled with every further failure, capped at limit, and then a random
// part of it between half and all, so that many clients do not come back at
// once. Zero base: no delay.
func Delay(n int, base, limit time.Duration) time.Duration {
	if base <= 0 || n < 1 {
		return 0
	}
	d := limit
	// Shifting further than the bits of a Duration would overflow.
	if n <= 40 && base <= limit>>(n-1) {
		d = base << (n - 1)
	}
	half := d / 2
	return half + rand.N(d-half+1) //nolint:gosec // G404: jitter needs no secret.
}
