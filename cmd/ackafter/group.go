package main

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// groupParked shows the selected messages by what they failed of.
func (p *program) groupParked(ctx context.Context, db *database, filter inbox.ParkedFilter, limit int, now time.Time) error {
	groups, err := db.inbox.GroupParked(ctx, filter)
	if err != nil {
		return err
	}
	return p.show(&groupsView{groups: groups, limit: limit, filter: filter, now: now})
}

// groupsView is what "dead list --group" shows.
type groupsView struct {
	groups []inbox.ParkedGroup
	limit  int
	filter inbox.ParkedFilter
	now    time.Time
}

// parkedGroup is a group as JSON.
type parkedGroup struct {
	Failure  string            `json:"failure"`
	Consumer string            `json:"consumer"`
	State    inbox.ParkedState `json:"state"`
	Reason   inbox.Reason      `json:"reason"`
	Count    int               `json:"count"`
	First    *time.Time        `json:"first"`
	Last     *time.Time        `json:"last"`
	Error    string            `json:"error"`
}

func newParkedGroups(groups []inbox.ParkedGroup) []parkedGroup {
	all := []parkedGroup{}
	for _, g := range groups {
		all = append(all, parkedGroup{g.Failure, g.Consumer, g.State, g.Reason, g.Count, jsonTime(g.First), jsonTime(g.Last), g.Error})
	}
	return all
}

func (v *groupsView) data() any {
	return struct {
		Groups []parkedGroup `json:"groups"`
		Left   int           `json:"groups_left_out"`
	}{newParkedGroups(v.groups[:min(len(v.groups), v.limit)]), max(len(v.groups)-v.limit, 0)}
}

func (v *groupsView) text(w io.Writer) {
	if len(v.groups) == 0 {
		writeNone(w, v.filter)
		return
	}
	writeGroups(w, v.groups, v.limit, v.now)
}

// writeGroups writes one line a group, at most limit.
func writeGroups(w io.Writer, groups []inbox.ParkedGroup, limit int, now time.Time) {
	t := newTable(w)
	t.row("COUNT", "CONSUMER", "STATE", "REASON", "FIRST", "LAST", "FAILURE", "ERROR")
	for i, g := range groups {
		if i == limit {
			break
		}
		t.row(grouped(int64(g.Count)), g.Consumer, string(g.State), string(g.Reason), distance(g.First, now), distance(g.Last, now),
			g.Failure, shortened(g.Error, errorLimit))
	}
	t.flush()
	if left := len(groups) - limit; left > 0 {
		_, _ = fmt.Fprintf(w, "There are %s more groups: --limit\n", grouped(int64(left)))
	}
}

// writeNone says that a filter selects nothing.
func writeNone(w io.Writer, f inbox.ParkedFilter) {
	what := "no parked messages"
	if f.State != "" {
		what += " in state " + string(f.State)
	}
	_, _ = fmt.Fprintln(w, what)
}
