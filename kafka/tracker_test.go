package kafka

import (
	"math/rand/v2"
	"testing"
)

// case K1
func TestTrackerIsContiguous(t *testing.T) {
	t.Parallel()
	tr := newTracker(0)
	var seqs []int64
	for offset := range int64(10) {
		seq, ok := tr.add(offset, 0)
		if !ok {
			t.Fatalf("offset %d refused", offset)
		}
		seqs = append(seqs, seq)
	}
	check := func(want int64) {
		t.Helper()
		if got := tr.committable(); got != want {
			t.Fatalf("committable is %d, want %d", got, want)
		}
	}
	check(0)
	for _, i := range []int{0, 1, 2, 4, 5, 9, 8, 7, 6} {
		tr.done(seqs[i])
	}
	check(3)
	if got := tr.ahead(seqs[9]); got != 6 {
		t.Errorf("offset 9 is %d ahead, want 6", got)
	}
	tr.done(seqs[3])
	check(10)
	if tr.size() != 0 {
		t.Errorf("size is %d, want 0", tr.size())
	}
}

// case K8
func TestTrackerHoles(t *testing.T) {
	t.Parallel()
	tr := newTracker(0)
	a, _ := tr.add(3, 0)
	b, _ := tr.add(7, 0)
	c, _ := tr.add(50, 0)
	if got := tr.committable(); got != 3 {
		t.Fatalf("nothing done: committable is %d, want 3", got)
	}
	tr.done(b)
	tr.done(a)
	if got := tr.committable(); got != 50 {
		t.Fatalf("3 and 7 done: committable is %d, want 50", got)
	}
	tr.done(c)
	if got := tr.committable(); got != 51 {
		t.Fatalf("all done: committable is %d, want 51", got)
	}
	tr.advance(52) // the mark of a transaction
	if got := tr.committable(); got != 52 {
		t.Fatalf("behind the mark: committable is %d, want 52", got)
	}
	tr.advance(40)
	if got := tr.committable(); got != 52 {
		t.Fatalf("it went back to %d", got)
	}
}

func TestTrackerRefuses(t *testing.T) {
	t.Parallel()
	tr := newTracker(5)
	if _, ok := tr.add(4, 0); ok {
		t.Error("an offset below the start was taken")
	}
	seq, _ := tr.add(5, 0)
	if _, ok := tr.add(5, 0); ok {
		t.Error("an offset was taken twice")
	}
	for _, s := range []int64{seq + 1, seq - 1, -7} {
		if tr.done(s) {
			t.Errorf("sequence number %d is unknown and was done", s)
		}
	}
	if !tr.done(seq) || tr.done(seq) {
		t.Error("done must be news once")
	}
}

// The committable offset never passes what is not done and never decreases,
// whatever the order; a plain model says what it must be.
func TestTrackerAgainstModel(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 2))
	tr := newTracker(0)
	open := make(map[int64]int64) // offset by sequence number
	next, last := int64(0), int64(0)
	for range 10_000 {
		switch {
		case rng.IntN(3) > 0 && len(open) < 500:
			next += int64(rng.IntN(3))
			seq, ok := tr.add(next, 0)
			if !ok {
				t.Fatalf("offset %d refused", next)
			}
			open[seq] = next
			next++
		case rng.IntN(20) == 0:
			next += int64(rng.IntN(5))
			tr.advance(next)
		default:
			for seq := range open {
				tr.done(seq)
				delete(open, seq)
				break
			}
		}
		want := next
		for _, offset := range open {
			want = min(want, offset)
		}
		got := tr.committable()
		if got != want {
			t.Fatalf("committable is %d, want %d", got, want)
		}
		if got < last {
			t.Fatalf("committable went back from %d to %d", last, got)
		}
		last = got
	}
	if len(tr.entries) > 10_000 {
		t.Errorf("%d entries are kept for %d", len(tr.entries), len(open))
	}
}
