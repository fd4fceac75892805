package main

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

const deadRetryHelp = `Give dead letters all their attempts again. They run in the consumers' own processes,
as soon as these look for due messages, in the order of their ids where they have a
lane, and once: a message that was handled meanwhile is not handled again.

Name them by ids, or by filters; without either, --all is needed. With --state retry
those that wait for their time are due now.

Messages with the reason "conflict" or "effects unknown" are passed over, unless they
are named by id or with --reason: the first must not run as long as the first write
stands, the others may have done their work already. Look at them first.

It goes in batches, by ascending id, and leaves out what is parked after its start. A
signal (Ctrl-C) ends it between two batches; the output says how to go on. --timeout
is for each call of the database.

The exit code is 3 when there was nothing to retry.`

func (p *program) deadRetryCommand() *cobra.Command {
	var (
		selected    *selection
		all, dryRun bool
		pace        string
	)
	command := &cobra.Command{
		Use:   "retry [ID...]",
		Short: "Give dead letters their attempts again",
		Long:  deadRetryHelp,
		Example: `  ackafter dead retry 4711 4712
  ackafter dead retry --failure 5f0c9a2be1d34c77 --rate 50/s --dry-run
  ackafter dead retry --consumer billing --since 36h --error 'no route to host' --rate 50/s`,
		RunE: func(command *cobra.Command, args []string) error {
			ids, err := targets(command, args, selected, all)
			if err != nil {
				return err
			}
			u := &undertaking{verb: "retried", ids: ids, selection: selected, dryRun: dryRun}
			if u.rate, err = parseRate(pace); err != nil {
				return err
			}
			u.pass = func(r *inbox.ParkedRecord, named bool) string {
				return notRetried(r, named || selected.reason != "")
			}
			u.do = func(ctx context.Context, db *database, ids []int64) (int, error) {
				return db.inbox.RetryParked(ctx, ids)
			}
			return p.undertake(command.Context(), u)
		},
	}
	selected = selectFlags(command, 0, "at most this `many` (default: no limit)", string(inbox.ParkedDead), string(inbox.ParkedRetry))
	flags := command.Flags()
	flags.BoolVar(&all, "all", false, "all dead letters of all consumers, when no filter is given")
	flags.BoolVar(&dryRun, "dry-run", false, "only say what would be done")
	flags.StringVar(&pace, "rate", "", "at most this `many` in a time: 50/s, 100/m, 20/h (default: no limit)")
	return command
}

// notRetried tells why a message is not retried. meant: it was named by id, or its
// reason was.
func notRetried(r *inbox.ParkedRecord, meant bool) string {
	switch r.State {
	case inbox.ParkedDead, inbox.ParkedRetry:
	default:
		return "in state " + string(r.State)
	}
	switch r.Reason {
	case inbox.ReasonConflict, inbox.ReasonEffectsUnknown:
		if !meant {
			return fmt.Sprintf("%s (look at them, then name them by id or with --reason)", r.Reason)
		}
	}
	return ""
}
