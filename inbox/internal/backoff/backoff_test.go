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

func TestStep(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]time.Duration{0: 0, 1: time.Second, 2: 2 * time.Second, 4: 8 * time.Second, 5: 10 * time.Second, math.MaxInt: 10 * time.Second} {
		if got := backoff.Step(n, time.Second, 10*time.Second); got != want {
			t.Errorf("Step(%d) = %v, want %v", n, got, want)
		}
	}
}

// Full jitter: anything up to the whole, and never nothing.
func TestJitter(t *testing.T) {
	t.Parallel()
	low, high := time.Hour, time.Duration(0)
	for range 1000 {
		d := backoff.Jitter(time.Second)
		low, high = min(low, d), max(high, d)
	}
	if low <= 0 || low > 100*time.Millisecond || high < 900*time.Millisecond || high > time.Second {
		t.Errorf("1000 times between %v and %v, want them all over (0, 1s]", low, high)
	}
	for d, want := range map[time.Duration]time.Duration{-1: 0, 0: 0, 1: 1} {
		if got := backoff.Jitter(d); got != want {
			t.Errorf("Jitter(%d) = %d, want %d", d, got, want)
		}
	}
}
