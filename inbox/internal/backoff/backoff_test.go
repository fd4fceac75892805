package backoff_test

import (
	"math"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox/internal/backoff"
)

func TestDelay(t *testing.T) {
	t.Parallel()
	const base, limit = 100 * time.Millisecond, 30 * time.Second
	want := map[int]time.Duration{1: base, 2: 2 * base, 5: 16 * base, 9: 256 * base, 10: limit, 63: limit, 64: limit, math.MaxInt: limit}
	for n, full := range want {
		seen := map[time.Duration]bool{}
		for range 200 {
			d := backoff.Delay(n, base, limit)
			if d < full/2 || d > full {
				t.Fatalf("Delay(%d) = %v, want between %v and %v", n, d, full/2, full)
			}
			seen[d] = true
		}
		if len(seen) < 10 {
			t.Errorf("Delay(%d) has no jitter: %d distinct values of 200", n, len(seen))
		}
	}
	for _, c := range []struct {
		n    int
		base time.Duration
	}{{0, base}, {-1, base}, {1, 0}, {1, -base}} {
		if d := backoff.Delay(c.n, c.base, limit); d != 0 {
			t.Errorf("Delay(%d, %v) = %v, want 0", c.n, c.base, d)
		}
	}
}
