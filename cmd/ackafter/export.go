package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

const deadExportHelp = `Write parked messages as JSON lines, oldest first: one object a message, with the same
fields as "ackafter dead show --json". Bodies, headers and broker keys are written only
with --bodies: they hold your customers' data. They are text where they are valid
UTF-8, else base64.

Any number can be written: they are read in pages. A signal (Ctrl-C) ends it between
two messages; the output says how to go on. --timeout is for each call of the database.

No message is no error.`

func (p *program) deadExportCommand() *cobra.Command {
	var (
		selected *selection
		bodies   bool
		path     string
	)
	command := &cobra.Command{
		Use:   "export",
		Short: "Write parked messages as JSON lines",
		Long:  deadExportHelp,
		Example: `  ackafter dead export --consumer billing > dead.jsonl
  ackafter dead export --failure 5f0c9a2be1d34c77 --bodies --output dead.jsonl
  ackafter dead export --state all | jq -r '[.id, .message_key] | @tsv'`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			if err := errors.Join(selected.check(command), checkLimit(command, selected.limit)); err != nil {
				return err
			}
			return p.withOpenInbox(command.Context(), func(ctx context.Context, db *database, now time.Time) error {
				return p.export(ctx, db, selected, now, bodies, path)
			})
		},
	}
	selected = selectFlags(command, 0, "at most this `many` (default: no limit)", append(texts(states), anyState)...)
	flags := command.Flags()
	flags.BoolVar(&bodies, "bodies", false, "write bodies, headers and broker keys too")
	flags.StringVar(&path, "output", "", "write to this `file`, which must not be there yet (default: standard output)")
	return command
}

// export writes the selected messages to standard output, or to the file at path.
func (p *program) export(ctx context.Context, db *database, s *selection, now time.Time, bodies bool, path string) error {
	if path == "" {
		e := newExporter(p.stdout, bodies)
		return e.end(ctx, e.run(ctx, p, db, s, now))
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) //nolint:gosec // The path is the operator's own.
	if err != nil {
		return fmt.Errorf("make the file: %w", err)
	}
	e := newExporter(f, bodies)
	if err := e.end(ctx, errors.Join(e.run(ctx, p, db, s, now), f.Sync())); err != nil {
		return errors.Join(err, f.Close())
	}
	if err := f.Close(); err != nil {
		return fmt.Errorf("write the file: %w", err)
	}
	return p.show(&exportedView{Messages: e.count, File: path})
}

// exporter writes messages as JSON lines.
type exporter struct {
	to      *bufio.Writer
	encoder *json.Encoder
	bodies  bool
	count   int
	last    int64
}

func newExporter(w io.Writer, bodies bool) *exporter {
	e := &exporter{to: bufio.NewWriter(w), bodies: bodies}
	e.encoder = json.NewEncoder(e.to)
	e.encoder.SetEscapeHTML(false)
	return e
}

func (e *exporter) run(ctx context.Context, p *program, db *database, s *selection, now time.Time) error {
	return p.pages(ctx, db, s.filter(now), s.limit, func(rows []inbox.ParkedRecord) error {
		for i := range rows {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := e.row(ctx, p, db, &rows[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// row writes one message. The list that it comes from has no bodies.
func (e *exporter) row(ctx context.Context, p *program, db *database, listed *inbox.ParkedRecord) error {
	var whole *inbox.ParkedRecord
	var data any = newParkedEntry(listed)
	if e.bodies {
		err := p.bounded(ctx, func(ctx context.Context) (err error) {
			whole, err = db.inbox.GetParked(ctx, listed.ID)
			return err
		})
		if errors.Is(err, inbox.ErrNotFound) {
			return nil // Handled since.
		}
		if err != nil {
			return err
		}
		data = newParkedMessage(whole, true)
	}
	if err := e.encoder.Encode(data); err != nil {
		return fmt.Errorf("write the output: %w", err)
	}
	e.count, e.last = e.count+1, listed.ID
	return nil
}

// end writes what is buffered, and says how to go on when err ended it early.
func (e *exporter) end(ctx context.Context, err error) error {
	if flushed := e.to.Flush(); err == nil && flushed != nil {
		err = fmt.Errorf("write the output: %w", flushed)
	}
	if err == nil {
		return nil
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		err = fmt.Errorf("interrupted: %w", ctx.Err())
	}
	if e.last == 0 {
		return err
	}
	return fmt.Errorf("%w\nstopped after %s; the same command with --after %d writes the rest", err, counted(int64(e.count), "message"), e.last)
}

// exportedView is what "dead export" shows when it wrote a file.
type exportedView struct {
	Messages int    `json:"messages"`
	File     string `json:"file"`
}

func (v *exportedView) data() any { return v }

func (v *exportedView) text(w io.Writer) {
	_, _ = fmt.Fprintf(w, "%s written to %s\n", counted(int64(v.Messages), "message"), printable(v.File))
}
