//go:build unix

package servers_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/integration_test/servers"
)

func TestOwnPostgres(t *testing.T) {
	t.Parallel()
	own := servers.OwnPostgres(t)
	answers := func(limit time.Duration) error {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		connection, err := pgx.Connect(ctx, own.Address)
		if err != nil {
			return err
		}
		defer connection.Close(ctx)
		_, err = connection.Exec(ctx, "create table if not exists t ()")
		return err
	}
	if err := answers(time.Minute); err != nil {
		t.Fatal(err)
	}
	open := connect(t, own.Address)

	own.Freeze(t)
	if err := answers(time.Second); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a new connection to the frozen server: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := open.Ping(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an open connection to the frozen server: %v", err)
	}
	own.Thaw(t)
	if err := answers(time.Minute); err != nil {
		t.Error(err)
	}

	own.Crash(t)
	if err := answers(time.Second); err == nil {
		t.Error("the crashed server answers")
	}
	own.Start(t)
	if err := answers(time.Minute); err != nil {
		t.Error(err)
	}
}
