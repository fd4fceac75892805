package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

const deadHelp = `Look at parked messages: dead letters, which get no more attempts on their own, and
messages that wait for another attempt or behind another message of their lane.`

func (p *program) deadCommand() *cobra.Command {
	dead := &cobra.Command{
		Use:   "dead",
		Short: "Look at dead letters and other parked messages",
		Long:  deadHelp,
		Args:  cobra.ArbitraryArgs,
		RunE:  needsCommand,
	}
	dead.AddCommand(p.deadListCommand(), p.deadShowCommand())
	return dead
}

// anyState is the --state of all parked messages.
const anyState = "all"

var (
	states  = []inbox.ParkedState{inbox.ParkedDead, inbox.ParkedRetry, inbox.ParkedWaiting}
	reasons = []inbox.Reason{
		inbox.ReasonAttempts, inbox.ReasonPermanent, inbox.ReasonInvalidKey, inbox.ReasonConflict, inbox.ReasonEffectsUnknown,
	}
)

// maxLimit bounds --limit: the rows are held in memory.
const maxLimit = 10_000

// listFlags are the flags of "dead list".
type listFlags struct {
	consumer, tenant, key, reason, state string
	limit                                int
	after                                int64
}

func (p *program) deadListCommand() *cobra.Command {
	var f listFlags
	command := &cobra.Command{
		Use:   "list",
		Short: "List parked messages, oldest first",
		Long: `List parked messages, oldest first: by default the dead letters. When there are more
than --limit, the last line says how to go on. An empty list is no error.`,
		Example: `  ackafter dead list
  ackafter dead list --consumer billing --reason conflict
  ackafter dead list --state all --limit 20 --after 4711
  ackafter dead list --json | jq '.parked[].message_key'`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			filter, err := f.filter()
			if err != nil {
				return err
			}
			return p.withInbox(command.Context(), func(ctx context.Context, db *database, now time.Time) error {
				return p.listParked(ctx, db, filter, now)
			})
		},
	}
	flags := command.Flags()
	flags.StringVar(&f.consumer, "consumer", "", "only this `consumer`'s (default: all)")
	flags.StringVar(&f.tenant, "tenant", "", "only this `tenant`'s (default: all)")
	flags.StringVar(&f.key, "key", "", "only those with this message `key` (default: all)")
	flags.StringVar(&f.state, "state", string(inbox.ParkedDead), "only in this `state`: "+quotedList(states)+`, or "all"`)
	flags.StringVar(&f.reason, "reason", "", "only for this `reason`: "+quotedList(reasons)+" (default: all)")
	flags.IntVar(&f.limit, "limit", 100, fmt.Sprintf("at most this `many`, from 1 to %d", maxLimit))
	flags.Int64Var(&f.after, "after", 0, "go on after this `id`")
	complete(command, "state", append(texts(states), anyState)...)
	complete(command, "reason", texts(reasons)...)
	return command
}

// filter checks the flags.
func (f *listFlags) filter() (inbox.ParkedFilter, error) {
	filter := inbox.ParkedFilter{
		Consumer: f.consumer, Tenant: f.tenant, MessageKey: f.key,
		State: inbox.ParkedState(f.state), Reason: inbox.Reason(f.reason), After: f.after, Limit: f.limit,
	}
	switch {
	case f.state == anyState:
		filter.State = ""
	case !slices.Contains(states, filter.State):
		return filter, usagef("--state %q: must be one of %s, or %q", f.state, quotedList(states), anyState)
	}
	switch {
	case f.reason != "" && !slices.Contains(reasons, filter.Reason):
		return filter, usagef("--reason %q: must be one of %s", f.reason, quotedList(reasons))
	case f.limit < 1 || f.limit > maxLimit:
		return filter, usagef("--limit %d: must be from 1 to %d", f.limit, maxLimit)
	case f.after < 0:
		return filter, usagef("--after %d: must not be negative", f.after)
	}
	return filter, nil
}

func (p *program) listParked(ctx context.Context, db *database, filter inbox.ParkedFilter, now time.Time) error {
	limit := filter.Limit
	filter.Limit++ // One more, to see whether there is one.
	rows, err := db.inbox.ListParked(ctx, filter)
	if err != nil {
		return err
	}
	v := &parkedListView{now: now, filter: filter}
	if len(rows) > limit {
		rows = rows[:limit]
		v.next = rows[limit-1].ID
	}
	v.rows = rows
	return p.show(v)
}

func (p *program) deadShowCommand() *cobra.Command {
	var body bool
	command := &cobra.Command{
		Use:   "show ID",
		Short: "Show a parked message",
		Long: `Show a parked message, by the id that "ackafter dead list" tells. Its body, headers
and broker key are shown only with --body: they hold your customers' data.

The exit code is 3 when there is no such message.`,
		Example: `  ackafter dead show 4711
  ackafter dead show 4711 --body`,
		Args: arguments("ID"),
		RunE: func(command *cobra.Command, args []string) error {
			id, err := strconv.ParseInt(args[0], 10, 64)
			if err != nil || id < 1 {
				return usagef("ID %q: must be a number from 1 to %d", args[0], int64(math.MaxInt64))
			}
			return p.withInbox(command.Context(), func(ctx context.Context, db *database, now time.Time) error {
				row, err := db.inbox.GetParked(ctx, id)
				if errors.Is(err, inbox.ErrNotFound) {
					return &notFoundError{fmt.Sprintf("there is no parked message %d: it may have been handled since, or discarded", id)}
				}
				if err != nil {
					return err
				}
				return p.show(&parkedView{row: row, now: now, body: body})
			})
		},
	}
	command.Flags().BoolVar(&body, "body", false, "show body, headers and broker key too")
	return command
}

// parkedListView is what "dead list" shows.
type parkedListView struct {
	rows   []inbox.ParkedRecord
	filter inbox.ParkedFilter
	now    time.Time
	next   int64 // the id to go on after; 0 when these are all
}

func (v *parkedListView) data() any {
	data := struct {
		Parked []parkedEntry `json:"parked"`
		Next   *int64        `json:"next_after"`
	}{Parked: []parkedEntry{}}
	for i := range v.rows {
		data.Parked = append(data.Parked, newParkedEntry(&v.rows[i]))
	}
	if v.next > 0 {
		data.Next = &v.next
	}
	return data
}

func (v *parkedListView) text(w io.Writer) {
	if len(v.rows) == 0 {
		what := "no parked messages"
		if v.filter.State != "" {
			what += " in state " + string(v.filter.State)
		}
		_, _ = fmt.Fprintln(w, what)
		return
	}
	writeParkedTable(w, v.rows, v.now)
	if v.next > 0 {
		_, _ = fmt.Fprintf(w, "There are more: --after %d\n", v.next)
	}
}

// parkedView is what "dead show" shows.
type parkedView struct {
	row  *inbox.ParkedRecord
	now  time.Time
	body bool
}

func (v *parkedView) data() any { return newParkedMessage(v.row, v.body) }

func (v *parkedView) text(w io.Writer) { writeParked(w, v.row, v.now, v.body) }

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
