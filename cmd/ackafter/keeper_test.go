package main

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// fakeKeeper holds parked messages in memory, for what a database does not do at
// will. It is used by one command at a time.
type fakeKeeper struct {
	keeper // what is not overridden
	rows   []inbox.ParkedRecord

	calls     [][]int64 // of RetryParked and DiscardParked
	note      string
	pages     []int // the limits of ListParked
	deadlines []time.Time

	// before is called before every change.
	before func(ctx context.Context, call int) error
}

// onFake returns a terminal for an empty database that shows the rows of a fake.
func onFake(t *testing.T, rows ...inbox.ParkedRecord) (*terminal, *fakeKeeper) {
	t.Helper()
	term := onSQLite(t)
	term.must("migrate", "up")
	fake := &fakeKeeper{rows: rows}
	term.clock = new(fakeClock)
	term.watch = func(store keeper) keeper {
		fake.keeper = store
		return fake
	}
	return term, fake
}

// parkedRows returns n dead letters with the ids from 1.
func parkedRows(n int, change func(r *inbox.ParkedRecord)) []inbox.ParkedRecord {
	rows := make([]inbox.ParkedRecord, n)
	for i := range rows {
		r := &rows[i]
		r.ID, r.Consumer, r.State, r.Reason, r.Error, r.Failure = int64(i+1), "billing", inbox.ParkedDead, inbox.ReasonAttempts, "no route", "f1"
		r.ParkedAt, r.Message = ago(time.Hour), &broker.Message{Body: []byte("{}")}
		if change != nil {
			change(r)
		}
	}
	return rows
}

func (f *fakeKeeper) selected(r *inbox.ParkedRecord, by inbox.ParkedFilter) bool {
	return (by.State == "" || r.State == by.State) && (by.Reason == "" || r.Reason == by.Reason) &&
		(by.Consumer == "" || r.Consumer == by.Consumer) && (by.Tenant == "" || r.Tenant == by.Tenant) &&
		(by.MessageKey == "" || r.MessageKey == by.MessageKey) && (by.Failure == "" || r.Failure == by.Failure) &&
		strings.Contains(r.Error, by.Error) && !r.ParkedAt.Before(by.Since) && (by.Before.IsZero() || r.ParkedAt.Before(by.Before))
}

func (f *fakeKeeper) deadline(ctx context.Context) {
	d, _ := ctx.Deadline()
	f.deadlines = append(f.deadlines, d)
}

func (f *fakeKeeper) ListParked(ctx context.Context, by inbox.ParkedFilter) (found []inbox.ParkedRecord, err error) {
	f.deadline(ctx)
	f.pages = append(f.pages, by.Limit)
	for i := range f.rows {
		if r := f.rows[i]; r.ID > by.After && len(found) < by.Limit && f.selected(&r, by) {
			m := *r.Message
			m.Body, m.Headers = nil, nil
			r.Message = &m
			found = append(found, r)
		}
	}
	return found, ctx.Err()
}

func (f *fakeKeeper) GetParked(ctx context.Context, id int64) (*inbox.ParkedRecord, error) {
	f.deadline(ctx)
	for i := range f.rows {
		if f.rows[i].ID == id {
			return &f.rows[i], ctx.Err()
		}
	}
	return nil, inbox.ErrNotFound
}

func (f *fakeKeeper) change(ctx context.Context, ids []int64, to inbox.ParkedState) (n int, err error) {
	f.deadline(ctx)
	f.calls = append(f.calls, append([]int64(nil), ids...))
	if f.before != nil {
		if err := f.before(ctx, len(f.calls)); err != nil {
			return 0, err
		}
	}
	for _, id := range ids {
		for i := range f.rows {
			if r := &f.rows[i]; r.ID == id && r.LeasedUntil.IsZero() {
				r.State = to
				n++
			}
		}
	}
	return n, ctx.Err()
}

func (f *fakeKeeper) RetryParked(ctx context.Context, ids []int64) (int, error) {
	return f.change(ctx, ids, inbox.ParkedRetry)
}

func (f *fakeKeeper) DiscardParked(ctx context.Context, ids []int64, note string) (int, error) {
	f.note = note
	return f.change(ctx, ids, inbox.ParkedDiscarded)
}

func (f *fakeKeeper) GroupParked(ctx context.Context, by inbox.ParkedFilter) (groups []inbox.ParkedGroup, err error) {
	f.deadline(ctx)
	g := inbox.ParkedGroup{Failure: "f1", Consumer: "billing", State: inbox.ParkedDead, Reason: inbox.ReasonAttempts}
	for i := range f.rows {
		if f.selected(&f.rows[i], by) {
			g.Count++
		}
	}
	return []inbox.ParkedGroup{g}, ctx.Err()
}

// state returns how many rows are in the state.
func (f *fakeKeeper) state(s inbox.ParkedState) (n int) {
	for i := range f.rows {
		if f.rows[i].State == s {
			n++
		}
	}
	return n
}
