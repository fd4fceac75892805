package inboxtest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// The rules for stores that keep track of Runs and of messages that are run with
// care.
func markerRules[Tx any]() []storeRule[Tx] {
	return []storeRule[Tx]{
		{name: "beats", run: beats[Tx]},
		{name: "marks", run: marks[Tx]},
		{name: "marks of many", levels: true, run: marksOfMany[Tx]},
		{name: "no mark for what is done", run: noMarkForDone[Tx]},
		{name: "old marks", run: oldMarks[Tx]},
	}
}

func (s *storeSuite[Tx]) marker() inbox.Marker {
	s.Helper()
	if !s.h.Marking {
		s.Skip("StoreHarness.Marking is not set")
	}
	m, ok := s.Store.(inbox.Marker)
	if !ok {
		s.Fatalf("StoreHarness.Marking is set, but %T is no inbox.Marker", s.Store)
	}
	return m
}

// beat returns the ids of the Runs that were recorded before.
func (s *storeSuite[Tx]) beat(consumer string, r inbox.RunRecord) []inbox.RunRecord {
	s.Helper()
	runs, err := s.marker().Beat(s.ctx, consumer, r)
	if err != nil {
		s.Fatalf("Beat: %v", err)
	}
	slices.SortFunc(runs, func(a, b inbox.RunRecord) int { return len(a.ID) - len(b.ID) })
	return runs
}

func (s *storeSuite[Tx]) wantRuns(runs []inbox.RunRecord, ids ...string) {
	s.Helper()
	var got []string
	for _, r := range runs {
		got = append(got, r.ID)
	}
	if !slices.Equal(got, ids) {
		s.Fatalf("recorded runs: %q, want %q", got, ids)
	}
}

// 86. Beat records a Run and returns those that were recorded before, with their ages;
// EndRuns forgets them. Consumers do not see each other's.
func beats[Tx any](s *storeSuite[Tx]) {
	m := s.marker()
	one, two := inbox.RunRecord{ID: "1", Worker: "w1", Host: "h1"}, inbox.RunRecord{ID: "22", Worker: "w\x002"}
	s.wantRuns(s.beat("billing", one))
	s.pause(300 * time.Millisecond)
	runs := s.beat("billing", two)
	s.wantRuns(runs, "1")
	if r := runs[0]; r.Worker != "w1" || r.Host != "h1" || r.Age < 250*time.Millisecond || r.Age > ruleTimeout {
		s.Errorf("the other run: %+v, want age 300ms or a little more", r)
	}
	before := time.Now()
	runs = s.beat("billing", one)
	s.wantRuns(runs, "1", "22")
	if r := runs[0]; r.Age < 250*time.Millisecond {
		s.Errorf("its own age %v, want that before the beat", r.Age)
	}
	runs = s.beat("billing", one)
	s.wantRuns(runs, "1", "22")
	if most := time.Since(before) + 50*time.Millisecond; runs[0].Age > most || runs[0].Age < 0 {
		s.Errorf("after a beat: age %v, want at most %v", runs[0].Age, most)
	}
	s.wantRuns(s.beat("shipping", one))
	if err := m.EndRuns(s.ctx, "billing", "1", "none"); err != nil {
		s.Fatalf("EndRuns: %v", err)
	}
	if err := m.EndRuns(s.ctx, "billing"); err != nil {
		s.Errorf("EndRuns of none: %v", err)
	}
	s.wantRuns(s.beat("billing", two), "22")
	s.wantRuns(s.beat("shipping", one), "1")
}

func (s *storeSuite[Tx]) mark(c inbox.Claim, want int) {
	s.Helper()
	if n, err := s.marker().MarkStart(s.ctx, c); err != nil || n != want {
		s.Errorf("MarkStart of %q: %d, %v; want %d", short(c.MessageKey), n, err, want)
	}
}

func (s *storeSuite[Tx]) unmark(c inbox.Claim, all bool) {
	s.Helper()
	if err := s.marker().UnmarkStart(s.ctx, c, all); err != nil {
		s.Errorf("UnmarkStart of %q: %v", short(c.MessageKey), err)
	}
}

// 87. MarkStart counts, committed when it returns; UnmarkStart takes one mark or all
// back. They are counted apart for each tenant, consumer, key and fingerprint, and do
// not hinder a claim.
func marks[Tx any](s *storeSuite[Tx]) {
	s.marker()
	c := claim("a")
	others := []inbox.Claim{claim("b"), c, c, c, c}
	others[1].Tenant, others[2].Consumer, others[3].Fingerprint, others[4].Fingerprint = "t", "shipping", []byte("other"), nil
	s.mark(c, 1)
	if n := s.count("select count(*) from inbox_starts"); n != 1 {
		s.Errorf("%d rows of marks, want 1", n)
	}
	s.mark(c, 2)
	s.mark(c, 3)
	for _, o := range others {
		s.mark(o, 1)
	}
	s.unmark(c, false)
	s.mark(c, 3)
	s.unmark(c, true)
	s.unmark(c, true)
	s.unmark(c, false)
	for _, o := range others {
		s.mark(o, 2)
		s.unmark(o, false)
		s.unmark(o, false)
	}
	if n := s.count("select count(*) from inbox_starts"); n != 0 {
		s.Errorf("%d rows of marks are left, want 0", n)
	}
	s.mark(c, 1)
	s.handle(c, nil)
	// Keys that are stored in a short form, as they come from a broker or from there.
	long := claim(strings.Repeat("k", 600))
	s.mark(long, 1)
	s.mark(long, 2)
	s.unmark(long, true)
	s.mark(long, 1)
}

// 88. Marks of one message that are set at once are all counted, at every level of
// isolation.
func marksOfMany[Tx any](s *storeSuite[Tx]) {
	m := s.marker()
	const n = 4
	var done [n]<-chan error
	for i := range done {
		done[i] = async(func() error {
			for range 5 {
				if _, err := m.MarkStart(s.ctx, claim("a")); err != nil {
					return fmt.Errorf("MarkStart: %w", err)
				}
				if _, err := m.Beat(s.ctx, "billing", inbox.RunRecord{ID: fmt.Sprint(i)}); err != nil {
					return fmt.Errorf("Beat: %w", err)
				}
			}
			return nil
		})
	}
	for _, d := range done {
		if err := <-d; err != nil {
			s.Error(err)
		}
	}
	s.mark(claim("a"), 5*n+1)
}

// 89. A message whose key has a row within its window has no mark; one past its window
// has.
func noMarkForDone[Tx any](s *storeSuite[Tx]) {
	s.marker()
	c := claim("a")
	c.Retention = 200 * time.Millisecond
	s.handle(c, nil)
	s.handle(claim("b"), nil)
	s.mark(claim("b"), 0)
	other := claim("b")
	other.Fingerprint = []byte("other")
	s.mark(other, 0)
	s.pause(400 * time.Millisecond)
	s.mark(c, 1)
	if n := s.count("select count(*) from inbox_starts"); n != 1 {
		s.Errorf("%d rows of marks, want 1", n)
	}
}

// 90. A mark that nobody has touched for MarkRetention counts no more.
func oldMarks[Tx any](s *storeSuite[Tx]) {
	m := s.marker()
	s.mark(claim("a"), 1)
	s.mark(claim("a"), 2)
	if s.h.OneWriter {
		s.outside("update inbox_starts set updated_at = updated_at - 605000000000")
	} else {
		s.outside("update inbox_starts set updated_at = updated_at - interval '605000 seconds'")
	}
	s.mark(claim("b"), 1)
	s.mark(claim("a"), 1)
	if err := m.EndRuns(s.ctx, "billing", "none"); err != nil {
		s.Errorf("EndRuns: %v", err)
	}
	if n := s.count("select count(*) from inbox_starts"); n != 2 {
		s.Errorf("%d rows of marks, want those 2 that count", n)
	}
}
