package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

const deadHelp = `Look at parked messages, and see to them: dead letters, which get no more attempts on
their own, and messages that wait for another attempt or behind another message of their
lane.`

func (p *program) deadCommand() *cobra.Command {
	dead := &cobra.Command{
		Use:   "dead",
		Short: "Look at dead letters and other parked messages, retry or discard them",
		Long:  deadHelp,
		Args:  cobra.ArbitraryArgs,
		RunE:  needsCommand,
	}
	dead.AddCommand(p.deadListCommand(), p.deadShowCommand(), p.deadRetryCommand(), p.deadDiscardCommand(), p.deadExportCommand())
	return dead
}

// maxLimit bounds --limit: the rows are held in memory.
const maxLimit = 10_000

func (p *program) deadListCommand() *cobra.Command {
	var (
		selected   *selection
		all, group bool
	)
	command := &cobra.Command{
		Use:   "list",
		Short: "List parked messages, oldest first",
		Long: `List parked messages, oldest first: by default the dead letters. When there are more
than --limit, the last line says how to go on. An empty list is no error.

--group counts those that failed alike instead, the most frequent first: their errors
differ in numbers, ids and quoted parts only. --failure then selects such a group, here
and in the commands that retry, discard and export.

--all shows messages in every state: those that wait for their next attempt (NEXT says
until when), those that wait behind another one of their lane, those that a process has
in work (LEASED says until when at most), and discarded ones.`,
		Example: `  ackafter dead list
  ackafter dead list --group --since 36h
  ackafter dead list --consumer billing --reason conflict
  ackafter dead list --all --limit 20 --after 4711
  ackafter dead list --json | jq '.parked[].message_key'`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			switch changed := command.Flags().Changed; {
			case all && changed("state"):
				return usagef("--all does not go with --state")
			case all:
				selected.state = anyState
			case group && changed("after"):
				return usagef("--after does not go with --group")
			}
			if err := selected.check(command); err != nil {
				return err
			}
			limit := selected.limit
			if limit < 1 || limit > maxLimit {
				return usagef("--limit %d: must be from 1 to %d", limit, maxLimit)
			}
			return p.withInbox(command.Context(), func(ctx context.Context, db *database, now time.Time) error {
				if group {
					return p.groupParked(ctx, db, selected.filter(now), limit, now)
				}
				return p.listParked(ctx, db, selected.filter(now), limit, now)
			})
		},
	}
	selected = selectFlags(command, 100, fmt.Sprintf("at most this `many`, from 1 to %d", maxLimit), append(texts(states), anyState)...)
	command.Flags().BoolVar(&all, "all", false, "in every state, the same as --state all")
	command.Flags().BoolVar(&group, "group", false, "count those that failed alike")
	return command
}

func (p *program) listParked(ctx context.Context, db *database, filter inbox.ParkedFilter, limit int, now time.Time) error {
	filter.Limit = limit + 1 // One more, to see whether there is one.
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
			id, err := parseID(args[0])
			if err != nil {
				return err
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
		writeNone(w, v.filter)
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
