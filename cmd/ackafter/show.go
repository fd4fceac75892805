package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/inbox"
)

const showHelp = `Tell who handled a message key first: which consumer, when, by which worker, from
which position of the source, with what result. Parked and dead messages of the
key are listed, too.

KEY is the business key as it is stored. The parts of a key are joined by "|" (a
"|" or "\" inside of a part has a "\" in front of it), so quote it for the shell.
All consumers and tenants are looked at. A stored result is shown in one line;
--full shows all of it. Times are UTC.

The exit code is 3 when nothing is known of the key.`

// showFlags are the flags of "show".
type showFlags struct {
	consumer, tenant string
	full             bool
}

func (p *program) showCommand() *cobra.Command {
	var f showFlags
	command := &cobra.Command{
		Use:   "show KEY",
		Short: "Tell who handled a message key first, when, from where, with what result",
		Long:  showHelp,
		Example: `  ackafter show 'A1|order.paid'
  ackafter show 'A1|order.paid' --consumer billing --full
  ackafter show --json -- '-17|refund'`,
		Args: arguments("KEY"),
		RunE: func(command *cobra.Command, args []string) error {
			return p.withInbox(command.Context(), func(ctx context.Context, db *database, now time.Time) error {
				return p.showKey(ctx, db, args[0], f, now)
			})
		},
	}
	flags := command.Flags()
	flags.StringVar(&f.consumer, "consumer", "", "only this `consumer`'s (default: all)")
	flags.StringVar(&f.tenant, "tenant", "", "only this `tenant`'s (default: all)")
	flags.BoolVar(&f.full, "full", false, "show the stored result whole (JSON output always does)")
	return command
}

// withInbox is withDatabase for commands that read the inbox: the tables have to
// be right.
func (p *program) withInbox(ctx context.Context, do func(context.Context, *database, time.Time) error) error {
	return p.withDatabase(ctx, func(ctx context.Context, db *database) error {
		now, err := p.enter(ctx, db)
		if err != nil {
			return err
		}
		return do(ctx, db, now)
	})
}

// withOpenInbox is withInbox for commands that may take long: opening has the
// time of --timeout, and do bounds each of its calls.
func (p *program) withOpenInbox(ctx context.Context, do func(context.Context, *database, time.Time) error) error {
	address, err := p.address()
	if err != nil {
		return err
	}
	var (
		db  *database
		now time.Time
	)
	err = p.bounded(ctx, func(ctx context.Context) (err error) {
		if db, err = openDatabase(ctx, address); err == nil {
			now, err = p.enter(ctx, db)
		}
		return err
	})
	if db != nil {
		defer db.close()
	}
	if err != nil {
		return err
	}
	return do(ctx, db, now)
}

// enter checks the tables and returns the time.
func (p *program) enter(ctx context.Context, db *database) (time.Time, error) {
	if err := db.inbox.Check(ctx); err != nil {
		return time.Time{}, err
	}
	if p.watch != nil {
		db.inbox = p.watch(db.inbox)
	}
	if p.now != nil {
		return p.now(), nil
	}
	return db.clock(ctx)
}

func (p *program) showKey(ctx context.Context, db *database, key string, f showFlags, now time.Time) error {
	records, err := db.inbox.Find(ctx, key)
	if err != nil {
		return err
	}
	records = slices.DeleteFunc(records, func(r inbox.Record) bool {
		return f.consumer != "" && r.Consumer != f.consumer || f.tenant != "" && r.Tenant != f.tenant
	})
	parked, err := db.inbox.ListParked(ctx, inbox.ParkedFilter{MessageKey: key, Consumer: f.consumer, Tenant: f.tenant})
	if err != nil {
		return err
	}
	v := &keyView{key: key, records: records, parked: parked, now: now, full: f.full}
	if len(records)+len(parked) > 0 {
		return p.show(v)
	}
	consumers, err := db.consumers(ctx)
	if err != nil {
		return err
	}
	if p.json {
		if err := p.show(v); err != nil {
			return err
		}
	}
	return &notFoundError{unknownKey(key, f, consumers)}
}

// unknownKey says that nothing is known of key and helps to find out why.
func unknownKey(key string, f showFlags, consumers []consumer) string {
	var b strings.Builder
	fmt.Fprintf(&b, "nothing is known of the key %q", shortened(key, 200))
	if f.consumer != "" {
		fmt.Fprintf(&b, " of consumer %q", f.consumer)
	}
	if f.tenant != "" {
		fmt.Fprintf(&b, " of tenant %q", f.tenant)
	}
	b.WriteString(": it was never handled, or its window is over and it was purged")
	if len(consumers) == 0 {
		b.WriteString("\nNo consumer has ever run with this database.")
		return b.String()
	}
	b.WriteString("\nKeys are looked up exactly as stored. Consumers, and what their keys are made of:\n")
	t := newTable(&b)
	for _, c := range consumers {
		t.row("  "+c.name, c.definition)
	}
	t.flush()
	return b.String()
}

// keyView is what "show" shows.
type keyView struct {
	key     string
	records []inbox.Record
	parked  []inbox.ParkedRecord
	now     time.Time
	full    bool
}

func (v *keyView) data() any {
	data := struct {
		Key     string        `json:"key"`
		Records []record      `json:"records"`
		Parked  []parkedEntry `json:"parked"`
	}{v.key, []record{}, []parkedEntry{}}
	for i := range v.records {
		data.Records = append(data.Records, newRecord(&v.records[i], v.now))
	}
	for i := range v.parked {
		data.Parked = append(data.Parked, newParkedEntry(&v.parked[i]))
	}
	return data
}

func (v *keyView) text(w io.Writer) {
	_, _ = fmt.Fprintf(w, "key %s\n", printable(v.key))
	if len(v.records) == 0 {
		_, _ = fmt.Fprintln(w, "\nNo consumer has handled it.")
	}
	past := 0
	for i := range v.records {
		_, _ = fmt.Fprintln(w)
		writeRecord(w, &v.records[i], v.now, v.full)
		if expired(&v.records[i], v.now) {
			past++
		}
	}
	if past > 0 {
		_, _ = fmt.Fprintf(w, "\nRows past their window: %d of %d. A message with this key would run again there.\n", past, len(v.records))
	}
	if len(v.parked) > 0 {
		_, _ = fmt.Fprint(w, "\nparked messages with this key\n")
		writeParkedTable(w, v.parked, v.now)
	}
}
