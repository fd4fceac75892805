package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"
)

// environmentURL is the variable that stands in for --database.
const environmentURL = "ACKAFTER_DATABASE_URL"

const defaultTimeout = 30 * time.Second

const rootHelp = `ackafter looks after the inbox: it makes the tables, tells who handled a message key
and what became a dead letter, and retries or discards dead letters.

The database comes from --database or ` + environmentURL + `:
  postgres://user:password@host:port/database    PostgreSQL, with any option of pgx (?sslmode=...)
  sqlite:path/to/file.db                         a SQLite file
  file:path/to/file.db?...                       a SQLite file, as a SQLite URI
Prefer the variable when the URL holds a password: other users of the machine can
see command lines. PGPASSWORD and ~/.pgpass work too. No command prints a
password.

Exit codes:
  0  done
  1  failed: the database cannot be reached, tables are missing or of another version, ...
  2  wrong command line
  3  not found: no such key, no such parked message, nothing to retry or to discard`

const rootExample = `  export ` + environmentURL + `=postgres://app@db.internal/shop
  ackafter migrate up
  ackafter show 'A1|order.paid'
  ackafter dead list --consumer billing --json`

func (p *program) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:               "ackafter",
		Short:             "Look after the inbox: tables, handled keys, dead letters",
		Long:              rootHelp,
		Example:           rootExample,
		Args:              cobra.ArbitraryArgs,
		RunE:              needsCommand,
		SilenceErrors:     true,
		SilenceUsage:      true,
		PersistentPreRunE: func(*cobra.Command, []string) error { return p.checkFlags() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &usageError{err} })
	flags := root.PersistentFlags()
	flags.StringVar(&p.databaseURL, "database", "", "`URL` of the database (default: $"+environmentURL+")")
	flags.StringVar(&p.schema, "schema", "", "PostgreSQL `schema` of the tables (default: the first of search_path)")
	flags.BoolVar(&p.json, "json", false, "print JSON")
	flags.DurationVar(&p.timeout, "timeout", defaultTimeout, "give up after this time (dead retry, discard and export: each call of the database); must be positive")
	root.AddCommand(p.migrateCommand(), p.checkCommand(), p.showCommand(), p.deadCommand(), p.versionCommand())
	return root
}

func (p *program) checkFlags() error {
	if p.timeout <= 0 {
		return usagef("--timeout %v: must be positive", p.timeout)
	}
	return nil
}

// needsCommand is the work of a command that only has commands below it.
func needsCommand(command *cobra.Command, args []string) error {
	if len(args) == 0 {
		command.SetOut(command.ErrOrStderr())
		return errors.Join(command.Help(), usagef("a command is missing"))
	}
	err := fmt.Errorf("unknown command %q", args[0])
	command.SuggestionsMinimumDistance = 2
	if similar := command.SuggestionsFor(args[0]); len(similar) > 0 {
		err = fmt.Errorf("%w; did you mean %q?", err, similar[0])
	}
	return &usageError{err}
}

// arguments checks that there are exactly the arguments that are named.
func arguments(names ...string) cobra.PositionalArgs {
	return func(_ *cobra.Command, args []string) error {
		switch {
		case len(args) < len(names):
			return usagef("the argument %s is missing", names[len(args)])
		case len(args) > len(names):
			return usagef("unexpected argument %q", args[len(names)])
		}
		return nil
	}
}

// complete offers values when the shell completes flag.
func complete(command *cobra.Command, flag string, values ...string) {
	err := command.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	if err != nil {
		panic(err) // Only a flag that was not defined gets here.
	}
}
