package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/migrations"
)

const migrateHelp = `Make, check and drop the tables of the inbox.

The tables go into the first schema of the database's search_path, or into that
of --schema. With --schema, up and down need a connection to the server itself: a
pooler does not keep search_path.

The migrations are plain SQL: "ackafter migrate sql" prints them for psql, sqlite3,
goose and golang-migrate. Whichever tool makes the tables, table inbox_schema holds
their version and this command goes on from there. What it did itself it also
records in table ` + migrations.GooseTable + `, in the form of goose.`

func (p *program) migrateCommand() *cobra.Command {
	migrate := &cobra.Command{
		Use:   "migrate",
		Short: "Make, check and drop the tables of the inbox",
		Long:  migrateHelp,
		Args:  cobra.ArbitraryArgs,
		RunE:  needsCommand,
	}
	migrate.AddCommand(p.migrateUpCommand(), p.migrateDownCommand(), p.migrateStatusCommand(), p.migrateSQLCommand())
	return migrate
}

func (p *program) migrateUpCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "up",
		Short: "Make the tables, or bring them to the version of this release",
		Long: `Make the tables, or bring them to the version that this release needs.

It changes nothing when they have that version already. Each version is one
transaction. Several of these commands may run at once, for instance one in every
instance of a service that starts: one does the work, the others wait for it. A
missing schema (--schema) or SQLite file is made, too.`,
		Example: `  ackafter migrate up --database postgres://app@db.internal/shop
  ackafter migrate up --database postgres://app@db.internal/shop --schema inbox
  ackafter migrate up --database sqlite:orders.db`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			address, err := p.address()
			if err != nil {
				return err
			}
			if err := address.makeFile(); err != nil {
				return err
			}
			return p.with(command.Context(), address.forMigrations(), func(ctx context.Context, db *database) error {
				from, err := db.makeTables(ctx)
				if err != nil {
					return err
				}
				return p.show(&migratedView{Database: db.label, From: from, To: migrations.Version})
			})
		},
	}
}

func (p *program) migrateStatusCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "status",
		Short: "Tell which version the tables have and which one is needed",
		Long: `Tell which version the tables have and which one this release needs.

The exit code is 0 when they are the same, else 1. It changes nothing in the
database.`,
		Example: `  ackafter migrate status
  ackafter migrate status --json && start-the-service`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			return p.withDatabase(command.Context(), func(ctx context.Context, db *database) error {
				have, err := db.tablesVersion(ctx, db.sql)
				if err != nil {
					return err
				}
				shown := p.show(&statusView{Database: db.label, Have: have, Need: migrations.Version, Current: have == migrations.Version})
				return errors.Join(shown, checkVersion(have))
			})
		},
	}
}

func (p *program) migrateDownCommand() *cobra.Command {
	var yes bool
	down := &cobra.Command{
		Use:   "down",
		Short: "Drop the tables, with every stored key and parked message",
		Long: `Drop the tables of the inbox, with every stored key and every parked message.

After it every message counts as new: one that comes again runs again. Stop the
consumers first. The command says how much there is and asks; --yes answers. The
schema and a SQLite file stay.`,
		Example: `  ackafter migrate down
  ackafter migrate down --yes`,
		Args: arguments(),
		RunE: func(command *cobra.Command, _ []string) error {
			return p.migrateDown(command.Context(), yes)
		},
	}
	down.Flags().BoolVar(&yes, "yes", false, "do not ask")
	return down
}

func (p *program) migrateDown(ctx context.Context, yes bool) error {
	address, err := p.address()
	if err != nil {
		return err
	}
	dropped := &droppedView{}
	err = p.with(ctx, address, func(ctx context.Context, db *database) (err error) {
		dropped.Database = db.label
		if dropped.From, err = db.tablesVersion(ctx, db.sql); err != nil || dropped.From == 0 {
			return err
		}
		if dropped.From > migrations.Version {
			return checkVersion(dropped.From)
		}
		dropped.rowCounts, err = db.countRows(ctx)
		return err
	})
	if err != nil {
		return err
	}
	if dropped.From == 0 {
		return p.show(dropped)
	}
	// The question is outside of the time limit and holds no connection.
	if !yes {
		if err := p.confirm(ctx, dropped.question()); err != nil {
			return err
		}
	}
	return p.with(ctx, address.forMigrations(), func(ctx context.Context, db *database) error {
		if err := db.dropTables(ctx); err != nil {
			return err
		}
		return p.show(dropped)
	})
}

// confirm asks question on standard error and returns nil when the answer is
// yes.
func (p *program) confirm(ctx context.Context, question string) error {
	_, _ = fmt.Fprintf(p.stderr, "%s\nType \"yes\" to go on: ", question)
	answers := make(chan string, 1)
	// Nothing can interrupt a read from a terminal. After a signal the goroutine
	// ends with the process.
	go func() {
		line, _ := bufio.NewReader(p.stdin).ReadString('\n')
		answers <- strings.TrimSpace(line)
	}()
	select {
	case <-ctx.Done():
		_, _ = fmt.Fprintln(p.stderr)
		return errors.New("interrupted; nothing was changed")
	case answer := <-answers:
		if answer == "" {
			_, _ = fmt.Fprintln(p.stderr)
		}
		if answer != "yes" {
			return errors.New(`not confirmed; nothing was changed (in scripts: --yes)`)
		}
		return nil
	}
}

// migratedView is what "migrate up" shows.
type migratedView struct {
	Database string `json:"database"`
	From     int    `json:"from"`
	To       int    `json:"to"`
}

func (v *migratedView) data() any { return v }

func (v *migratedView) text(w io.Writer) {
	if v.From == v.To {
		_, _ = fmt.Fprintf(w, "%s: the inbox tables have version %d already\n", v.Database, v.To)
		return
	}
	_, _ = fmt.Fprintf(w, "%s: inbox tables brought from version %d to %d\n", v.Database, v.From, v.To)
}

// statusView is what "migrate status" shows.
type statusView struct {
	Database string `json:"database"`
	Have     int    `json:"have"`
	Need     int    `json:"need"`
	Current  bool   `json:"current"`
}

func (v *statusView) data() any { return v }

func (v *statusView) text(w io.Writer) {
	t := newTable(w)
	t.row("database", v.Database)
	have := fmt.Sprint(v.Have)
	if v.Have == 0 {
		have = "none, there are no tables"
	}
	t.row("have version", have)
	t.row("need version", fmt.Sprint(v.Need))
	t.flush()
}

// droppedView is what "migrate down" shows.
type droppedView struct {
	Database string `json:"database"`
	From     int    `json:"from"`
	rowCounts
}

func (v *droppedView) data() any { return v }

func (v *droppedView) question() string {
	return fmt.Sprintf("This drops the inbox tables of %s: %s and %s.\n"+
		"After it every message counts as new: one that comes again runs again.",
		v.Database, counted(v.Keys, "stored key"), counted(v.Parked, "parked message"))
}

func (v *droppedView) text(w io.Writer) {
	if v.From == 0 {
		_, _ = fmt.Fprintf(w, "%s: there are no inbox tables\n", v.Database)
		return
	}
	_, _ = fmt.Fprintf(w, "%s: dropped the inbox tables with %s and %s\n",
		v.Database, counted(v.Keys, "stored key"), counted(v.Parked, "parked message"))
}

// counted says n things, where countRows stops at countLimit.
func counted(n int64, thing string) string {
	number := grouped(n)
	if n >= countLimit {
		number = "at least " + number
	}
	if n != 1 {
		thing += "s"
	}
	return number + " " + thing
}
