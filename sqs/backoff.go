package sqs

import (
	"context"
	"math/rand/v2"
	"time"
)

// minBackoff is the first time between attempts.
const minBackoff = 100 * time.Millisecond

// backoff is the time between attempts: it doubles up to most, and is random
// between half of that and all of it, so that many clients do not come back at
// the same moment.
type backoff struct {
	most  time.Duration
	tries int
}

func (b *backoff) reset() { b.tries = 0 }

func (b *backoff) next() time.Duration {
	d := b.most
	if b.tries < 30 {
		d = min(minBackoff<<b.tries, b.most)
	}
	b.tries++
	return d/2 + rand.N(d/2+1) //nolint:gosec // jitter needs no secrecy
}

// sleep waits for the next time; it returns false when ctx ends first.
func (b *backoff) sleep(ctx context.Context) bool { return sleep(ctx, b.next()) }

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
