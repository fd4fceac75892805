package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
)

// numbers are what one row of the table shows.
type numbers struct {
	first, replays, conflicts int // outcomes of this step
	charges, dead             int // rows in the database after it
}

// table prints and checks the rows.
type table struct {
	out io.Writer
	db  *sql.DB
	off int // rows with wrong numbers
	sum int // messages that were done with
}

func (t *table) head() {
	fmt.Fprintln(t.out, "Ten orders, each delivered three times. The handler inserts one row into charges.")
	fmt.Fprintln(t.out)
	fmt.Fprintf(t.out, "%-50s %6s %7s %9s | %8s %5s\n", "step", "first", "replay", "conflict", "charges", "dead")
}

// row prints what happened and checks it against what must have happened.
func (t *table) row(ctx context.Context, what string, n, want numbers) error {
	if err := t.db.QueryRowContext(ctx, "select count(*) from charges").Scan(&n.charges); err != nil {
		return err
	}
	if err := t.db.QueryRowContext(ctx, "select count(*) from inbox_parked where state = 'dead'").Scan(&n.dead); err != nil {
		return err
	}
	t.sum += n.first + n.replays + n.conflicts
	mark := ""
	if n != want {
		mark = fmt.Sprintf("   <- expected %+v", want)
		t.off++
	}
	fmt.Fprintf(t.out, "%-50s %6d %7d %9d | %8d %5d%s\n", what, n.first, n.replays, n.conflicts, n.charges, n.dead, mark)
	return nil
}

// end checks that each order was charged exactly once.
func (t *table) end(ctx context.Context) error {
	var charged, once int
	err := t.db.QueryRowContext(ctx, "select count(*), coalesce(sum(n = 1), 0) from (select count(*) as n from charges group by order_id)").Scan(&charged, &once)
	if err != nil {
		return err
	}
	fmt.Fprintln(t.out)
	if t.off > 0 || charged != 10 || once != 10 {
		return fmt.Errorf("%d rows are off; %d orders charged, %d of them once", t.off, charged, once)
	}
	fmt.Fprintf(t.out, "10 orders, 10 charges: each exactly once, over %d handled deliveries, two kills and a replay.\n", t.sum)
	fmt.Fprintln(t.out, "The second body of order-5 waits as a dead letter for a person; nothing was charged for it.")
	return nil
}
