package inbox_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// parkers is the parked table of the fake store.
type parkers struct {
	lastID, lastToken int64
	rowLocked         map[int64]bool
	// mates: what a batch has claimed itself does not hold what comes behind it.
	mates    bool
	leases   int // questions
	prints   map[string][]byte
	released int
}

// park inserts p, or changes the row that it has.
func (s *fakeStore) park(p inbox.Parked) {
	now := time.Now()
	row := s.leased(p.Lease)
	if row == nil {
		for _, old := range s.parked {
			if old.Key == p.Key && string(old.Fingerprint) == string(p.Fingerprint) {
				return
			}
		}
		s.lastID++
		row = &inbox.ParkedRecord{ID: s.lastID, Parked: p, ParkedAt: now}
		s.parked = append(s.parked, row)
	}
	row.State, row.Reason, row.Error, row.Failure, row.Attempts, row.Worker = p.State, p.Reason, p.Error, p.Failure, p.Attempts, p.Worker
	row.Lease, row.LeasedUntil, row.After, row.UpdatedAt = inbox.Lease{}, time.Time{}, 0, now
	row.NextAttempt, row.Died = time.Time{}, time.Time{}
	switch p.State {
	case inbox.ParkedRetry:
		row.NextAttempt = now.Add(p.After)
	case inbox.ParkedDead:
		row.Died = now
	}
}

// leased returns the row of a lease that is not over.
func (s *fakeStore) leased(l inbox.Lease) *inbox.ParkedRecord {
	for _, r := range s.parked {
		if l.ID != 0 && r.Lease == l {
			return r
		}
	}
	return nil
}

// order fills in what holds a claimed entry back.
func (s *fakeStore) order(e *inbox.Entry, c inbox.Claim, o inbox.Order, own []int64) {
	if !e.Claimed() || c.Lane == "" || !o.Keep {
		return
	}
	waiting, size := 0, int64(0)
	for _, r := range s.parked {
		if r.Consumer != c.Consumer || r.Lane != c.Lane || r.ID == c.Parked.ID {
			continue
		}
		if r.State == inbox.ParkedWaiting {
			waiting++
			size += int64(len(r.Message.Body))
		}
		if !holds(r, o) || (c.Parked.ID != 0 && (r.ID > c.Parked.ID || (s.mates && slices.Contains(own, r.ID)))) {
			continue
		}
		e.Held = true
	}
	e.Full = e.Held && c.Parked.ID == 0 && ((o.MaxWaiting > 0 && waiting >= o.MaxWaiting) || (o.MaxWaitingBytes > 0 && size >= o.MaxWaitingBytes))
}

func holds(r *inbox.ParkedRecord, o inbox.Order) bool {
	return r.State == inbox.ParkedRetry || r.State == inbox.ParkedWaiting || (r.State == inbox.ParkedDead && o.BlockedByDead)
}

func (s *fakeStore) Lease(_ context.Context, q inbox.LeaseRequest) (inbox.Leased, error) {
	if err := s.try("lease"); err != nil {
		return inbox.Leased{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.leases++
	now, blocked, answer := time.Now(), map[string]bool{}, inbox.Leased{Next: -1}
	slices.SortFunc(s.parked, func(a, b *inbox.ParkedRecord) int { return int(a.ID - b.ID) })
	for _, r := range s.parked {
		lane := r.Lane
		if !q.Order.Keep {
			lane = ""
		}
		if r.Consumer != q.Consumer || !holds(r, q.Order) || (lane != "" && blocked[lane]) {
			continue
		}
		switch wait := r.NextAttempt.Sub(now); {
		case r.State == inbox.ParkedDead, s.rowLocked[r.ID], r.LeasedUntil.After(now):
			blocked[lane] = true
		case r.State == inbox.ParkedRetry && wait > 0:
			blocked[lane] = true
			if answer.Next < 0 || wait < answer.Next {
				answer.Next = wait
			}
		case len(answer.Rows) >= q.Limit:
			answer.Next = 0
			return answer, nil
		default:
			s.lastToken++
			r.Lease, r.LeasedUntil, r.Worker = inbox.Lease{ID: r.ID, Token: s.lastToken}, now.Add(q.For), q.Worker
			copied := *r
			answer.Rows = append(answer.Rows, copied)
		}
	}
	return answer, nil
}

func (s *fakeStore) Release(_ context.Context, leases []inbox.Lease) error {
	if err := s.try("release"); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range leases {
		if r := s.leased(l); r != nil {
			r.Lease, r.LeasedUntil = inbox.Lease{}, time.Time{}
			s.released++
		}
	}
	return nil
}

func (s *fakeStore) PurgeDead(_ context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error) {
	if err := s.try("purge"); err != nil {
		return 0, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	s.parked = slices.DeleteFunc(s.parked, func(r *inbox.ParkedRecord) bool {
		if n >= limit || r.Consumer != consumer || r.Died.IsZero() || time.Since(r.Died) <= age || (blocked && r.State == inbox.ParkedDead && r.Lane != "") {
			return false
		}
		n++
		return true
	})
	return n, nil
}

// RetryParked and DiscardParked are as a person would do them.
func (s *fakeStore) RetryParked(_ context.Context, ids []int64) (int, error) {
	return s.change(ids, func(r *inbox.ParkedRecord) bool {
		if r.State != inbox.ParkedDead && r.State != inbox.ParkedRetry {
			return false
		}
		r.State, r.Attempts, r.NextAttempt, r.Died = inbox.ParkedRetry, 0, time.Now(), time.Time{}
		return true
	}), nil
}

func (s *fakeStore) DiscardParked(_ context.Context, ids []int64, note string) (int, error) {
	return s.change(ids, func(r *inbox.ParkedRecord) bool {
		if r.State == inbox.ParkedDiscarded {
			return false
		}
		r.State, r.Error, r.Died = inbox.ParkedDiscarded, note, time.Now()
		return true
	}), nil
}

func (s *fakeStore) change(ids []int64, to func(*inbox.ParkedRecord) bool) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	for _, r := range s.parked {
		if slices.Contains(ids, r.ID) && !s.rowLocked[r.ID] && !r.LeasedUntil.After(time.Now()) && to(r) {
			n++
		}
	}
	return n
}

// all returns the parked rows.
func (s *fakeStore) all() []inbox.ParkedRecord {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows := make([]inbox.ParkedRecord, len(s.parked))
	for i, r := range s.parked {
		rows[i] = *r
	}
	return rows
}

// asked returns how many transactions were begun, and how often the table was asked.
func (s *fakeStore) asked() (begins, leases int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.begins), s.leases
}

// states counts the parked rows by state.
func (s *fakeStore) states() map[inbox.ParkedState]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := map[inbox.ParkedState]int{}
	for _, r := range s.parked {
		n[r.State]++
	}
	return n
}

// unparked waits until no message waits in the parked table for later.
func (s *fakeStore) unparked(ctx context.Context, t *testing.T) {
	t.Helper()
	for n := s.states(); n[inbox.ParkedRetry]+n[inbox.ParkedWaiting] > 0; n = s.states() {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
			t.Fatalf("still parked: %v", n)
		}
	}
}

// noParker is a store that parks for a person only.
type noParker struct {
	inbox.Store[*fakeTx]
}

// begun returns the fingerprint that the open transaction with a key came with.
func (s *fakeStore) begun(key string) []byte { return s.prints[key] }
