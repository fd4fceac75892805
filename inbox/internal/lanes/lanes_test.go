package lanes_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/inbox/internal/lanes"
)

func never(string) context.Context { return context.Background() }

func values(items []*lanes.Item[string]) string {
	s := ""
	for _, it := range items {
		s += it.Value + " "
	}
	return s
}

func TestOrderWithinLane(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := lanes.New(1, lanes.Limits{}, never)
		for _, v := range []string{"a1", "a2", "b1", "a3"} {
			q.Put(v[:1], v, 1)
		}
		got := q.Take(t.Context(), 2)
		if values(got) != "a1 a2 " {
			t.Fatalf("took %q", values(got))
		}
		q.Put("a", "a4", 1)
		other := q.Take(t.Context(), 10)
		if values(other) != "b1 " {
			t.Fatalf("a busy lane must not be handed out: took %q", values(other))
		}
		got[1].Keep, got[1].Delay = true, time.Second
		q.Finish(got)
		q.Finish(other)
		start := time.Now()
		got = q.Take(t.Context(), 10)
		if values(got) != "a2 a3 a4 " || time.Since(start) != time.Second {
			t.Fatalf("after %v took %q, want a2 a3 a4 after its delay", time.Since(start), values(got))
		}
		q.Finish(got)
		if n, b := q.Held(); n != 0 || b != 0 {
			t.Errorf("holds %d items, %d bytes after everything is done", n, b)
		}
	})
}

func TestNoLaneIsItsOwn(t *testing.T) {
	t.Parallel()
	q := lanes.New(2, lanes.Limits{}, never)
	q.Put("", "x", 1)
	q.Put("", "y", 1)
	x, y := q.Take(t.Context(), 9), q.Take(t.Context(), 9)
	if values(x) != "x " || values(y) != "y " {
		t.Errorf("two workers took %q and %q: each should get its share", values(x), values(y))
	}
}

func TestLimits(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := lanes.New(1, lanes.Limits{Items: 2, Bytes: 10}, never)
		if n, ok := q.Room(t.Context()); n != 1 || !ok {
			t.Fatalf("Room = %d, %v, want 1 before a size is known", n, ok)
		}
		q.Put("", "big", 100)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, ok := q.Room(ctx); ok {
			t.Fatal("there is room beyond the bound on bytes")
		}
		items := q.Take(t.Context(), 1)
		go func() {
			<-time.After(time.Hour)
			q.Finish(items)
		}()
		if n, ok := q.Room(t.Context()); n != 1 || !ok {
			t.Fatalf("Room = %d, %v after everything is done, want 1 for giants", n, ok)
		}
	})
}

func TestLostEndsDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, lose := context.WithCancel(t.Context())
		q := lanes.New(1, lanes.Limits{}, func(string) context.Context { return ctx })
		q.Put("a", "old", 1)
		items := q.Take(t.Context(), 1)
		items[0].Keep, items[0].Delay = true, time.Hour
		q.Finish(items)
		q.Put("a", "new", 1)
		lose()
		start := time.Now()
		if got := values(q.Take(t.Context(), 9)); got != "old new " || time.Since(start) != 0 {
			t.Errorf("took %q after %v", got, time.Since(start))
		}
	})
}

func TestAloneIsNotMixed(t *testing.T) {
	t.Parallel()
	q := lanes.New(1, lanes.Limits{}, never)
	for _, v := range []string{"a1", "a2", "b1", "c1"} {
		q.Put(v[:1], v, 1)
	}
	got := q.Take(t.Context(), 1)
	got[0].Keep, got[0].Alone = true, true
	q.Finish(got) // a1 is back, behind b and c
	if got = q.Take(t.Context(), 9); values(got) != "b1 c1 " {
		t.Errorf("took %q: an item that is to run alone is mixed with others", values(got))
	}
	q.Finish(got)
	if got = q.Take(t.Context(), 9); values(got) != "a1 " {
		t.Errorf("took %q, want a1 alone", values(got))
	}
	q.Finish(got)
	if got = q.Take(t.Context(), 9); values(got) != "a2 " {
		t.Errorf("took %q", values(got))
	}
}

func TestRoomByBytes(t *testing.T) {
	t.Parallel()
	q := lanes.New(1, lanes.Limits{Bytes: 100}, never)
	if n, _ := q.Room(t.Context()); n > 10 {
		t.Errorf("room for %d before anything is known about sizes", n)
	}
	q.Put("a", "x", 20)
	if n, _ := q.Room(t.Context()); n != 4 {
		t.Errorf("room for %d, want 4 of 20 bytes each", n)
	}
	q.Put("a", "x", 50)
	if n, _ := q.Room(t.Context()); n != 1 {
		t.Errorf("room for %d, want 1", n)
	}
}

func TestCloseReturnsTheRest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := lanes.New(1, lanes.Limits{}, never)
		for _, lane := range []string{"a", "", "b", ""} {
			q.Put(lane, "v"+lane, 1)
		}
		taken := q.Take(t.Context(), 1)
		delayed := q.Take(t.Context(), 1)
		delayed[0].Keep, delayed[0].Delay = true, time.Hour
		q.Finish(delayed)
		if rest := q.Close(); len(rest) != 3 {
			t.Errorf("Close returned %d items, want the 3 that are not taken", len(rest))
		}
		taken[0].Keep = true
		q.Finish(taken)
		if n, b := q.Held(); n != 0 || b != 0 {
			t.Errorf("holds %d items, %d bytes at the end", n, b)
		}
		if q.Put("a", "late", 1) || q.Take(t.Context(), 1) != nil || q.Close() != nil {
			t.Error("a closed queue must take and give nothing")
		}
		if _, ok := q.Room(t.Context()); ok {
			t.Error("a closed queue has room")
		}
	})
}

func TestRemove(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		q := lanes.New(1, lanes.Limits{Items: 10}, never)
		for _, v := range []string{"a1-", "a2", "a3-"} {
			q.Put("a", v, 1)
		}
		busy := q.Take(t.Context(), 1)
		q.Put("d", "d1-", 1)
		q.Put("d", "d2", 1)
		delayed := q.Take(t.Context(), 1)
		delayed[0].Keep, delayed[0].Delay = true, time.Hour
		q.Finish(delayed)
		for _, v := range []string{"b1", "b2-", "b3-"} {
			q.Put("b", v, 1)
		}
		q.Put("c", "c1-", 1)
		q.Put("", "x-", 1)
		q.Put("", "y", 1)

		removed := q.Remove(func(v string) bool { return strings.HasSuffix(v, "-") })
		inOrder := slices.Index(removed, "b2-") < slices.Index(removed, "b3-")
		slices.Sort(removed)
		if want := "[a3- b2- b3- c1- d1- x-]"; fmt.Sprint(removed) != want || !inOrder {
			t.Errorf("removed %v, want %s, lanes in order", removed, want)
		}
		if again := q.Remove(func(v string) bool { return strings.HasSuffix(v, "-") }); len(again) != 0 {
			t.Errorf("a second call removed %v: what is taken must stay", again)
		}
		q.Finish(busy)
		start := time.Now()
		var rest []string
		for range 4 {
			items := q.Take(t.Context(), 10)
			for _, it := range items {
				rest = append(rest, it.Value)
			}
			q.Finish(items)
			if n, _ := q.Held(); n == 0 {
				break
			}
		}
		slices.Sort(rest)
		if want := "[a2 b1 d2 y]"; fmt.Sprint(rest) != want || time.Since(start) != 0 {
			t.Errorf("took %v after %v, want %s at once: the delay was for one that is gone", rest, time.Since(start), want)
		}
		if n, b := q.Held(); n != 0 || b != 0 {
			t.Errorf("holds %d items, %d bytes at the end", n, b)
		}
		for range 10 { // Lanes that became empty work as before.
			q.Put("c", "c2", 1)
		}
		if got := q.Take(t.Context(), 20); len(got) != 10 {
			t.Errorf("took %d of 10", len(got))
		}
	})
}

// Many workers: every item is handed out until it is done, each lane strictly
// in order and never to two workers at once.
func TestManyWorkers(t *testing.T) {
	t.Parallel()
	const workers, laneCount, perLane = 8, 20, 50
	q := lanes.New(workers, lanes.Limits{Items: 100}, never)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var mu sync.Mutex
	next, busy, done := map[string]int{}, map[string]bool{}, 0
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for {
				items := q.Take(ctx, 7)
				if items == nil {
					return
				}
				mu.Lock()
				mine := map[string]bool{}
				for _, it := range items {
					lane := it.Value[:2]
					if busy[lane] && !mine[lane] {
						t.Errorf("lane %s is handed to two workers", lane)
					}
					busy[lane], mine[lane] = true, true
				}
				mu.Unlock()
				mu.Lock()
				held := map[string]bool{}
				for _, it := range items {
					lane, n := it.Value[:2], it.Value[3:]
					if held[lane] || rand.IntN(10) == 0 {
						it.Keep, it.Delay, held[lane] = true, time.Duration(rand.IntN(2))*time.Millisecond, true
						continue
					}
					if n != fmt.Sprintf("%03d", next[lane]) {
						t.Errorf("lane %s: got %s, want %03d", lane, n, next[lane])
					}
					next[lane]++
					done++
				}
				for _, it := range items {
					busy[it.Value[:2]] = false
				}
				finished := done == laneCount*perLane
				mu.Unlock()
				q.Finish(items) //nolint:contextcheck // An item has its own end.
				if finished {
					q.Close()
				}
			}
		})
	}
	for n := range perLane {
		for l := range laneCount {
			if _, ok := q.Room(ctx); !ok {
				t.Fatal("no room in time")
			}
			q.Put(fmt.Sprintf("%02d", l), fmt.Sprintf("%02d/%03d", l, n), 10)
		}
	}
	wg.Wait()
	if done != laneCount*perLane {
		t.Errorf("%d done, want %d", done, laneCount*perLane)
	}
	if n, b := q.Held(); n != 0 || b != 0 {
		t.Errorf("holds %d items, %d bytes", n, b)
	}
	if since, held := q.Oldest(); held {
		t.Errorf("the oldest of nothing is of %v", since)
	}
}

// The oldest is the one that was put first and is not done, wherever it is: ready,
// taken, kept, waiting out a delay or behind another one.
func TestOldest(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		q := lanes.New(2, lanes.Limits{}, never)
		want := func(after time.Duration, held bool) {
			t.Helper()
			if since, ok := q.Oldest(); ok != held || (held && since.Sub(start) != after) {
				t.Errorf("the oldest is %v, %v; want %v, %v", since.Sub(start), ok, after, held)
			}
		}
		want(0, false)
		for i, lane := range []string{"a", "a", "b", "", "c"} {
			q.Put(lane, fmt.Sprint(lane, i), 1)
			<-time.After(time.Second)
		}
		want(0, true)
		taken := q.Take(t.Context(), 1) // a0
		want(0, true)
		q.Finish(taken)
		want(1*time.Second, true)
		q.Remove(func(v string) bool { return v == "b2" || v == "4" })
		want(1*time.Second, true)
		for range 3 {
			taken = append(taken[:0], q.Take(t.Context(), 1)...)
			taken[0].Keep, taken[0].Delay = true, time.Minute
			q.Finish(taken)
		}
		want(1*time.Second, true)
		q.Remove(func(v string) bool { return v == "a1" })
		want(3*time.Second, true) // b2 is gone.
		q.Close()
		want(0, false)
	})
}
