package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// settler settles in a ledger, as an epoch does.
type settler struct{}

func (settler) Ack(_ context.Context, d *broker.Delivery) error {
	e := d.Tag.(*entry)
	return e.outside.ack(e)
}

func (settler) Nack(_ context.Context, d *broker.Delivery, delay time.Duration) error {
	e := d.Tag.(*entry)
	return e.outside.nack(e, delay)
}

func newTestLedger(cfg Config) *ledger {
	c := cfg.withDefaults()
	var offsets *progress
	if c.Stream != nil {
		offsets = newProgress()
		offsets.begin(1)
	}
	return newLedger(settler{}, c, offsets, func() {}, func() {})
}

func push(l *ledger, tag uint64, lane string) {
	l.add(&entry{
		message: &broker.Message{ID: fmt.Sprint(tag), Position: broker.At(int64(tag) + 99)},
		lane:    lane, epoch: 1, tag: tag, pushed: time.Now(),
	})
}

func tags(deliveries []*broker.Delivery) []uint64 {
	var numbers []uint64
	for _, d := range deliveries {
		numbers = append(numbers, d.Tag.(*entry).tag)
	}
	return numbers
}

// theBroker is what the broker knows of a channel: the numbers that it waits for.
type theBroker struct {
	t       *testing.T
	unacked []uint64
	acked   map[uint64]bool
	back    []uint64 // requeued, in order
}

func (b *theBroker) take(number uint64) {
	i := slices.Index(b.unacked, number)
	if i < 0 {
		b.t.Fatalf("the broker was told of %d, which it does not wait for: it closes the channel", number)
	}
	b.unacked = slices.Delete(b.unacked, i, i+1)
}

func (b *theBroker) hear(s settlements) {
	for _, number := range s.requeue {
		b.take(number)
		b.back = append(b.back, number)
	}
	if s.upTo > 0 {
		if !slices.Contains(b.unacked, s.upTo) {
			b.t.Fatalf("the broker was told of %d, which it does not wait for: it closes the channel", s.upTo)
		}
		for len(b.unacked) > 0 && b.unacked[0] <= s.upTo {
			b.acked[b.unacked[0]] = true
			b.unacked = b.unacked[1:]
		}
	}
	for _, number := range s.acks {
		b.take(number)
		b.acked[number] = true
	}
}

// Whatever is acked and given back in whatever order: the broker is told of each
// message what became of it, once, and of no other.
func TestLedgerTellsTheBrokerTheTruth(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		random := rand.New(rand.NewPCG(seed, 7))
		l := newTestLedger(Config{})
		b := &theBroker{t: t, acked: map[uint64]bool{}}
		want := map[uint64]bool{}
		var out []*broker.Delivery
		next := uint64(1)
		for range 200 {
			switch random.IntN(6) {
			case 0, 1:
				push(l, next, "")
				b.unacked = append(b.unacked, next)
				next++
			case 2:
				ds, _ := l.take(1 + random.IntN(4))
				out = append(out, ds...)
			case 3, 4:
				if len(out) > 0 {
					i := random.IntN(len(out))
					d := out[i]
					out = slices.Delete(out, i, i+1)
					if random.IntN(4) == 0 {
						if err := d.Nack(t.Context(), 0); err != nil {
							t.Fatal(err)
						}
						continue
					}
					if err := d.Ack(t.Context()); err != nil {
						t.Fatal(err)
					}
					want[d.Tag.(*entry).tag] = true
				}
			case 5:
				if random.IntN(10) == 0 { // everything looks old
					for _, o := range l.tags.open() {
						if o.entry != nil {
							o.entry.pushed = o.entry.pushed.Add(-l.limit)
						}
					}
					l.giveBack(time.Now())
				}
				b.hear(l.settlements())
			}
		}
		b.hear(l.settlements())
		for number := range b.acked {
			if !want[number] {
				t.Fatalf("seed %d: %d was acked at the broker and by nobody", seed, number)
			}
		}
		for number := range want {
			if !b.acked[number] {
				t.Fatalf("seed %d: the broker never got the ack of %d", seed, number)
			}
		}
	}
}

func TestLedgerAcksTogetherOnlyWhatIsDoneBefore(t *testing.T) {
	t.Parallel()
	l := newTestLedger(Config{})
	for tag := range uint64(6) {
		push(l, tag+1, "")
	}
	ds, _ := l.take(10)
	for _, i := range []int{0, 1, 2, 4} {
		if err := ds[i].Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if s := l.settlements(); s.upTo != 3 || !slices.Equal(s.acks, []uint64{5}) || s.count != 4 {
		t.Errorf("settlements %+v, want up to 3, and 5 alone", s)
	}
	if err := ds[3].Ack(t.Context()); err != nil {
		t.Fatal(err)
	}
	if s := l.settlements(); s.upTo != 4 || len(s.acks) > 0 {
		t.Errorf("settlements %+v, want 4, as 5 was told before", s)
	}
}

// A number that was never seen is not spoken for.
func TestLedgerAcksNothingUnseen(t *testing.T) {
	t.Parallel()
	l := newTestLedger(Config{})
	push(l, 1, "")
	push(l, 3, "")
	ds, _ := l.take(10)
	for _, d := range ds {
		if err := d.Ack(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if s := l.settlements(); s.upTo != 1 || !slices.Equal(s.acks, []uint64{3}) {
		t.Errorf("settlements %+v, want 1 and 3 without 2", s)
	}
}

func TestLedgerNackDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newTestLedger(Config{AckTimeout: time.Minute})
		push(l, 1, "")
		push(l, 2, "")
		ds, _ := l.take(2)
		_ = ds[0].Nack(t.Context(), 10*time.Second)
		_ = ds[1].Nack(t.Context(), time.Hour)
		got, due := l.take(5)
		if len(got) > 0 || time.Until(due) != 10*time.Second {
			t.Errorf("took %v, next in %v; want nothing, and 10 s", tags(got), time.Until(due))
		}
		<-time.After(10 * time.Second)
		if got, _ := l.take(5); !slices.Equal(tags(got), []uint64{1}) {
			t.Errorf("after 10 s: took %v, want 1", tags(got))
		}
		// An hour is too long for the broker: half of the ack timeout is the bound.
		<-time.After(20 * time.Second)
		if got, _ := l.take(5); !slices.Equal(tags(got), []uint64{2}) {
			t.Errorf("after 30 s: took %v, want 2", tags(got))
		}
	})
}

// Whatever is acked, given back and delayed: a message goes out only while nothing
// later of its lane is out, and not before what came before it was out and is done or
// still out.
func TestLedgerKeepsTheOrderOfLanes(t *testing.T) {
	t.Parallel()
	for seed := range uint64(300) {
		synctest.Test(t, func(t *testing.T) { keepsTheOrder(t, seed) })
	}
}

func keepsTheOrder(t *testing.T, seed uint64) {
	random := rand.New(rand.NewPCG(seed, 3))
	l := newTestLedger(Config{Lanes: LaneByRoutingKey})
	out := map[uint64]*broker.Delivery{}
	open := map[string][]uint64{} // pushed and not done
	next := uint64(1)
	check := func(d *broker.Delivery) {
		tag := d.Tag.(*entry).tag
		for _, other := range open[d.Lane] {
			_, isOut := out[other]
			if other > tag && isOut {
				t.Fatalf("seed %d: %d was handed out while %d is out", seed, tag, other)
			}
			if other < tag && !isOut {
				t.Fatalf("seed %d: %d was handed out while %d waits", seed, tag, other)
			}
		}
	}
	for range 300 {
		switch random.IntN(5) {
		case 0:
			lane := []string{"a", "b"}[random.IntN(2)]
			push(l, next, lane)
			open[lane] = append(open[lane], next)
			next++
		case 1, 2:
			ds, _ := l.take(1 + random.IntN(3))
			for _, d := range ds {
				check(d)
				out[d.Tag.(*entry).tag] = d
			}
		case 3:
			for tag, d := range out {
				delete(out, tag)
				if random.IntN(2) == 0 {
					_ = d.Ack(t.Context())
					open[d.Lane] = slices.DeleteFunc(open[d.Lane], func(n uint64) bool { return n == tag })
				} else {
					_ = d.Nack(t.Context(), time.Duration(random.IntN(3))*time.Second)
				}
				break
			}
		case 4:
			<-time.After(time.Duration(random.IntN(3)) * time.Second)
		}
	}
	for _, d := range out {
		_ = d.Ack(t.Context())
	}
	for l.stats().waiting > 0 {
		ds, _ := l.take(10)
		for _, d := range ds {
			_ = d.Ack(t.Context())
		}
		<-time.After(time.Second)
	}
	if left := l.tags.open(); len(left) > 0 {
		t.Fatalf("seed %d: %d are left", seed, len(left))
	}
}

func TestLedgerAges(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newTestLedger(Config{AckTimeout: time.Minute})
		push(l, 1, "") // will be out and old
		push(l, 2, "") // will wait and be old
		old, _ := l.take(1)
		<-time.After(10 * time.Second)
		push(l, 3, "") // will wait and be not young any more
		<-time.After(10 * time.Second)
		push(l, 4, "") // will be out and young
		push(l, 5, "") // will wait and be young
		<-time.After(10*time.Second - time.Nanosecond)
		if l.aged(time.Now()) {
			t.Error("aged before half of the ack timeout")
		}
		_ = old[0].Nack(t.Context(), 0)
		old, _ = l.take(1)
		waiting, _ := l.take(2) // 2 and 3
		for _, d := range waiting {
			_ = d.Nack(t.Context(), time.Hour)
		}
		young, _ := l.take(1) // 4
		<-time.After(time.Nanosecond)
		if !l.aged(time.Now()) {
			t.Fatal("not aged after half of the ack timeout")
		}
		recalled, returned := l.giveBack(time.Now())
		if recalled != 1 || returned != 2 {
			t.Errorf("recalled %d and returned %d, want 1 and 2", recalled, returned)
		}
		if s := l.settlements(); !slices.Equal(s.requeue, []uint64{2, 3}) {
			t.Errorf("settlements %+v, want 2 and 3 to be put back", s)
		}
		if !old[0].Recalled() || !young[0].Recalled() || l.aged(time.Now()) {
			t.Error("want both recalled, once")
		}
		_ = old[0].Nack(t.Context(), 0)
		_ = young[0].Nack(t.Context(), 0)
		if n := [2]int{l.tookBack(), l.tookBack()}; n != [2]int{1, 0} {
			t.Errorf("took back %v, want the old one, once", n)
		}
		if s := l.settlements(); !slices.Equal(s.requeue, []uint64{1}) {
			t.Errorf("settlements %+v, want the old one to be put back and the young one not", s)
		}
		got, _ := l.take(5)
		if !slices.Equal(tags(got), []uint64{4, 5}) || got[0].Recalled() {
			t.Errorf("took %v, recalled %v; want 4 and 5, not recalled", tags(got), got[0].Recalled())
		}
	})
}

func TestLedgerGivesBackWhilePaused(t *testing.T) {
	t.Parallel()
	l := newTestLedger(Config{})
	push(l, 1, "")
	push(l, 2, "")
	out, _ := l.take(1)
	l.pause(true)
	push(l, 3, "")
	if _, returned := l.giveBack(time.Now()); returned != 1 {
		t.Errorf("returned %d, want the one that waits", returned)
	}
	_ = out[0].Nack(t.Context(), 0)
	if n := l.tookBack(); n != 0 {
		t.Errorf("took back %d, want 0: a pause does not say that too many are fetched", n)
	}
	if s := l.settlements(); !slices.Equal(s.requeue, []uint64{1, 2, 3}) {
		t.Errorf("settlements %+v, want all to be put back", s)
	}
}

func TestLedgerDrains(t *testing.T) {
	t.Parallel()
	l := newTestLedger(Config{Lanes: LaneQueue})
	for tag := range uint64(4) {
		push(l, tag+1, "q")
	}
	ds, _ := l.take(3)
	drained := l.drain()
	if got, _ := l.take(5); len(got) > 0 || !ds[0].Recalled() {
		t.Error("want nothing handed out while it drains, and what is out recalled")
	}
	_ = ds[0].Ack(t.Context())
	_ = ds[1].Nack(t.Context(), 0)
	select {
	case <-drained:
		t.Error("drained while one is out")
	default:
	}
	_ = ds[2].Nack(t.Context(), 0)
	<-drained
	if s := l.settlements(); s.upTo != 1 || len(s.requeue) > 0 {
		t.Errorf("settlements %+v, want the ack alone: the end of the channel gives back in order", s)
	}
	if lost := l.end(); lost != 0 {
		t.Errorf("lost %d", lost)
	}
}

func TestLedgerEnd(t *testing.T) {
	t.Parallel()
	l := newTestLedger(Config{})
	for tag := range uint64(3) {
		push(l, tag+1, "")
	}
	ds, _ := l.take(2)
	_ = ds[0].Ack(t.Context())
	if lost := l.end(); lost != 1 || l.end() != 0 {
		t.Errorf("lost %d, want 1, once", lost)
	}
	if ds[1].Context().Err() == nil {
		t.Error("the context of a lost delivery goes on")
	}
	e := ds[1].Tag.(*entry)
	if err := l.ack(e); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack of a lost delivery: %v", err)
	}
	if err := l.nack(e, 0); !errors.Is(err, broker.ErrLost) {
		t.Errorf("nack of a lost delivery: %v", err)
	}
	push(l, 4, "")
	if got, _ := l.take(5); len(got) > 0 {
		t.Errorf("took %v after the end", tags(got))
	}
	if s := l.settlements(); s.upTo != 1 {
		t.Errorf("settlements %+v, want what was settled before", s)
	}
}

func TestLedgerCountsAttempts(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ broker, first, second int }{{0, 0, 0}, {1, 1, 2}, {3, 3, 4}} {
		l := newTestLedger(Config{})
		l.add(&entry{message: &broker.Message{}, tag: 1, attempt: row.broker, pushed: time.Now()})
		ds, _ := l.take(1)
		_ = ds[0].Nack(t.Context(), 0)
		again, _ := l.take(1)
		if ds[0].Attempt != row.first || again[0].Attempt != row.second {
			t.Errorf("broker says %d: attempts %d, %d; want %d, %d", row.broker, ds[0].Attempt, again[0].Attempt, row.first, row.second)
		}
	}
}

// A stream's position never passes what is not acked, and what was acked before a
// new channel does not come again.
func TestLedgerOfAStream(t *testing.T) {
	t.Parallel()
	l := newTestLedger(Config{Stream: &Stream{}})
	for tag := range uint64(5) {
		push(l, tag+1, "") // offsets 100 to 104
	}
	ds, _ := l.take(5)
	for _, step := range []struct {
		ack  int
		want int64
	}{{1, 100}, {0, 102}, {4, 102}, {2, 103}} {
		_ = ds[step.ack].Ack(t.Context())
		if got := l.offsets.position(); got != step.want {
			t.Errorf("position %d after the ack of %d, want %d", got, 100+step.ack, step.want)
		}
	}
	if from := l.offsets.begin(2); from != 103 {
		t.Errorf("the next channel begins at %d, want 103", from)
	}
	_ = ds[3].Ack(t.Context()) // of the channel before
	next := newLedger(settler{}, (&Config{}).withDefaults(), l.offsets, func() {}, func() {})
	for tag := range uint64(5) { // the whole chunk
		next.add(&entry{message: &broker.Message{Position: broker.At(int64(tag) + 100)}, epoch: 2, tag: tag + 1, pushed: time.Now()})
	}
	if s := next.settlements(); s.upTo != 3 {
		t.Errorf("settlements %+v, want the three that were done", s)
	}
	got, _ := next.take(5)
	if !slices.Equal(tags(got), []uint64{4, 5}) {
		t.Errorf("took %v, want the two that were not done", tags(got))
	}
	next.offsets.done(ds[3].Tag.(*entry)) // of the channel before, again
	if position := next.offsets.position(); position != 103 {
		t.Errorf("position %d, want 103: what a channel before says does not count", position)
	}
}
