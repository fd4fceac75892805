// Package retry is what the broker adapters have in common for trouble that
// passes: the time between attempts, and saying so without flooding the log.
package retry

import (
	"context"
	"math/rand/v2"
	"time"
)

// MinBackoff is the first time between attempts.
const MinBackoff = 100 * time.Millisecond

// Backoff is the time between attempts: it begins with MinBackoff, doubles up to
// Most, and is random between half of that and all of it, so that many clients do
// not come back at the same moment. It belongs to one goroutine.
type Backoff struct {
	Most  time.Duration
	tries int
}

// Reset begins anew.
func (b *Backoff) Reset() { b.tries = 0 }

// Tries is how many times were taken since the begin.
func (b *Backoff) Tries() int { return b.tries }

// Next returns the next time.
func (b *Backoff) Next() time.Duration {
	b.tries++
	return After(b.tries-1, b.Most)
}

// After is the time of a Backoff that has taken so many; for who counts by itself.
func After(tries int, most time.Duration) time.Duration {
	d := most
	if tries < 30 {
		d = min(MinBackoff<<tries, most)
	}
	return d/2 + rand.N(d/2+1) //nolint:gosec // jitter needs no secrecy
}

// Sleep waits for the next time; it returns false when ctx ends first.
func (b *Backoff) Sleep(ctx context.Context) bool { return Sleep(ctx, b.Next()) }

// Sleep waits for d; it returns false when ctx ends first.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
