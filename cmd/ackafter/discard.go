package main

import (
	"context"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

const deadDiscardHelp = `Give parked messages up. Body and headers are deleted for good; "ackafter dead export
--bodies" keeps a copy. The row stays with your note until it is purged, so that the
message does not run when it is delivered again. Messages behind it in its lane follow.

Name them by ids, or by filters; without either, --all is needed. What filters select
is discarded only with --yes: look at it with --dry-run first.

It goes in batches, by ascending id, and leaves out what is parked after its start. A
signal (Ctrl-C) ends it between two batches; the output says how to go on. --timeout
is for each call of the database.

The exit code is 3 when there was nothing to discard.`

// maxNote bounds a note, in bytes.
const maxNote = 500

func (p *program) deadDiscardCommand() *cobra.Command {
	var (
		selected         *selection
		all, dryRun, yes bool
		note             string
	)
	command := &cobra.Command{
		Use:   "discard [ID...]",
		Short: "Give parked messages up",
		Long:  deadDiscardHelp,
		Example: `  ackafter dead discard 4711 --note 'jo: test order, agreed with the partner'
  ackafter dead discard --failure 5f0c9a2be1d34c77 --dry-run
  ackafter dead discard --failure 5f0c9a2be1d34c77 --note 'jo: partner sent garbage' --yes`,
		RunE: func(command *cobra.Command, args []string) error {
			ids, err := targets(command, args, selected, all)
			if err != nil {
				return err
			}
			switch note = strings.TrimSpace(note); {
			case dryRun:
			case note == "":
				return usagef("--note is missing: say who discards, and why")
			case len(note) > maxNote || !utf8.ValidString(note) || strings.ContainsRune(note, 0):
				return usagef("--note: must be valid UTF-8 without NUL, of at most %d bytes", maxNote)
			case len(ids) == 0 && !yes:
				return usagef("what filters select is discarded only with --yes; look at it with --dry-run first")
			}
			u := &undertaking{verb: "discarded", ids: ids, selection: selected, dryRun: dryRun}
			u.pass = func(r *inbox.ParkedRecord, _ bool) string {
				if r.State == inbox.ParkedDiscarded {
					return "discarded already"
				}
				return ""
			}
			u.do = func(ctx context.Context, db *database, ids []int64) (int, error) {
				return db.inbox.DiscardParked(ctx, ids, note)
			}
			return p.undertake(command.Context(), u)
		},
	}
	selected = selectFlags(command, 0, "at most this `many` (default: no limit)",
		string(inbox.ParkedDead), string(inbox.ParkedRetry), string(inbox.ParkedWaiting))
	flags := command.Flags()
	flags.BoolVar(&all, "all", false, "all dead letters of all consumers, when no filter is given")
	flags.BoolVar(&dryRun, "dry-run", false, "only say what would be done")
	flags.BoolVar(&yes, "yes", false, "really discard what filters select")
	flags.StringVar(&note, "note", "", "`text` that says who discards and why, without personal data")
	return command
}
