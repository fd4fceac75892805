package inboxtest_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

type (
	handler = inbox.Handler[*sql.Tx]
	world   = inboxtest.World[*sql.Tx]
)

// transfer is the body of the messages.
type transfer struct {
	ID      string
	Account string
	Cents   int
}

// transfers returns messages in as many lanes as there are accounts.
func transfers() []*broker.Message {
	var ms []*broker.Message
	for i, account := range []string{"a", "b", "a", "c", "b", "a"} {
		ms = append(ms, &broker.Message{
			Key:  []byte(account),
			Body: fmt.Appendf(nil, `{"id":"t%d","account":"%s","cents":%d}`, i+1, account, 1<<i),
		})
	}
	return ms
}

const bankTables = `;
	create table entries (id text, account text, cents integer, note text);
	create table balances (account text primary key, cents integer)`

// mailbox is a system outside of the database.
type mailbox struct {
	mu   sync.Mutex
	sent []string
}

func (b *mailbox) send(s string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sent = append(b.sent, s)
}

func (b *mailbox) list() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(slices.Values(b.sent))
}

// bank is the database of one round on SQLite.
type bank struct {
	db   *sql.DB
	mail mailbox
}

// emptyBank is the file of a bank that nothing was done to: copying it is quicker
// than making the tables each time.
var emptyBank = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "inboxtest")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	file := filepath.Join(dir, "bank.db")
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(file))
	if err != nil {
		return nil, err
	}
	tables, err := migrations.Script(migrations.SQLite())
	if err == nil {
		_, err = db.ExecContext(context.Background(), tables+bankTables)
	}
	if err := errors.Join(err, db.Close()); err != nil {
		return nil, err
	}
	return os.ReadFile(file)
})

func openBank(t testing.TB) (*bank, *inboxsql.Store) {
	t.Helper()
	empty, err := emptyBank()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "bank.db")
	if err := os.WriteFile(file, empty, 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(file))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	store, err := inboxsql.New(db)
	if err != nil {
		t.Fatal(err)
	}
	return &bank{db: db}, store
}

func (b *bank) state(ctx context.Context) (any, error) {
	const all = `select 'entry ' || id || ' ' || account || ' ' || cents || ' ' || note from entries
		union all select 'balance ' || account || ' ' || cents from balances order by 1`
	rows, err := b.db.QueryContext(ctx, all)
	if err != nil {
		return nil, err
	}
	defer func() { _ = rows.Close() }()
	var lines []string
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			return nil, err
		}
		lines = append(lines, line)
	}
	return append(lines, b.mail.list()...), rows.Err()
}

// book is a good handler; note is written with the entry.
func book(ctx context.Context, tx *sql.Tx, v transfer, note any) error {
	if _, err := tx.ExecContext(ctx, "insert into entries values (?, ?, ?, ?)", v.ID, v.Account, v.Cents, fmt.Sprint(note)); err != nil {
		return err
	}
	_, err := tx.ExecContext(ctx, `insert into balances values (?, ?)
		on conflict (account) do update set cents = cents + excluded.cents`, v.Account, v.Cents)
	return err
}

// booking makes a handler.
func booking(fn func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error) handler {
	return inbox.JSON(fn)
}

func good(ctx context.Context, tx *sql.Tx, _ *inbox.Message, v transfer) error {
	return book(ctx, tx, v, "-")
}

// tryChaos returns what Chaos reports.
func tryChaos(t *testing.T, key keyfunc.Func, cfg *inboxtest.ChaosConfig, open func(b *bank) *world) string {
	t.Helper()
	return failures(t, func(tb inboxtest.TB) {
		inboxtest.Chaos(tb.(testing.TB), func(t testing.TB) *world {
			b, store := openBank(t)
			w := open(b)
			w.Store, w.State = store, b.state
			return w
		}, key, transfers(), cfg)
	})
}

// seeds is how many schedules good handlers have to stand.
func seeds(n int) int {
	if os.Getenv("ACKAFTER_TEST_SOAK") == "1" {
		return 100 * n
	}
	return n
}

// A good handler stands everything, one message at a time and in bulk, and one
// that refuses messages for good does, too.
func TestChaosPasses(t *testing.T) {
	t.Parallel()
	for name, row := range map[string]struct {
		w   *world
		cfg inboxtest.ChaosConfig
	}{
		"single":    {w: &world{Handler: booking(good)}, cfg: inboxtest.ChaosConfig{Rounds: seeds(60)}},
		"no order":  {w: &world{Handler: booking(good)}, cfg: inboxtest.ChaosConfig{Faults: inboxtest.DefaultFaults | inboxtest.FaultDisorder}},
		"one lane":  {w: &world{Handler: booking(good)}, cfg: inboxtest.ChaosConfig{Lane: func(*broker.Message) string { return "all" }}},
		"one order": {w: &world{Handler: booking(inOrder)}, cfg: inboxtest.ChaosConfig{Lane: func(*broker.Message) string { return "all" }}},
		"refuses": {w: &world{Handler: booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
			if v.ID == "t2" || v.ID == "t3" {
				return inbox.Permanent(errors.Join(errors.New("closed account"), good(ctx, tx, m, v)))
			}
			return good(ctx, tx, m, v)
		})}},
		"asks for time": {w: &world{Handler: booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
			return inbox.RetryAfter(good(ctx, tx, m, v), time.Hour)
		})}},
		"skips": {w: &world{Handler: booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
			if err := good(ctx, tx, m, v); err != nil {
				return err
			}
			return inbox.Skip("nothing more to do")
		})}},
		"bulk": {w: &world{Bulk: func(ctx context.Context, tx *sql.Tx, ms []*inbox.Message) error {
			for _, m := range ms {
				if err := booking(good)(ctx, tx, m); err != nil {
					return err
				}
			}
			return nil
		}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			row.cfg.Rounds = cmp.Or(row.cfg.Rounds, seeds(12))
			if report := tryChaos(t, keyfunc.JSON("id"), &row.cfg, func(*bank) *world { w := *row.w; return &w }); report != "" {
				t.Error(report)
			}
		})
	}
}

// inOrder numbers the entries: it needs the order of all messages.
func inOrder(ctx context.Context, tx *sql.Tx, _ *inbox.Message, v transfer) error {
	var n int
	if err := tx.QueryRowContext(ctx, "select count(*) from entries").Scan(&n); err != nil {
		return err
	}
	return book(ctx, tx, v, n)
}

// lastOfAccount keeps the last entry of an account: it needs the order of a lane.
func lastOfAccount(ctx context.Context, tx *sql.Tx, _ *inbox.Message, v transfer) error {
	_, err := tx.ExecContext(ctx, `insert into balances values (?, ?)
		on conflict (account) do update set cents = excluded.cents`, v.Account, v.Cents)
	return err
}

// sabotage is a handler that is not safe.
type sabotage struct {
	name string
	key  keyfunc.Func // nil: the right one
	cfg  inboxtest.ChaosConfig
	open func(b *bank) *world
	want string // in the report
	loud bool   // found without any fault
}

func unsafe(fn func(b *bank) handler) func(b *bank) *world {
	return func(b *bank) *world { return &world{Handler: fn(b)} }
}

var counter atomic.Int64 // of a handler that counts in the process

const differs = "the state is not that of an undisturbed run"

func sabotages() []sabotage {
	return []sabotage{
		{name: "mail outside of the transaction", want: differs, open: unsafe(func(b *bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				b.mail.send(v.ID)
				return good(ctx, tx, m, v)
			})
		})},
		{name: "mail after the work", want: differs, open: unsafe(func(b *bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				err := good(ctx, tx, m, v)
				if err == nil {
					b.mail.send(v.ID)
				}
				return err
			})
		})},
		{name: "a goroutine that writes later", want: differs, open: unsafe(func(b *bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				go func() {
					<-time.After(5 * time.Millisecond)
					b.mail.send(v.ID)
				}()
				return good(ctx, tx, m, v)
			})
		})},
		{name: "clock", want: "two undisturbed runs", loud: true, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, _ *inbox.Message, v transfer) error {
				return book(ctx, tx, v, time.Now().UnixNano())
			})
		})},
		{name: "counter that outlives a run", want: "two undisturbed runs", loud: true, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, _ *inbox.Message, v transfer) error {
				return book(ctx, tx, v, counter.Add(1))
			})
		})},
		{name: "counter in memory", want: differs, open: unsafe(func(*bank) handler {
			var n atomic.Int64
			return booking(func(ctx context.Context, tx *sql.Tx, _ *inbox.Message, v transfer) error {
				return book(ctx, tx, v, n.Add(1))
			})
		})},
		{name: "dedupe in memory", want: differs, open: unsafe(func(*bank) handler {
			var seen sync.Map
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				if _, before := seen.LoadOrStore(v.ID, true); before {
					return nil
				}
				return good(ctx, tx, m, v)
			})
		})},
		{name: "order between lanes", want: differs, open: unsafe(func(*bank) handler { return booking(inOrder) })},
		{name: "order within a lane", want: differs, open: unsafe(func(*bank) handler { return booking(lastOfAccount) }),
			cfg: inboxtest.ChaosConfig{Faults: inboxtest.DefaultFaults | inboxtest.FaultDisorder}},
		{name: "attempt", want: differs, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				return book(ctx, tx, v, m.Attempt)
			})
		})},
		{name: "broker id", want: differs, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				return book(ctx, tx, v, m.ID)
			})
		})},
		{name: "time of the broker", want: differs, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				return book(ctx, tx, v, m.EventTime.Unix())
			})
		})},
		{name: "success without work when its context ends", want: differs, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				if ctx.Err() != nil {
					return nil //nolint:nilerr // That is what is wrong with it.
				}
				return good(ctx, tx, m, v)
			})
		})},
		{name: "every error is permanent", want: "was a dead letter, undisturbed it is handled: permanent error", open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
				return inbox.Permanent(good(ctx, tx, m, v))
			})
		})},
		{name: "collects in memory", want: differs, open: func(*bank) *world {
			var held []transfer
			return &world{
				Handler: booking(func(ctx context.Context, tx *sql.Tx, m *inbox.Message, v transfer) error {
					if held = append(held, v); len(held) < 2 {
						return nil // Committed with nothing done.
					}
					for _, v := range held {
						if err := good(ctx, tx, m, v); err != nil {
							return err
						}
					}
					held = nil
					return nil
				}),
				Restart: func() { held = nil },
			}
		}},
		{name: "key is the broker's id", key: keyfunc.MessageID(), want: "was handled 2 times, under the keys",
			open: unsafe(func(*bank) handler { return booking(good) })},
		{name: "fingerprint of the broker's id", want: "was a conflict with another one", open: unsafe(func(*bank) handler { return booking(good) }),
			cfg: inboxtest.ChaosConfig{
				Faults:   inboxtest.FaultDuplicate,
				Consumer: &inbox.Config{Fingerprint: func(m *broker.Message) ([]byte, error) { return []byte(m.ID), nil }},
			}},
		{name: "never ends", want: "asks for a later attempt each time", loud: true, open: unsafe(func(*bank) handler {
			return booking(func(context.Context, *sql.Tx, *inbox.Message, transfer) error {
				return inbox.RetryAfter(errors.New("not now"), time.Hour)
			})
		})},
		{name: "stuck", want: "did not end within 200ms: not done: message 1", loud: true, open: unsafe(func(*bank) handler {
			return booking(func(ctx context.Context, _ *sql.Tx, _ *inbox.Message, _ transfer) error {
				<-ctx.Done()
				return ctx.Err()
			})
		}), cfg: inboxtest.ChaosConfig{Timeout: 200 * time.Millisecond, Consumer: &inbox.Config{ShutdownTimeout: -1}}},
		{name: "one key for all", key: keyfunc.JSON("account"), want: "is taken for another message", loud: true,
			open: unsafe(func(*bank) handler { return booking(good) })},
	}
}

var seedIn = regexp.MustCompile(`chaos: seed (\d+): `)

// Every sabotaged handler is found, by a seed that finds it again, with the same
// report.
func TestChaosFinds(t *testing.T) {
	t.Parallel()
	for _, s := range sabotages() {
		t.Run(s.name, func(t *testing.T) {
			t.Parallel()
			if s.key == nil {
				s.key = keyfunc.JSON("id")
			}
			report := tryChaos(t, s.key, &s.cfg, s.open)
			if !strings.Contains(report, s.want) {
				t.Fatalf("found %q, want %q", report, s.want)
			}
			if s.loud {
				return
			}
			found := seedIn.FindStringSubmatch(report)
			if found == nil {
				t.Fatalf("the report names no seed:\n%s", report)
			}
			t.Log(report)
			again := s.cfg
			again.Rounds = 1
			again.Seed, _ = strconv.ParseUint(found[1], 10, 64)
			switch repeated := tryChaos(t, s.key, &again, s.open); {
			case !strings.Contains(repeated, found[0]):
				t.Errorf("the seed finds %q, and before %q", repeated, report)
			case strings.Contains(repeated+report, "took too long"):
				// The machine is busy: what was found then differs.
			case repeated != report:
				t.Errorf("the seed finds %q, and before %q", repeated, report)
			}
		})
	}
}

// What cannot work is said at once.
func TestChaosRefuses(t *testing.T) {
	t.Parallel()
	twice := transfers()
	twice[1].ID, twice[3].ID = "x", "x"
	open := func(w world) func(t testing.TB) *world {
		return func(testing.TB) *world { return &w }
	}
	complete := func(t testing.TB) *world {
		b, store := openBank(t)
		return &world{Store: store, State: b.state, Handler: booking(good)}
	}
	_, store := openBank(t)
	state := func(context.Context) (any, error) { return nil, errors.New("no such table") }
	for _, row := range []struct {
		name string
		open func(t testing.TB) *world
		key  keyfunc.Func
		ms   []*broker.Message
		cfg  *inboxtest.ChaosConfig
		want string
	}{
		{"open", nil, keyfunc.JSON("id"), transfers(), nil, "open: must not be nil"},
		{"key", complete, nil, transfers(), nil, "key: must not be nil"},
		{"bad key", complete, keyfunc.JSON(), transfers(), nil, "key function"},
		{"no messages", complete, keyfunc.JSON("id"), nil, nil, "there are none"},
		{"nil message", complete, keyfunc.JSON("id"), []*broker.Message{nil}, nil, "message 1: must not be nil"},
		{"one id twice", complete, keyfunc.JSON("id"), twice, nil, `messages 2 and 4 have the same ID "x"`},
		{"rounds", complete, keyfunc.JSON("id"), transfers(), &inboxtest.ChaosConfig{Rounds: -1}, "Rounds = -1: must not be negative"},
		{"timeout", complete, keyfunc.JSON("id"), transfers(), &inboxtest.ChaosConfig{Timeout: -1}, "Timeout = -1ns: must not be negative"},
		{"no world", func(testing.TB) *world { return nil }, keyfunc.JSON("id"), transfers(), nil, "open returned no world"},
		{"no store", open(world{Handler: booking(good), State: state}), keyfunc.JSON("id"), transfers(), nil, "World.Store"},
		{"no handler", open(world{Store: store, State: state}), keyfunc.JSON("id"), transfers(), nil, "needs a Handler or a Bulk"},
		{"no state", open(world{Store: store, Handler: booking(good)}), keyfunc.JSON("id"), transfers(), nil, "World.State"},
		{"state fails", open(world{Store: store, Handler: booking(good), State: state}), keyfunc.JSON("id"), transfers(), nil, "State: no such table"},
		{"nothing is handled", complete, keyfunc.JSON("missing"), transfers(), nil, "handled none of the messages"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			report := failures(t, func(tb inboxtest.TB) { inboxtest.Chaos(tb.(testing.TB), row.open, row.key, row.ms, row.cfg) })
			if !strings.Contains(report, row.want) {
				t.Errorf("found %q, want %q", report, row.want)
			}
		})
	}
}

// The kit finds what is wrong with a store, too: here one that forgets keys.
func TestChaosFindsForgetfulStore(t *testing.T) {
	t.Parallel()
	report := failures(t, func(tb inboxtest.TB) {
		inboxtest.Chaos(tb.(testing.TB), func(t testing.TB) *world {
			b, store := openBank(t)
			return &world{Store: &forgetful{store, b.db}, State: b.state, Handler: booking(good)}
		}, keyfunc.JSON("id"), transfers(), nil)
	})
	if !strings.Contains(report, "was committed 2 times: the store does not keep its key") {
		t.Errorf("found %q", report)
	}
}

type forgetful struct {
	inbox.Store[*sql.Tx]
	db *sql.DB
}

func (f *forgetful) Begin(ctx context.Context, claims []inbox.Claim, o inbox.BeginOptions) (inbox.Batch[*sql.Tx], error) {
	if _, err := f.db.ExecContext(ctx, "delete from inbox"); err != nil {
		return nil, err
	}
	return f.Store.Begin(ctx, claims, o)
}

// What Chaos puts between the loop and a store hides the store's other
// interfaces. Whoever adds one to package inbox decides here: forward it in
// chaos_process.go, or note why it is not needed.
func TestChaosForwardsInterfaces(t *testing.T) {
	t.Parallel()
	known := map[string]string{
		"Store": "embedded", "Batch": "embedded",
		"PoolSizer": "forwarded", "Sealer": "forwarded",
		"Parker":     "not needed: without it failed messages are tried again in their lanes",
		"Undertaker": "not asked for by the loop", "Inspector": "not asked for by the loop",
		"Advisor":        "for operators",
		"Marker":         "not needed: nobody here kills a process by its message, and deaths on purpose must not count",
		"HealthReporter": "of consumers",
	}
	files, err := filepath.Glob("../*.go")
	if err != nil || len(files) == 0 {
		t.Fatal(files, err)
	}
	declared := regexp.MustCompile(`(?m)^type ([A-Z]\w*)(?:\[Tx any\])? interface \{`)
	found := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range declared.FindAllSubmatch(text, -1) {
			name := string(m[1])
			found[name] = true
			if _, ok := known[name]; !ok && !strings.HasPrefix(name, "On") {
				t.Errorf("inbox.%s is an interface that Chaos does not know", name)
			}
		}
	}
	if !found["Store"] || !found["Batch"] || !found["Sealer"] {
		t.Errorf("found only %v: this check sees nothing any more", found)
	}
}
