package retry_test

import (
	"testing"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
)

func TestBackoff(t *testing.T) {
	t.Parallel()
	b := retry.Backoff{Most: 5 * time.Second}
	for i, most := range []time.Duration{100, 200, 400, 800, 1600, 3200, 5000, 5000} {
		most *= time.Millisecond
		if d := b.Next(); d < most/2 || d > most {
			t.Errorf("time %d is %v, want from %v to %v", i, d, most/2, most)
		}
	}
	for range 100 {
		if d := b.Next(); d > 5*time.Second {
			t.Fatalf("%v is too long", d)
		}
	}
	b.Reset()
	if d := b.Next(); d > 100*time.Millisecond {
		t.Errorf("%v after a reset", d)
	}
}
