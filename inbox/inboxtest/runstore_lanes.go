package inboxtest

import (
	"fmt"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// The rules about the order of lanes while messages are parked.
func laneRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "lane held by a parked message", levels: true, run: laneHeld[Tx]},
		{name: "lane full", run: laneFull[Tx]},
		{name: "lane and dead letters", run: laneAndDead[Tx]},
		{name: "lane of fed messages", run: laneOfFed[Tx]},
		{name: "lane in order", run: laneInOrder[Tx]},
		{name: "lane blocked while it is fed", run: laneBlockedFeeding[Tx]},
		{name: "lane without order", run: laneWithoutOrder[Tx]},
		{name: "many lanes", run: manyLanes[Tx]},
	}
}

// inLane is the claim of a live message of a lane.
func inLane(key, lane string) inbox.Claim {
	c := claim(key)
	c.Lane = lane
	return c
}

// wantHeld wants an entry that is claimed and has to wait.
func (s *storeSuite[Tx]) wantHeld(b inbox.Batch[Tx], i int, full bool) {
	s.Helper()
	s.want(b, i, inbox.FirstAttempt)
	if e := b.Entries()[i]; !e.Held || e.Full != full || e.Gone {
		s.Errorf("entry %d: held %v, full %v, gone %v; want it held, full %v", i, e.Held, e.Full, e.Gone, full)
	}
}

// try begins with a live message of a lane, gives it up, and returns the entry.
func (s *storeSuite[Tx]) try(o inbox.BeginOptions, key, lane string) inbox.Entry {
	s.Helper()
	b := s.beginWith(o, inLane(key, lane))
	defer b.Abort()
	s.want(b, 0, inbox.FirstAttempt)
	return b.Entries()[0]
}

// wantLane wants the lane to be held, or not, for a live message.
func (s *storeSuite[Tx]) wantLane(o inbox.BeginOptions, lane string, held bool) {
	s.Helper()
	if e := s.try(o, "probe of "+lane, lane); e.Held != held || e.Full || e.Gone {
		s.Errorf("lane %q: held %v, full %v, gone %v; want held %v", lane, e.Held, e.Full, e.Gone, held)
	}
}

// 66. A live message behind a parked one of its lane is claimed and Held, whether
// the parked one waits for its time, for another one, or is leased; other lanes,
// other consumers, and messages without a lane are free. Parked as waiting, its
// duplicates attach to it. When the last parked one is gone the lane is free.
//
// case D13
func laneHeld[Tx any](s *storeSuite[Tx]) {
	s.parker()
	other := retry("k1", "l2", 0)
	other.Consumer = "shipping"
	s.fill(retry("k1", "l1", time.Hour), other, retry("none", "", 0))
	b := s.beginWith(keeping(), inLane("k0", ""), inLane("k2", "l1"), inLane("k3", "l2"), inLane("k1", "l1"), inLane("k4", "l1"), inLane("k5", "L1"))
	s.wantFree(b, 0)
	s.wantHeld(b, 1, false)
	s.wantFree(b, 2)
	s.want(b, 3, inbox.WasParked)
	s.wantHeld(b, 4, false)
	s.wantFree(b, 5)
	for _, i := range []int{0, 2, 5} {
		s.work(b, i, fmt.Sprint("k", map[int]int{0: 0, 2: 3, 5: 5}[i]), nil)
	}
	for i, k := range map[int]string{1: "k2", 4: "k4"} {
		if err := b.Park(s.ctx, i, waits(k, "l1")); err != nil {
			s.Fatal(err)
		}
	}
	s.commit(b)
	s.wantParked(5)
	s.wantRow(claim("k2").Key, false)
	s.wantRow(claim("k3").Key, true)
	// A single one takes another way through a store.
	single := s.beginWith(keeping(), inLane("k2", "l1"))
	s.want(single, 0, inbox.WasParked)
	s.commit(single)
	single = s.beginWith(keeping(), inLane("k6", "l1"))
	s.wantHeld(single, 0, false)
	s.commit(single) // Not parked: its claim is given up.
	s.wantRow(claim("k6").Key, false)
	s.wantLane(options(), "l1", false)
	if n, err := s.undertaker().RetryParked(s.ctx, []int64{s.row("k1").ID}); err != nil || n != 1 {
		s.Fatalf("RetryParked: %d, %v", n, err)
	}
	rows := s.leaseWith(request()).Rows
	s.wantLane(keeping(), "l1", true) // Leased is parked, too.
	for _, r := range rows {
		s.finishFed(r)
	}
	s.wantLane(keeping(), "l1", false)
	// A key that was done before is a replay, whatever its lane does.
	s.fill(retry("k7", "l1", time.Hour))
	b = s.beginWith(keeping(), inLane("k3", "l1"), inLane("k8", "l1"))
	s.want(b, 0, inbox.Replay)
	if b.Entries()[0].Held {
		s.Error("a replay is held")
	}
	s.wantHeld(b, 1, false)
}

// 67. A lane is Full when as many messages wait in it, or as many bytes of bodies,
// as may; those of the batch before an entry count. Zero is no bound.
func laneFull[Tx any](s *storeSuite[Tx]) {
	s.parker()
	s.fill(retry("head", "l1", time.Hour), dead("dead", "l1"))
	o := keeping()
	full := func(rows int, bytes int64) bool {
		s.Helper()
		o.Order.MaxWaiting, o.Order.MaxWaitingBytes = rows, bytes
		e := s.try(o, "probe", "l1")
		if !e.Held {
			s.Error("the lane is not held")
		}
		return e.Full
	}
	if full(1, 1) {
		s.Error("nothing waits, and the lane is full: the failed one does not count")
	}
	s.fill(waits("w1", "l1"), waits("w2", "l1"), waits("w3", "l2")) // Bodies of 10 bytes.
	for _, c := range []struct {
		rows  int
		bytes int64
		want  bool
	}{
		{0, 0, false}, {3, 0, false}, {2, 0, true}, {1, 0, true}, {0, 21, false}, {0, 20, true}, {0, 1, true}, {3, 20, true}, {2, 21, true}, {3, 21, false},
	} {
		if got := full(c.rows, c.bytes); got != c.want {
			s.Errorf("2 rows and 20 bytes wait, at most %d and %d may: full %v, want %v", c.rows, c.bytes, got, c.want)
		}
	}
	o.Order.MaxWaiting, o.Order.MaxWaitingBytes = 4, 0
	b := s.beginWith(o, inLane("a", "l1"), inLane("b", "l1"), inLane("w1", "l1"), inLane("c", "l1"), inLane("d", "l2"))
	s.wantHeld(b, 0, false)
	s.wantHeld(b, 1, false)
	s.want(b, 2, inbox.WasParked)
	s.wantHeld(b, 3, true)
	s.wantHeld(b, 4, false)
	b.Abort()
	o.Order.Keep = false
	if e := s.try(o, "probe", "l1"); e.Held || e.Full {
		s.Errorf("without Keep: %+v", e)
	}
}

// 68. A dead letter holds its lane only with BlockedByDead, a discarded message
// never.
func laneAndDead[Tx any](s *storeSuite[Tx]) {
	u := s.undertaker()
	s.fill(dead("k1", "l1"), dead("k2", "l2"), dead("none", ""))
	blocked := keeping()
	blocked.Order.BlockedByDead = true
	s.wantLane(keeping(), "l1", false)
	s.wantLane(blocked, "l1", true)
	s.wantLane(blocked, "l3", false)
	s.wantLane(blocked, "", false)
	without := blocked
	without.Order.Keep = false
	s.wantLane(without, "l1", false)
	if n, err := u.DiscardParked(s.ctx, []int64{s.row("k1").ID}, "given up"); err != nil || n != 1 {
		s.Fatalf("DiscardParked: %d, %v", n, err)
	}
	s.wantLane(blocked, "l1", false)
	s.wantLane(keeping(), "l1", false)
	s.wantLane(blocked, "l2", true)
	// Both kinds: the dead one does not hide the other.
	s.fill(retry("k3", "l2", time.Hour))
	s.wantLane(keeping(), "l2", true)
	s.wantLane(blocked, "l2", true)
}

// 69. For a fed message those of its lane with a lower id are earlier, unless they
// are in the same batch by their leases; later ones do not hold it. A live message
// is held by all.
func laneOfFed[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("k1", "l1", 0), waits("k2", "l1"), waits("k3", "l1"), retry("m1", "l2", 0))
	rows := s.lease("k1", "k2", "k3", "m1")
	b := s.feed(rows[0])
	s.wantFree(b, 0)
	b.Abort()
	b = s.feed(rows[1], rows[3])
	s.wantHeld(b, 0, false)
	s.wantFree(b, 1)
	b.Abort()
	b = s.feed(rows[0], rows[2])
	s.wantFree(b, 0)
	s.wantHeld(b, 1, false) // The second one is in nobody's batch.
	b.Abort()
	b = s.beginWith(keeping(), fed(rows[0]), inLane("live", "l1"), fed(rows[1]), fed(rows[2]))
	s.wantFree(b, 0)
	s.wantHeld(b, 1, false)
	s.wantFree(b, 2)
	s.wantFree(b, 3)
	b.Abort()
	stale := rows[0]
	stale.Lease.Token--
	b = s.feed(stale, rows[1])
	s.wantGone(b, 0)
	s.wantHeld(b, 1, false) // Somebody else has the first one.
	b.Abort()
	o := keeping()
	o.Order.Keep = false
	b = s.beginWith(o, fed(rows[2]))
	s.wantFree(b, 0)
	b.Abort()
	s.finishFed(rows[0], rows[1])
	s.finishFed(rows[2])
	// A dead letter before it holds it when they block.
	s.fill(dead("d1", "l3"), waits("d2", "l3"), dead("d3", "l3"))
	r := s.lease("d2")[0]
	b = s.feed(r)
	s.wantFree(b, 0)
	b.Abort()
	o = keeping()
	o.Order.BlockedByDead = true
	b = s.beginWith(o, fed(r))
	s.wantHeld(b, 0, false)
}

// 70. Of a lane rows come in the order of their ids, from the first that is not
// dead or discarded on, and none behind one that is leased or has its time to
// come. Rows without a lane have nothing to do with one another.
func laneInOrder[Tx any](s *storeSuite[Tx]) {
	p := s.parker()
	s.fill(
		dead("a0", "a"), retry("a1", "a", 0), waits("a2", "a"), waits("a3", "a"), retry("a4", "a", time.Hour), waits("a5", "a"),
		retry("b1", "b", time.Hour), waits("b2", "b"),
		waits("c1", "c"), dead("c2", "c"), waits("c3", "c"),
		retry("n1", "", 0), retry("n2", "", time.Hour), retry("n3", "", 0),
	)
	r := request()
	r.Order.BlockedByDead = true
	blocked := s.leaseWith(r)
	s.wantLeased(blocked.Rows, "c1", "n1", "n3")
	for _, row := range blocked.Rows {
		if err := p.Release(s.ctx, []inbox.Lease{row.Lease}); err != nil {
			s.Fatal(err)
		}
	}
	got := s.leaseWith(request())
	rows := s.wantLeased(got.Rows, "a1", "a2", "a3", "c1", "c3", "n1", "n3")
	if got.Next < 59*time.Minute || got.Next > time.Hour {
		s.Errorf("the next is due in %v, want 1h", got.Next)
	}
	// The head is leased: nothing of its lane comes, and it goes on where it was.
	if err := p.Release(s.ctx, []inbox.Lease{rows[1].Lease, rows[2].Lease}); err != nil {
		s.Fatal(err)
	}
	s.lease()
	s.finishFed(rows[0])
	rows = s.lease("a2", "a3")
	// A message in the middle fails: those behind it wait.
	b := s.feed(rows...)
	again := retry("a2", "a", time.Hour)
	again.Lease = rows[0].Lease
	s.start(b, 0)
	if err := b.Finish(s.ctx, 0, false, nil); err != nil {
		s.Fatal(err)
	}
	if err := b.Park(s.ctx, 0, again); err != nil {
		s.Fatal(err)
	}
	s.commit(b)
	if err := p.Release(s.ctx, []inbox.Lease{rows[1].Lease}); err != nil {
		s.Fatal(err)
	}
	s.lease()
	// A limit takes a lane's first ones.
	if n, err := s.undertaker().RetryParked(s.ctx, []int64{rows[0].ID, s.row("a4").ID}); err != nil || n != 2 {
		s.Fatalf("RetryParked: %d, %v", n, err)
	}
	r = request()
	r.Limit = 2
	rows = s.wantLeased(s.leaseWith(r).Rows, "a2", "a3")
	s.lease()
	s.finishFed(rows...)
	s.finishFed(s.lease("a4", "a5")...)
}

// 71. With BlockedByDead nothing behind a dead letter comes until a person has
// retried or discarded it.
func laneBlockedFeeding[Tx any](s *storeSuite[Tx]) {
	u := s.undertaker()
	s.fill(dead("a1", "a"), waits("a2", "a"), dead("b1", "b"), waits("b2", "b"), dead("n1", ""))
	r := request()
	r.Order.BlockedByDead = true
	lease := func(keys ...string) []inbox.ParkedRecord {
		s.Helper()
		return s.wantLeased(s.leaseWith(r).Rows, keys...)
	}
	lease()
	if n, err := u.RetryParked(s.ctx, []int64{s.row("a1").ID}); err != nil || n != 1 {
		s.Fatalf("RetryParked: %d, %v", n, err)
	}
	if n, err := u.DiscardParked(s.ctx, []int64{s.row("b1").ID}, ""); err != nil || n != 1 {
		s.Fatalf("DiscardParked: %d, %v", n, err)
	}
	rows := lease("a1", "a2", "b2")
	o := keeping()
	o.Order.BlockedByDead = true
	b := s.beginWith(o, fed(rows[0]), fed(rows[1]), fed(rows[2]))
	for i, k := range []string{"a1", "a2", "b2"} {
		s.wantFree(b, i)
		s.work(b, i, k, nil)
	}
	s.commit(b)
	s.wantParked(2)
}

// 72. Without Keep lanes count for nothing: all that is due comes, and all that
// waits.
func laneWithoutOrder[Tx any](s *storeSuite[Tx]) {
	s.fill(retry("a1", "a", time.Hour), waits("a2", "a"), retry("a3", "a", 0), dead("a4", "a"), retry("n1", "", 0), retry("n2", "", 2*time.Hour))
	r := request()
	r.Order = inbox.Order{BlockedByDead: true}
	got := s.leaseWith(r)
	s.wantLeased(got.Rows, "a2", "a3", "n1")
	if got.Next < 59*time.Minute || got.Next > time.Hour {
		s.Errorf("the next is due in %v, want 1h", got.Next)
	}
	s.wantLane(options(), "a", false)
}

// 73. Every lane gets its turn, however small the limit: rows that come back at
// once into the lanes that were served do not hold up the others.
func manyLanes[Tx any](s *storeSuite[Tx]) {
	const n = 12
	var all []inbox.Parked
	for i := range n {
		all = append(all, retry(fmt.Sprintf("k%02d", i), fmt.Sprintf("l%02d", i), 0))
	}
	for i := range 3 {
		all = append(all, retry(fmt.Sprint("n", i), "", 0))
	}
	s.fill(all...)
	r := request()
	r.Limit = 2
	seen := map[string]bool{}
	for round := 0; len(seen) < n+3; round++ {
		if round == 20*n {
			s.Fatalf("after %d rounds only %d of %d messages had a turn: %v", round, len(seen), n+3, seen)
		}
		for _, row := range s.leaseWith(r).Rows {
			seen[row.MessageKey] = true
			b := s.feed(row)
			again := retry("", "", 0)
			again.Lease = row.Lease
			if err := b.Park(s.ctx, 0, again); err != nil {
				s.Fatal(err)
			}
			s.commit(b)
		}
	}
}
