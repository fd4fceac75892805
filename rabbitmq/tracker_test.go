package rabbitmq

import (
	"math/rand/v2"
	"testing"
)

// The tracker against a plain set.
func TestTrackerModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 1))
		var tr tracker
		next, done := uint64(1), map[uint64]bool{}
		var added []uint64
		for range 1000 {
			if random.IntN(2) == 0 || len(added) == 0 {
				next += uint64(1 + random.IntN(3)/2)
				if !tr.add(next, nil) {
					t.Fatalf("seed %d: add(%d) was refused", seed, next)
				}
				added = append(added, next)
			} else {
				n := added[random.IntN(len(added))]
				if seed%2 == 0 { // The first one stays open for long.
					n = added[min(len(added)-1, 1+random.IntN(len(added)))]
				}
				if got := tr.done(n); got == done[n] {
					t.Fatalf("seed %d: done(%d) = %v a time when it was %v before", seed, n, got, done[n])
				}
				done[n] = true
			}
			want := uint64(0)
			for _, n := range added {
				if !done[n] {
					break
				}
				want = n
			}
			if tr.upTo != want {
				t.Fatalf("seed %d: upTo = %d, want %d", seed, tr.upTo, want)
			}
		}
	}
}

func TestTrackerRefusesWhatIsNotBeyond(t *testing.T) {
	t.Parallel()
	var tr tracker
	tr.add(5, nil)
	if tr.add(5, nil) || tr.add(4, nil) {
		t.Error("a number that is not beyond the others was taken")
	}
	tr.done(5)
	if tr.add(5, nil) || !tr.add(6, nil) {
		t.Error("after all is done: want 5 refused and 6 taken")
	}
	if tr.done(7) {
		t.Error("a number that was never added is done")
	}
}

// One number that stays open does not keep all that come after it.
func TestTrackerForgetsWhatIsDone(t *testing.T) {
	t.Parallel()
	var tr tracker
	const n = 100_000
	tr.add(1, nil)
	for i := uint64(2); i <= n; i++ {
		tr.add(i, nil)
		if i > 10 {
			tr.done(i - 9)
		}
	}
	if len(tr.entries) > 1000 || tr.upTo != 0 || tr.last() != n || tr.done(50) {
		t.Errorf("%d entries, upTo %d, last %d", len(tr.entries), tr.upTo, tr.last())
	}
	tr.done(1)
	if tr.upTo != n-9 {
		t.Errorf("upTo = %d, want %d", tr.upTo, n-9)
	}
}
