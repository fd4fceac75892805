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

const checkHelp = `Look at the settings of the database that weaken what the inbox promises, or bring a
consumer to a stop: durability, time limits, standbys, a pooler in between, privileges.
Nothing is changed. docs/operations.md explains each code.

Settings belong to roles, databases and connections: use the URL that the service has.
Of a SQLite file only what the file itself holds can be seen. What a service sees
itself, it logs at its start as "inbox: check".

The exit code is 1 when there is a finding of severity "error".`

// defaultHandlerTimeout is that of inbox.Config.
const defaultHandlerTimeout = 30 * time.Second

func (p *program) checkCommand() *cobra.Command {
	var r inbox.AdviceRequest
	command := &cobra.Command{
		Use:   "check",
		Short: "Look for settings of the database that weaken the promise",
		Long:  checkHelp,
		Example: `  ackafter check
  ackafter check --consumer billing --handler-timeout 2m
  ackafter check --json | jq -r '.findings[] | select(.severity == "error").code'`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			return p.withDatabase(command.Context(), func(ctx context.Context, db *database) error {
				return p.check(ctx, db, r)
			})
		},
	}
	flags := command.Flags()
	flags.StringVar(&r.Consumer, "consumer", "", "look at the parked messages of this `consumer`, too (default: none)")
	flags.DurationVar(&r.HandlerTimeout, "handler-timeout", defaultHandlerTimeout, "HandlerTimeout of the service; 0 or less: none")
	return command
}

// errFindings makes the exit code. What was found is printed already.
var errFindings = errors.New("the promise does not hold with these settings")

func (p *program) check(ctx context.Context, db *database, r inbox.AdviceRequest) error {
	storeErr := db.inbox.Check(ctx)
	found, err := db.inbox.Advise(ctx, r)
	if err != nil {
		return err
	}
	if storeErr == nil && r.Consumer != "" {
		if err := db.knows(ctx, r.Consumer); err != nil {
			return err
		}
	}
	inbox.SortFindings(found)
	if err := p.show(checkView(found)); err != nil {
		return err
	}
	if storeErr != nil {
		return storeErr
	}
	for _, f := range found {
		if f.Severity == inbox.SeverityError {
			return errFindings
		}
	}
	return nil
}

// knows returns an error when no consumer of that name has run.
func (db *database) knows(ctx context.Context, name string) error {
	query := "select count(*) from " + db.table("inbox_consumers") + " where consumer = $1"
	var n int
	if err := db.sql.QueryRowContext(ctx, query, name).Scan(&n); err != nil {
		return fmt.Errorf("look for the consumer: %w", err)
	}
	if n == 0 {
		return &notFoundError{fmt.Sprintf("no consumer %q has ever run with this database", name)}
	}
	return nil
}

// checkView is what "check" shows.
type checkView []inbox.Finding

// finding is an inbox.Finding as JSON.
type finding struct {
	Severity inbox.Severity `json:"severity"`
	Code     string         `json:"code"`
	Setting  string         `json:"setting"`
	Value    string         `json:"value"`
	Meaning  string         `json:"meaning"`
	Advice   string         `json:"advice"`
}

func (v checkView) data() any {
	data := struct {
		Findings []finding `json:"findings"`
	}{Findings: []finding{}}
	for _, f := range v {
		data.Findings = append(data.Findings, finding{f.Severity, f.Code, f.Setting, f.Value, f.Meaning, f.Advice})
	}
	return data
}

func (v checkView) text(w io.Writer) {
	if len(v) == 0 {
		_, _ = fmt.Fprintln(w, "Nothing was found.")
		return
	}
	t := newTable(w)
	t.row("SEVERITY", "CODE", "SETTING", "VALUE")
	for _, f := range v {
		t.row(string(f.Severity), f.Code, f.Setting, f.Value)
	}
	t.flush()
	for _, f := range v {
		_, _ = fmt.Fprintf(w, "\n%s: %s\n  To do: %s\n", printable(f.Setting), printable(f.Meaning), printable(f.Advice))
	}
}
