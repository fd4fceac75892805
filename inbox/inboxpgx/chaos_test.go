package inboxpgx_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/inbox/internal/pgtest"
	"github.com/ackafter/ackafter/inbox/internal/pgxharness"
	"github.com/ackafter/ackafter/keyfunc"
)

// payment is the body of the messages.
type payment struct {
	ID, Account string
	Cents       int
}

// payments go to one account, from several payers: in several lanes.
func payments() []*broker.Message {
	var ms []*broker.Message
	for i, payer := range []string{"a", "b", "a", "c", "", "b"} {
		ms = append(ms, &broker.Message{
			Key: []byte(payer), Body: fmt.Appendf(nil, `{"id":"p%d","account":"x","cents":%d}`, i+1, 1<<i),
		})
	}
	return ms
}

// bank is a schema that every round finds empty.
type bank struct{ pool *pgxpool.Pool }

func newBank(t *testing.T) *bank {
	t.Helper()
	b := &bank{pgtest.Schema(t, pgtest.URL(t, pgtest.Postgres)).Pool(t, nil)}
	if _, err := b.pool.Exec(t.Context(), `create table payments (id text, cents int);
		create table balances (account text primary key, cents int)`); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bank) open(isolation pgx.TxIsoLevel, h inbox.Handler[pgx.Tx]) func(t testing.TB) *inboxtest.World[pgx.Tx] {
	return func(t testing.TB) *inboxtest.World[pgx.Tx] {
		if _, err := b.pool.Exec(t.Context(), `truncate inbox, inbox_parked, inbox_consumers, payments, balances;
			insert into balances values ('x', 0)`); err != nil {
			t.Fatal(err)
		}
		return &inboxtest.World[pgx.Tx]{Store: pgxharness.NewStore(t, b.pool, isolation), Handler: h, State: b.state}
	}
}

func (b *bank) state(ctx context.Context) (any, error) {
	rows, err := b.pool.Query(ctx, `select id || ' ' || cents from payments union all
		select 'balance ' || cents from balances order by 1`)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[string])
}

func enter(ctx context.Context, tx pgx.Tx, p payment) error {
	_, err := tx.Exec(ctx, `insert into payments values ($1, $2)`, p.ID, p.Cents)
	return err
}

// addUp lets the database add.
func addUp(ctx context.Context, tx pgx.Tx, _ *inbox.Message, p payment) error {
	if err := enter(ctx, tx, p); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, `update balances set cents = cents + $2 where account = $1`, p.Account, p.Cents)
	return err
}

// readAndWrite adds by itself what it read by query.
func readAndWrite(query string) inbox.Handler[pgx.Tx] {
	return inbox.JSON(func(ctx context.Context, tx pgx.Tx, _ *inbox.Message, p payment) error {
		var cents int
		if err := tx.QueryRow(ctx, query, p.Account).Scan(&cents); err != nil {
			return err
		}
		if err := enter(ctx, tx, p); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, `update balances set cents = $2 where account = $1`, p.Account, cents+p.Cents)
		return err
	})
}

const (
	readBalance = `select cents from balances where account = $1`
	lockBalance = readBalance + ` for update`
)

func chaosSeeds(n int) int {
	if os.Getenv("ACKAFTER_TEST_SOAK") == "1" {
		return 20 * n
	}
	return n
}

// Handlers that are safe under the isolation level stand all faults, in the modes
// of transaction control that pgx has.
func TestChaosPasses(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		isolation pgx.TxIsoLevel
		handler   inbox.Handler[pgx.Tx]
	}{
		"the database adds":                 {"", inbox.JSON(addUp)},
		"reads with a lock":                 {"", readAndWrite(lockBalance)},
		"reads without, under one snapshot": {pgx.RepeatableRead, readAndWrite(readBalance)},
		"reads without, under serializable": {pgx.Serializable, readAndWrite(readBalance)},
		"a batch, and a transaction within": {"", inbox.JSON(addUpNested)},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t)
			inboxtest.Chaos(t, b.open(row.isolation, row.handler), keyfunc.JSON("id"), payments(), &inboxtest.ChaosConfig{Rounds: chaosSeeds(40)})
		})
	}
}

// addUpNested sends its statements as a batch, in a nested transaction.
func addUpNested(ctx context.Context, tx pgx.Tx, _ *inbox.Message, p payment) error {
	return pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		q := &pgx.Batch{}
		q.Queue(`insert into payments values ($1, $2)`, p.ID, p.Cents)
		q.Queue(`update balances set cents = cents + $2 where account = $1`, p.Account, p.Cents)
		return tx.SendBatch(ctx, q).Close()
	})
}

// reports is a testing.TB that keeps failures.
type reports struct {
	testing.TB
	texts []string
}

func (r *reports) Errorf(format string, args ...any) {
	r.texts = append(r.texts, fmt.Sprintf(format, args...))
}

// What only a database with several writers shows is found, and found again.
func TestChaosFinds(t *testing.T) {
	t.Parallel()
	for name, handler := range map[string]func(b *bank) inbox.Handler[pgx.Tx]{
		"lost update": func(*bank) inbox.Handler[pgx.Tx] { return readAndWrite(readBalance) },
		"another connection": func(b *bank) inbox.Handler[pgx.Tx] {
			return inbox.JSON(func(ctx context.Context, tx pgx.Tx, m *inbox.Message, p payment) error {
				if _, err := b.pool.Exec(ctx, `insert into payments values ($1, 0)`, p.ID); err != nil {
					return err
				}
				return addUp(ctx, tx, m, p)
			})
		},
		"error taken for there already": func(*bank) inbox.Handler[pgx.Tx] {
			return inbox.JSON(func(ctx context.Context, tx pgx.Tx, m *inbox.Message, p payment) error {
				if err := addUp(ctx, tx, m, p); err != nil && !errors.Is(err, context.Canceled) {
					return inbox.Permanent(err)
				}
				return nil
			})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t)
			open := b.open("", handler(b))
			find := func(cfg *inboxtest.ChaosConfig) string {
				r := &reports{TB: t}
				inboxtest.Chaos(r, open, keyfunc.JSON("id"), payments(), cfg)
				return strings.Join(r.texts, "\n")
			}
			report := find(nil)
			seed := regexp.MustCompile(`chaos: seed (\d+): `).FindStringSubmatch(report)
			if seed == nil {
				t.Fatalf("found %q, want a seed", report)
			}
			t.Log(report)
			n, err := strconv.ParseUint(seed[1], 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			for range 5 { // Another process may be too slow to overlap on a busy machine.
				if strings.Contains(find(&inboxtest.ChaosConfig{Seed: n, Rounds: 1}), seed[0]) {
					return
				}
			}
			t.Error("the seed finds nothing again")
		})
	}
}
