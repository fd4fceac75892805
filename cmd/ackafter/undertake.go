package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

// undertaking is something that is done to parked messages in batches.
type undertaking struct {
	// verb is what was done to them: "retried".
	verb string

	// ids are the messages; with none the selection says which.
	ids       []int64
	selection *selection

	// pass tells why a message is passed over; empty when it is not. named: a
	// person named it by its id.
	pass func(r *inbox.ParkedRecord, named bool) string

	// do does it to a batch.
	do func(ctx context.Context, db *database, ids []int64) (int, error)

	rate   rate
	dryRun bool
}

// progressEvery is the time between two lines that say how far it came.
const progressEvery = 5 * time.Second

// targets checks that the command line says which messages are meant: by ids, by
// filters, or all of them.
func targets(command *cobra.Command, args []string, s *selection, all bool) (ids []int64, err error) {
	if err := errors.Join(s.check(command), checkLimit(command, s.limit)); err != nil {
		return nil, err
	}
	if len(args) > 0 {
		if given := changed(command, slices.Concat(narrowing, []string{"state", "after", "all"})...); given != "" {
			return nil, usagef("--%s does not go with IDs", given)
		}
		return parseIDs(args)
	}
	if changed(command, narrowing...) == "" && !all {
		return nil, usagef("say which: IDs, a filter such as --failure or --consumer, or --all")
	}
	return nil, nil
}

// undertake does u and shows what was done. A signal ends it between two batches.
func (p *program) undertake(ctx context.Context, u *undertaking) error {
	return p.withOpenInbox(ctx, func(ctx context.Context, db *database, now time.Time) error {
		r := &undertakingRun{program: p, undertaking: u, db: db, started: p.clock(), view: undertakenView{u: u, now: now}}
		r.told = r.started
		r.filter = u.selection.filter(now)
		if r.filter.Before.IsZero() {
			r.filter.Before = now // Those that die meanwhile are for another time.
		}
		err := r.each(ctx, func(rows []inbox.ParkedRecord) error { return r.page(ctx, rows) })
		if errors.Is(err, errEnough) {
			err = nil
		}
		return r.end(ctx, err)
	})
}

// errEnough: --limit is reached.
var errEnough = errors.New("enough")

// undertakingRun is an undertaking under way.
type undertakingRun struct {
	*program
	*undertaking
	db     *database
	filter inbox.ParkedFilter
	view   undertakenView

	taken         int // as far as --limit counts
	started, told time.Time
	next          time.Time // when the rate allows the next batch
	total         int       // for the progress; zero while unknown
}

// each reads the messages that are meant.
func (r *undertakingRun) each(ctx context.Context, do func([]inbox.ParkedRecord) error) error {
	if len(r.ids) == 0 {
		return r.pages(ctx, r.db, r.filter, 0, do)
	}
	missing, err := r.rowsByID(ctx, r.db, r.ids, do)
	r.view.pass("not there: handled since, or purged", missing)
	return err
}

// page does it to the rows of a page that are not passed over.
func (r *undertakingRun) page(ctx context.Context, rows []inbox.ParkedRecord) error {
	batch := make([]int64, 0, r.rate.batch())
	for i := range rows {
		row := &rows[i]
		why := r.pass(row, len(r.ids) > 0)
		if why == "" && r.dryRun && row.LeasedUntil.After(r.view.now) {
			why = whyBusy
		}
		if why != "" {
			r.view.pass(why, 1)
			continue
		}
		if r.selection.limit > 0 && r.taken == r.selection.limit {
			if err := r.batch(ctx, batch); err != nil {
				return err
			}
			return errEnough
		}
		r.taken++
		if r.dryRun {
			r.view.count++
			r.view.add(row)
			continue
		}
		if batch = append(batch, row.ID); len(batch) == cap(batch) {
			if err := r.batch(ctx, batch); err != nil {
				return err
			}
			batch = batch[:0]
		}
	}
	return r.batch(ctx, batch)
}

const whyBusy = "in work at the moment, or changed since"

// batch does it to ids, when the rate allows it.
func (r *undertakingRun) batch(ctx context.Context, ids []int64) error {
	if len(ids) == 0 {
		return nil
	}
	if d := r.next.Sub(r.clock()); d > 0 {
		if err := r.wait(ctx, d); err != nil {
			return err
		}
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	r.next = r.clock().Add(r.rate.span(len(ids)))
	var n int
	// A batch is not given up halfway: nobody would know what became of it.
	err := r.bounded(context.WithoutCancel(ctx), func(ctx context.Context) (err error) {
		n, err = r.do(ctx, r.db, ids)
		return err
	})
	if err != nil {
		return fmt.Errorf("ids %d to %d: %w", ids[0], ids[len(ids)-1], err)
	}
	r.view.count += n
	r.view.pass(whyBusy, len(ids)-n)
	r.view.last = ids[len(ids)-1]
	return r.progress(ctx)
}

// progress says now and then how far it came.
func (r *undertakingRun) progress(ctx context.Context) error {
	if r.clock().Sub(r.told) < progressEvery {
		return nil
	}
	r.told = r.clock()
	if r.total == 0 {
		if err := r.measure(ctx); err != nil {
			return err
		}
	}
	_, _ = fmt.Fprintf(r.stderr, "%s %s of about %s, up to id %d\n", r.verb, grouped(int64(r.view.count)), grouped(int64(r.total)), r.view.last)
	return nil
}

// measure finds out how many messages are meant in all. Those that have been
// dealt with may have another state now.
func (r *undertakingRun) measure(ctx context.Context) error {
	if r.total = len(r.ids); r.total > 0 {
		return nil
	}
	r.total = r.taken
	err := r.bounded(ctx, func(ctx context.Context) error {
		groups, err := r.db.inbox.GroupParked(ctx, r.filter)
		for _, g := range groups {
			if r.pass(&inbox.ParkedRecord{Parked: inbox.Parked{State: g.State, Reason: g.Reason}}, false) == "" {
				r.total += g.Count
			}
		}
		return err
	})
	if limit := r.selection.limit; limit > 0 {
		r.total = min(r.total, limit)
	}
	return err
}

// end shows what was done, and says how to go on when err ended it early.
func (r *undertakingRun) end(ctx context.Context, err error) error {
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = fmt.Errorf("interrupted: %w", ctx.Err())
	}
	if err != nil {
		r.view.stopped = true
		if r.view.last > 0 {
			rest := "the same command with --after %d does the rest"
			if len(r.ids) > 0 {
				rest = "the ids after %d are left"
			}
			err = fmt.Errorf("%w\nstopped after %s; "+rest, err, counted(int64(r.view.count), "message"), r.view.last)
		}
	} else if r.view.count == 0 {
		err = &notFoundError{"nothing to be " + r.verb}
	}
	return errors.Join(r.show(&r.view), err)
}

// undertakenView is what an undertaking shows at its end.
type undertakenView struct {
	u       *undertaking
	now     time.Time
	count   int
	passed  []passedOver
	last    int64
	stopped bool
	groups  []inbox.ParkedGroup // of a dry run
}

// passedOver counts messages to which nothing was done.
type passedOver struct {
	Why   string `json:"why"`
	Count int    `json:"count"`
}

func (v *undertakenView) pass(why string, n int) {
	if n == 0 {
		return
	}
	for i := range v.passed {
		if v.passed[i].Why == why {
			v.passed[i].Count += n
			return
		}
	}
	v.passed = append(v.passed, passedOver{why, n})
}

// add counts a row to its group.
func (v *undertakenView) add(r *inbox.ParkedRecord) {
	i := slices.IndexFunc(v.groups, func(g inbox.ParkedGroup) bool {
		return g.Failure == r.Failure && g.Consumer == r.Consumer && g.State == r.State && g.Reason == r.Reason
	})
	if i < 0 {
		i = len(v.groups)
		v.groups = append(v.groups, inbox.ParkedGroup{
			Failure: r.Failure, Consumer: r.Consumer, State: r.State, Reason: r.Reason, First: r.ParkedAt, Last: r.ParkedAt,
		})
	}
	g := &v.groups[i]
	g.Count++
	if r.ParkedAt.Before(g.First) {
		g.First = r.ParkedAt
	}
	if !r.ParkedAt.Before(g.Last) {
		g.Last, g.Error = r.ParkedAt, r.Error
	}
}

func (v *undertakenView) data() any {
	data := struct {
		Action  string        `json:"action"`
		DryRun  bool          `json:"dry_run"`
		Count   int           `json:"count"`
		Passed  []passedOver  `json:"passed_over"`
		Last    *int64        `json:"last_id"`
		Stopped bool          `json:"stopped"`
		Groups  []parkedGroup `json:"groups,omitempty"`
	}{v.u.verb, v.u.dryRun, v.count, v.passed, nil, v.stopped, newParkedGroups(v.groups)}
	if v.last > 0 {
		data.Last = &v.last
	}
	if data.Passed == nil {
		data.Passed = []passedOver{}
	}
	return data
}

// groupLimit is how many groups a dry run shows.
const groupLimit = 100

func (v *undertakenView) text(w io.Writer) {
	what := v.u.verb
	if v.u.dryRun {
		what = "would be " + what + ":"
		if len(v.groups) > 0 {
			slices.SortStableFunc(v.groups, func(a, b inbox.ParkedGroup) int { return b.Count - a.Count })
			writeGroups(w, v.groups, groupLimit, v.now)
		}
	}
	_, _ = fmt.Fprintf(w, "%s %s", what, counted(int64(v.count), "message"))
	if v.u.dryRun && v.u.rate > 0 && v.count > 0 {
		_, _ = fmt.Fprintf(w, ", in %s", span(max(v.u.rate.span(v.count), time.Second)))
	}
	_, _ = fmt.Fprintln(w)
	for _, p := range v.passed {
		_, _ = fmt.Fprintf(w, "passed over %s: %s\n", grouped(int64(p.Count)), p.Why)
	}
}
