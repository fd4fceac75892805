package kafka

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// desk is a ledger without a broker.
type desk struct {
	t *testing.T
	*ledger
	kicks, wakes int
	stale        []int64
}

func newDesk(t *testing.T, cfg Config, partitions int) *desk {
	t.Helper()
	d := &desk{t: t}
	d.ledger = newLedger(&cfg, func() { d.wakes++ }, func() { d.kicks++ }, func(r *record) {
		d.stale = append(d.stale, r.message.Position.Offset)
	})
	for i := range partitions {
		d.begin(d.assign(topicPartition{"orders", int32(i)}), 0, -1, "")
	}
	return d
}

// fetch adds records with the given keys ("" for none), from the next offset on.
func (d *desk) fetch(partition int, keys ...string) {
	d.t.Helper()
	p := d.partitions[partition]
	next := p.tracker.next
	var records []*record
	for _, k := range keys {
		r := &wire.Record{Offset: next, Value: []byte("v")}
		if k != "" {
			r.Key = []byte(k)
		}
		records = append(records, p.newRecord(r))
		next++
	}
	d.add(p, records, next, next)
}

// offers takes everything there is and returns the ids.
func (d *desk) offers(limit int) []*broker.Delivery {
	d.t.Helper()
	ds, _ := d.take(limit)
	return ds
}

func ids(ds []*broker.Delivery) []string {
	var s []string
	for _, d := range ds {
		s = append(s, d.Message.ID)
	}
	return s
}

func (d *desk) expect(ds []*broker.Delivery, want ...string) {
	d.t.Helper()
	if got := ids(ds); !slices.Equal(got, want) {
		d.t.Fatalf("got %v, want %v", got, want)
	}
}

func (d *desk) settle(err error) {
	d.t.Helper()
	if err != nil {
		d.t.Fatal(err)
	}
}

// committable returns what would be committed, by partition.
func (d *desk) committable() map[string]int64 {
	m := make(map[string]int64)
	for _, it := range d.uncommitted() {
		m[it.part.topicPartition.String()] = it.offset
	}
	return m
}

func TestLedgerTakesByTurns(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 3)
	d.fetch(0, "a", "b", "c")
	d.fetch(2, "d")
	d.expect(d.offers(3), "orders/0/0", "orders/2/0", "orders/0/1")
	d.expect(d.offers(3), "orders/0/2")
	if ds, due := d.take(1); ds != nil || !due.IsZero() {
		t.Errorf("got %v and %v, want nothing", ids(ds), due)
	}
}

// case K1
func TestLedgerCommitsContiguously(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{CommitCount: 2}, 1)
	if got := d.committable()["orders/0"]; got != 0 || d.kicks != 1 {
		t.Errorf("the first position is not up for commit: %d, %d kicks", got, d.kicks)
	}
	d.fetch(0, "a", "b", "c", "d")
	ds := d.offers(10)
	d.settle(ds[1].Ack(t.Context()))
	d.settle(ds[3].Ack(t.Context()))
	if d.kicks != 2 {
		t.Errorf("%d kicks after CommitCount acks, want 2", d.kicks)
	}
	if got := d.committable()["orders/0"]; got != 0 {
		t.Errorf("committable is %d while 0 is not done", got)
	}
	d.settle(ds[0].Ack(t.Context()))
	if got := d.committable()["orders/0"]; got != 2 {
		t.Errorf("committable is %d, want 2", got)
	}
	d.settle(ds[2].Ack(t.Context()))
	items := d.uncommitted()
	if len(items) != 1 || items[0].offset != 4 {
		t.Fatalf("got %+v, want offset 4", items)
	}
	items[0].err = errors.New("refused")
	d.wasCommitted(items)
	if got := d.committable()["orders/0"]; got != 4 {
		t.Error("an offset that was refused counts as committed")
	}
	items[0].err = nil
	d.wasCommitted(items)
	if len(d.uncommitted()) != 0 {
		t.Error("a committed offset is up for commit again")
	}
}

// Only marks came: the commit that makes the lag 0 must not wait for a record.
func TestLedgerCommitsMarks(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 1)
	kicks := d.kicks
	d.add(d.partitions[0], nil, 2, 2)
	if got := d.committable()["orders/0"]; got != 2 || d.kicks != kicks+1 {
		t.Errorf("committable is %d with %d kicks, want 2 and %d", got, d.kicks, kicks+1)
	}
	d.add(d.partitions[0], nil, 2, 2)
	if d.kicks != kicks+1 {
		t.Error("a fetch that brings nothing asks for a commit")
	}
}

func TestLedgerNack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, Config{}, 1)
		d.fetch(0, "a", "b", "a", "b")
		ds := d.offers(3) // a b a
		d.settle(ds[2].Nack(t.Context(), 0))
		d.expect(d.offers(1), "orders/0/2") // while 0, before it, is out
		// The next record of the lane stays behind those that are given back, and
		// lane b is not held up.
		d.fetch(0, "a")
		d.settle(ds[0].Nack(t.Context(), time.Minute))
		d.expect(d.offers(10), "orders/0/3")
		if ds, due := d.take(1); ds != nil || !due.IsZero() {
			t.Errorf("got %v, due %v, while a later record of the lane is out", ids(ds), due)
		}
	})
}

func TestLedgerNackDelay(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		d := newDesk(t, Config{}, 1)
		d.fetch(0, "a", "a", "a", "b")
		ds := d.offers(3)
		wakes := d.wakes
		d.settle(ds[2].Nack(t.Context(), 0))
		d.settle(ds[1].Nack(t.Context(), 0))
		d.settle(ds[0].Nack(t.Context(), time.Minute)) // holds up the others
		if d.wakes == wakes {
			t.Error("Receive is not woken")
		}
		d.expect(d.offers(10), "orders/0/3")
		if _, due := d.take(1); !due.Equal(time.Now().Add(time.Minute)) {
			t.Errorf("due at %v, want in a minute", due)
		}
		if got := d.committable()["orders/0"]; got != 0 {
			t.Errorf("committable is %d, want 0", got)
		}
		<-time.After(time.Minute - 1)
		d.expect(d.offers(10))
		<-time.After(time.Nanosecond)
		again := d.offers(10)
		d.expect(again, "orders/0/0", "orders/0/1", "orders/0/2")
		for _, x := range again {
			d.settle(x.Ack(t.Context()))
		}
		if got := d.committable()["orders/0"]; got != 3 {
			t.Errorf("committable is %d, want 3", got)
		}
		if len(d.partitions[0].lanes) != 1 { // b is out
			t.Errorf("%d lanes are kept, want 1", len(d.partitions[0].lanes))
		}
	})
}

func TestLedgerMaxAhead(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{MaxAhead: 3}, 1)
	d.fetch(0, "a", "b", "c", "d", "e")
	ds := d.offers(10)
	d.expect(ds, "orders/0/0", "orders/0/1", "orders/0/2")
	if _, _, ok := d.position(d.partitions[0], 1<<20, 1); ok {
		t.Error("there is room beyond MaxAhead")
	}
	d.settle(ds[1].Ack(t.Context()))
	d.expect(d.offers(10))
	d.wakes = 0
	d.settle(ds[0].Ack(t.Context()))
	if d.wakes != 1 {
		t.Errorf("who waits for something to take was woken %d times, want once", d.wakes)
	}
	select {
	case <-d.partitions[0].room:
	default:
		t.Error("the fetcher is not told")
	}
	d.expect(d.offers(10), "orders/0/3", "orders/0/4")
	if _, _, ok := d.position(d.partitions[0], 1<<20, 1); ok {
		t.Error("there is room beyond MaxAhead")
	}
}

func TestLedgerRoom(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 1)
	p := d.partitions[0]
	room := func() bool { _, _, ok := d.position(p, 1000, 600); return ok }
	if !room() {
		t.Error("no room when empty")
	}
	d.fetch(0, "a", "a")
	if room() {
		t.Errorf("room for 600 of 1000 with %d", p.bytes)
	}
	ds := d.offers(2)
	if p.bytes != 0 || p.waiting != 0 || !room() {
		t.Errorf("%d bytes, %d records after all were handed out", p.bytes, p.waiting)
	}
	d.settle(ds[0].Nack(t.Context(), time.Hour))
	d.fetch(0, "a")
	if room() {
		t.Error("what is given back takes no room")
	}
	d.drain()
	if p.bytes != 0 || p.waiting != 0 {
		t.Errorf("%d bytes, %d records after draining", p.bytes, p.waiting)
	}
}

func TestLedgerDrain(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 2)
	d.fetch(0, "a", "b", "c", "d")
	d.fetch(1, "x")
	ds := d.offers(4) // 0/0, 1/0, 0/1, 0/2
	d.settle(ds[2].Nack(t.Context(), 0))
	if ds[0].Recalled() {
		t.Error("recalled before draining")
	}
	drained := d.drain()
	if !ds[0].Recalled() || !ds[3].Recalled() || ds[0].Context().Err() != nil {
		t.Error("draining does not ask for what is out, or takes it away")
	}
	d.expect(d.offers(10))
	d.fetch(0, "late")
	d.expect(d.offers(10))
	d.settle(ds[0].Ack(t.Context()))
	d.settle(ds[1].Nack(t.Context(), time.Hour))
	select {
	case <-drained:
		t.Fatal("drained while a delivery is out")
	default:
	}
	d.settle(ds[3].Ack(t.Context()))
	select {
	case <-drained:
	default:
		t.Fatal("not drained with nothing out")
	}
	if d.drain() != drained {
		t.Error("drain is not the same twice")
	}
	got := d.committable()
	if got["orders/0"] != 1 || got["orders/1"] != 0 {
		t.Errorf("committable is %v, want 1 and 0", got)
	}
	if lost := d.end(); lost != 0 {
		t.Errorf("%d lost, want 0", lost)
	}
}

func TestLedgerEnd(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 1)
	d.fetch(0, "a", "b", "c", "d")
	ds := d.offers(4)
	d.settle(ds[0].Ack(t.Context()))
	d.drain()
	if lost := d.end(); lost != 3 {
		t.Errorf("%d lost, want 3", lost)
	}
	for _, x := range ds {
		if x.Context().Err() == nil {
			t.Errorf("the context of %s has not ended", x.Message.ID)
		}
	}
	// Directly too: the delivery may have looked at its context before.
	if err := d.partitions[0].Ack(t.Context(), ds[1]); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack: got %v, want ErrLost", err)
	}
	if err := d.partitions[0].Nack(t.Context(), ds[2], 0); !errors.Is(err, broker.ErrLost) {
		t.Errorf("nack: got %v, want ErrLost", err)
	}
	if err := ds[3].Ack(t.Context()); !errors.Is(err, broker.ErrLost) {
		t.Errorf("ack: got %v, want ErrLost", err)
	}
	if err := ds[0].Ack(t.Context()); !errors.Is(err, broker.ErrSettled) {
		t.Errorf("second ack: got %v, want ErrSettled", err)
	}
	if !slices.Equal(d.stale, []int64{1, 2, 3}) {
		t.Errorf("stale are %v, want 1, 2, 3", d.stale)
	}
	if got := d.committable()["orders/0"]; got != 1 {
		t.Errorf("committable is %d, want 1", got)
	}
	d.begin(d.partitions[0], 0, -1, "")
	d.fetch(0, "x")
	d.expect(d.offers(10))
}

// case K5
func TestLedgerBeginsAnew(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 2)
	p := d.partitions[0]
	d.begin(p, 1000, 1000, "old")
	if _, ok := d.committable()["orders/0"]; ok {
		t.Error("an offset that the group has is committed again")
	}
	d.fetch(0, "a", "a", "b")
	d.fetch(1, "x")
	ds := d.offers(3) // 0/1000, 1/0, 0/1001
	d.settle(ds[2].Nack(t.Context(), 0))
	d.settle(ds[0].Ack(t.Context()))
	stale := d.uncommitted()
	d.begin(p, 0, -1, "new")
	d.wasCommitted(stale)
	if it := d.uncommitted(); len(it) != 1 || it[0].offset != 0 || it[0].run.note != "new" {
		t.Errorf("up for commit is %+v, want offset 0", it)
	}
	d.expect(d.offers(10))
	d.fetch(0, "a")
	d.expect(d.offers(10), "orders/0/0")
	if ds[1].Context().Err() != nil {
		t.Error("a delivery of another partition was lost")
	}
}

// case K4
func TestLedgerSkips(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 1)
	p := d.partitions[0]
	d.begin(p, 100, 100, "")
	d.fetch(0, "a")
	ds := d.offers(1)
	d.skip(p, 500)
	if got := d.committable(); len(got) != 0 {
		t.Errorf("committable is %v while 100 is out", got)
	}
	d.settle(ds[0].Ack(t.Context()))
	if got := d.committable()["orders/0"]; got != 500 {
		t.Errorf("committable is %d, want 500", got)
	}
}

func TestLedgerLanesByPartition(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{Lanes: LaneByPartition}, 1)
	d.fetch(0, "a", "")
	for i, x := range d.offers(2) {
		if x.Lane != "orders/0" {
			t.Errorf("lane %d is %q", i, x.Lane)
		}
	}
	d = newDesk(t, Config{}, 1)
	d.fetch(0, "a", "")
	ds := d.offers(2)
	if ds[0].Lane != "orders/0/a" || ds[1].Lane != "orders/0" {
		t.Errorf("lanes are %q, %q", ds[0].Lane, ds[1].Lane)
	}
}

func TestLedgerStats(t *testing.T) {
	t.Parallel()
	d := newDesk(t, Config{}, 1)
	p := d.assign(topicPartition{"orders", 1})
	d.note(p, errors.New("no leader"), false)
	d.fetch(0, "a", "b", "c")
	d.settle(d.offers(2)[0].Ack(t.Context()))
	st := d.ledger.stats()
	if s := st[0]; s.Lag != 2 || s.Position != 3 || s.End != 3 || s.Waiting != 1 || s.InFlight != 1 || s.Bytes == 0 || s.Committed != -1 {
		t.Errorf("partition 0: %+v", s)
	}
	if s := st[1]; s.Lag != -1 || s.Position != -1 || s.Err == nil {
		t.Errorf("partition 1: %+v", s)
	}
}

func BenchmarkLedger(b *testing.B) {
	for _, keys := range []int{1, 100} {
		b.Run(fmt.Sprintf("keys=%d", keys), func(b *testing.B) {
			l := newLedger(&Config{}, func() {}, func() {}, func(*record) {})
			p := l.assign(topicPartition{"orders", 0})
			l.begin(p, 0, -1, "")
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				r := p.newRecord(&wire.Record{Offset: int64(i), Key: []byte{byte(i % keys)}, Value: []byte("v")})
				l.add(p, []*record{r}, int64(i+1), int64(i+1))
				ds, _ := l.take(1)
				if err := ds[0].Ack(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
