package main

import (
	"slices"
	"testing"
	"time"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		values []float64
		want   float64
	}{
		{nil, 0}, {[]float64{3}, 3}, {[]float64{5, 1}, 3}, {[]float64{9, 1, 2}, 2}, {[]float64{4, 1, 9, 2}, 3},
	} {
		if got := median(row.values); got != row.want {
			t.Errorf("median of %v: %v, want %v", row.values, got, row.want)
		}
	}
}

// The ratio is that of neighbours in time: a machine that is slower in one
// repetition is so for everybody.
func TestRatioIsOfTheSameRepetition(t *testing.T) {
	t.Parallel()
	r := newReport(options{events: minEvents, reps: 3})
	loop, ours := pass{name: "loop", baseline: "loop"}, pass{name: "batch", baseline: "loop"}
	for _, rates := range [][2]float64{{100, 400}, {1000, 4100}, {10, 30}} {
		r.add(ours, figures{PerSecond: rates[1]})
		r.add(loop, figures{PerSecond: rates[0]})
	}
	cs := []chain{{passes: []pass{loop}}, {passes: []pass{ours}}}
	r.conclude(cs)
	if r.Results[0].Name != "loop" {
		t.Errorf("the first result is %s, want the order of the contestants", r.Results[0].Name)
	}
	got := r.result("batch")
	if got.Ratio != 4 || got.Median.PerSecond != 400 || got.Slowest != 30 || got.Fastest != 4100 {
		t.Errorf("result %+v, want ratio 4, median 400, from 30 to 4100", got)
	}
}

// New messages come first, also when a baseline was not run.
func TestOrderOfResults(t *testing.T) {
	t.Parallel()
	r := newReport(options{events: minEvents, reps: 1})
	for _, c := range slices.Backward(chains()) {
		for _, p := range c.passes {
			if p.name != "loop-replay" {
				r.add(p, figures{PerSecond: 1})
			}
		}
	}
	r.conclude(chains())
	var got []string
	for _, of := range r.Results {
		got = append(got, of.Name)
	}
	if !slices.Equal(got, []string{"loop", "single", "batch", "bulk", "bulk500", "batch-replay"}) {
		t.Errorf("order %q", got)
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ only, want []string }{
		{nil, passNames(chains())},
		{[]string{"single"}, []string{"single"}},
		{[]string{"batch-replay"}, []string{"batch", "batch-replay"}},
		{[]string{"batch", "loop"}, []string{"loop", "batch"}},
	} {
		if got := passNames(choose(chains(), row.only)); !slices.Equal(got, row.want) {
			t.Errorf("choose %v: %v, want %v", row.only, got, row.want)
		}
	}
}

// What is measured begins after the first commit, and with it.
func TestMeter(t *testing.T) {
	t.Parallel()
	m := newMeter(5)
	m.commit(2)
	if _, ok := m.figures(); ok {
		t.Error("figures of one commit")
	}
	for range 5 {
		m.done()
	}
	<-m.full
	m.commit(1)
	m.commit(2)
	m.last = m.first.at.Add(3 * time.Second)
	f, ok := m.figures()
	if !ok || f.PerSecond != 1 || f.Seconds != 3 || f.PerTransaction != 1.5 {
		t.Errorf("figures %+v, %v, want 3 messages in 3 s and in 2 transactions", f, ok)
	}
}

// The topic is the same in every run, its partitions are equally long, and
// events of one order are in one partition.
func TestGenerate(t *testing.T) {
	t.Parallel()
	const events = 4000
	messages, distinct, err := generate(events)
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := generate(events)
	if err != nil {
		t.Fatal(err)
	}
	home, size := map[string]int{}, 0
	var load [partitions]int
	for i, m := range messages {
		p, ok := m.WriterData.(int)
		if first, known := home[string(m.Key)]; !ok || known && first != p {
			t.Fatalf("message %d: partition %v, others of its key are in %d", i, m.WriterData, first)
		}
		home[string(m.Key)] = p
		load[p]++
		size += len(m.Value)
		if string(again[i].Value) != string(m.Value) {
			t.Fatalf("message %d is another one the second time", i)
		}
	}
	if len(messages) != events || distinct != events {
		t.Errorf("%d messages with %d keys, want %d of each", len(messages), distinct, events)
	}
	if shortest, longest := slices.Min(load[:]), slices.Max(load[:]); longest-shortest > 10 {
		t.Errorf("partitions have from %d to %d messages", shortest, longest)
	}
	if mean := size / events; mean < bodySize-20 || mean > bodySize+20 {
		t.Errorf("a body has %d bytes, want about %d", mean, bodySize)
	}
}
