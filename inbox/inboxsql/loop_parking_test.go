package inboxsql_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"testing"

	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/inbox/internal/parkrace"
)

// case D13: twins, conflicts, parking, feeding, crashes and stops at once.
func TestParkingRace(t *testing.T) {
	t.Parallel()
	bothStores(t, func(t *testing.T, store *inboxsql.Store, db *sql.DB) {
		if _, err := db.ExecContext(t.Context(), "create table race (id integer not null, entry text not null)"); err != nil {
			t.Fatal(err)
		}
		r := &parkrace.Race[*sql.Tx]{
			Store: store,
			Write: func(ctx context.Context, tx *sql.Tx, entry string) error {
				// Lanes run at once; of one lane the order is that of the numbers.
				_, err := tx.ExecContext(ctx, "insert into race (id, entry) select coalesce(max(id), 0) + 1, $1 from race where substr(entry, 8, 2) = $2", entry, entry[7:9])
				return err
			},
			Effects: func(ctx context.Context) (entries []string, err error) {
				rows, err := db.QueryContext(ctx, "select entry from race order by id")
				if err != nil {
					return nil, err
				}
				defer func() { _ = rows.Close() }()
				for rows.Next() {
					var e string
					if err := rows.Scan(&e); err != nil {
						return nil, err
					}
					entries = append(entries, e)
				}
				return entries, rows.Err()
			},
			Down: fmt.Errorf("crashed: %w", driver.ErrBadConn),
			Seed: 1, Rounds: 6,
		}
		r.Run(t)
	})
}
