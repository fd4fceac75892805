package main

import (
	"context"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

// anyState is the --state of all parked messages.
const anyState = "all"

var (
	states  = []inbox.ParkedState{inbox.ParkedDead, inbox.ParkedRetry, inbox.ParkedWaiting, inbox.ParkedDiscarded}
	reasons = []inbox.Reason{
		inbox.ReasonAttempts, inbox.ReasonPermanent, inbox.ReasonInvalidKey, inbox.ReasonConflict, inbox.ReasonEffectsUnknown,
		inbox.ReasonProcessDied, inbox.ReasonFailed, inbox.ReasonWaiting,
	}
)

// selection is the flags that select parked messages.
type selection struct {
	consumer, tenant, key, reason, state, failure, text, since, before string

	limit int
	after int64

	// states are those that --state takes, beside "all" where that is one of them.
	states []string

	from, until when
}

// selectFlags adds the flags to command. The first of states is the default of
// --state.
func selectFlags(command *cobra.Command, limit int, limitHelp string, states ...string) *selection {
	s := &selection{states: states}
	flags := command.Flags()
	flags.StringVar(&s.consumer, "consumer", "", "only this `consumer`'s (default: all)")
	flags.StringVar(&s.tenant, "tenant", "", "only this `tenant`'s (default: all)")
	flags.StringVar(&s.key, "key", "", "only those with this message `key` (default: all)")
	flags.StringVar(&s.state, "state", states[0], "only in this `state`: "+strings.Join(states, ", "))
	flags.StringVar(&s.reason, "reason", "", "only for this `reason`: "+quotedList(reasons)+" (default: all)")
	flags.StringVar(&s.failure, "failure", "", "only those that failed alike: the `failure` that \"dead list --group\" tells (default: all)")
	flags.StringVar(&s.text, "error", "", "only those whose error contains this `text` (default: all)")
	flags.StringVar(&s.since, "since", "", "only those parked at this `time` or later: how long ago (90m, 36h, 7d) or RFC 3339 (default: all)")
	flags.StringVar(&s.before, "before", "", "only those parked before this `time`, given as with --since (default: all)")
	flags.IntVar(&s.limit, "limit", limit, limitHelp)
	flags.Int64Var(&s.after, "after", 0, "go on after this `id`")
	complete(command, "state", states...)
	complete(command, "reason", texts(reasons)...)
	return s
}

// narrowing are the flags that say which messages are meant. The state alone does
// not.
var narrowing = []string{"consumer", "tenant", "key", "reason", "failure", "error", "since", "before"}

// changed returns the first of the flags that is given; empty when none is.
func changed(command *cobra.Command, flags ...string) string {
	i := slices.IndexFunc(flags, command.Flags().Changed)
	if i < 0 {
		return ""
	}
	return flags[i]
}

// check checks the flags.
func (s *selection) check(command *cobra.Command) (err error) {
	for _, name := range narrowing {
		switch value := command.Flags().Lookup(name); {
		case value.Changed && value.Value.String() == "":
			// A script whose variable is not set must not mean all messages.
			return usagef("--%s: must not be empty", name)
		case !utf8.ValidString(value.Value.String()) || strings.ContainsRune(value.Value.String(), 0):
			return usagef("--%s: must be valid UTF-8 without NUL", name)
		}
	}
	switch {
	case !slices.Contains(s.states, s.state):
		return usagef("--state %q: must be one of %s", s.state, quotedList(s.states))
	case s.reason != "" && !slices.Contains(reasons, inbox.Reason(s.reason)):
		return usagef("--reason %q: must be one of %s", s.reason, quotedList(reasons))
	case s.after < 0:
		return usagef("--after %d: must not be negative", s.after)
	}
	if s.from, err = parseWhen("since", s.since); err != nil {
		return err
	}
	s.until, err = parseWhen("before", s.before)
	return err
}

// filter is the selection at the time now. Its Limit is not set.
func (s *selection) filter(now time.Time) inbox.ParkedFilter {
	f := inbox.ParkedFilter{
		Consumer: s.consumer, Tenant: s.tenant, MessageKey: s.key, State: inbox.ParkedState(s.state), Reason: inbox.Reason(s.reason),
		Failure: s.failure, Error: s.text, Since: s.from.at(now), Before: s.until.at(now), After: s.after,
	}
	if s.state == anyState {
		f.State = ""
	}
	return f
}

// when is a time, or how long ago it was; the zero value is none.
type when struct {
	time time.Time
	ago  time.Duration
	set  bool
}

func (w when) at(now time.Time) time.Time {
	if w.set && w.time.IsZero() {
		return now.Add(-w.ago)
	}
	return w.time
}

// parseWhen parses the value of a flag; empty is no time.
func parseWhen(flag, value string) (when, error) {
	if value == "" {
		return when{}, nil
	}
	if t, err := time.Parse(time.RFC3339, value); err == nil {
		return when{time: t, set: true}, nil
	}
	d, err := time.ParseDuration(value)
	if days, isDays := strings.CutSuffix(value, "d"); isDays {
		const day, maxDays = 24 * time.Hour, int(math.MaxInt64 / (24 * time.Hour))
		var n int
		if n, err = strconv.Atoi(days); err == nil && n <= maxDays {
			d = time.Duration(n) * day
		}
	}
	if err != nil || d <= 0 {
		return when{}, usagef("--%s %q: must be how long ago (90m, 36h, 7d) or a time (%s)", flag, value, "2026-01-31T08:00:00Z")
	}
	return when{ago: d, set: true}, nil
}

// parseIDs parses the ids of parked messages, and sorts them.
func parseIDs(args []string) ([]int64, error) {
	ids := make([]int64, 0, len(args))
	for _, arg := range args {
		id, err := parseID(arg)
		if err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

func parseID(arg string) (int64, error) {
	id, err := strconv.ParseInt(arg, 10, 64)
	if err != nil || id < 1 {
		return 0, usagef("ID %q: must be a number from 1 to %d", arg, int64(math.MaxInt64))
	}
	return id, nil
}

// pageSize is how many rows are read, and how many are changed, at once.
const pageSize = 500

// pages calls do with the rows that f selects, in the order of their ids and with
// bounded memory: at most limit of them (zero: all), in pages. A page is read
// within the time of --timeout.
func (p *program) pages(ctx context.Context, db *database, f inbox.ParkedFilter, limit int, do func([]inbox.ParkedRecord) error) error {
	for left := limit; limit == 0 || left > 0; {
		f.Limit = pageSize
		if limit > 0 {
			f.Limit = min(left, pageSize)
		}
		var rows []inbox.ParkedRecord
		err := p.bounded(ctx, func(ctx context.Context) (err error) {
			rows, err = db.inbox.ListParked(ctx, f)
			return err
		})
		if err != nil || len(rows) == 0 {
			return err
		}
		if err := do(rows); err != nil {
			return err
		}
		if len(rows) < f.Limit {
			return nil
		}
		left -= len(rows)
		f.After = rows[len(rows)-1].ID
	}
	return nil
}

// rowsByID calls do with the rows that have these ids, in pages, and returns how
// many there are none of.
func (p *program) rowsByID(ctx context.Context, db *database, ids []int64, do func([]inbox.ParkedRecord) error) (missing int, err error) {
	for page := range slices.Chunk(ids, pageSize) {
		var rows []inbox.ParkedRecord
		for _, id := range page {
			err := p.bounded(ctx, func(ctx context.Context) error {
				// Not GetParked, which reads the body too.
				found, err := db.inbox.ListParked(ctx, inbox.ParkedFilter{After: id - 1, Limit: 1})
				if err == nil && len(found) == 1 && found[0].ID == id {
					rows = append(rows, found[0])
				}
				return err
			})
			if err != nil {
				return missing, err
			}
		}
		missing += len(page) - len(rows)
		if len(rows) > 0 {
			if err := do(rows); err != nil {
				return missing, err
			}
		}
	}
	return missing, nil
}

// texts returns the values as strings.
func texts[S ~string](all []S) []string {
	s := make([]string, len(all))
	for i := range all {
		s[i] = string(all[i])
	}
	return s
}

func quotedList[S ~string](all []S) string {
	quoted := make([]string, len(all))
	for i := range all {
		quoted[i] = strconv.Quote(string(all[i]))
	}
	return strings.Join(quoted, ", ")
}

// checkLimit checks a --limit that may be as high as you like; zero is none.
func checkLimit(command *cobra.Command, limit int) error {
	if limit < 0 || limit == 0 && command.Flags().Changed("limit") {
		return usagef("--limit %d: must be positive", limit)
	}
	return nil
}
