package inboxpgx_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/ackafter/ackafter/inbox/internal/parkrace"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
)

// case D13: twins, conflicts, parking, feeding, crashes and stops at once.
func TestParkingRace(t *testing.T) {
	t.Parallel()
	for _, isolation := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(isolation), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres)).Pool(t, nil)
			if _, err := pool.Exec(t.Context(), `create table effects (id bigint generated always as identity primary key, entry text not null)`); err != nil {
				t.Fatal(err)
			}
			r := &parkrace.Race[pgx.Tx]{
				Store: pgxharness.NewStore(t, pool, isolation),
				Write: func(ctx context.Context, tx pgx.Tx, entry string) error {
					_, err := tx.Exec(ctx, `insert into effects (entry) values ($1)`, entry)
					return err
				},
				Effects: func(ctx context.Context) ([]string, error) {
					rows, err := pool.Query(ctx, `select entry from effects order by id`)
					if err != nil {
						return nil, err
					}
					return pgx.CollectRows(rows, pgx.RowTo[string])
				},
				Down: fmt.Errorf("crashed: %w", &pgconn.PgError{Code: "57P01", Message: "terminating connection"}),
				Seed: 1, Rounds: 10,
			}
			r.Run(t)
		})
	}
}
