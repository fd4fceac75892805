package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
)

// fatalMessages is how many messages the processes have that die.
const fatalMessages = 60

// case D11: a message kills the process that runs it, over each broker: after the
// first death and MaxCrashes more it is a dead letter, and all others have one effect.
func TestMessageKillsProcess(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, s supply) {
		pool, deaths := killAgain(t, s, func(int) string { return "CHILD_POISON=" + victimKey })
		if deaths != 4 {
			t.Errorf("%d deaths, want 4", deaths)
		}
		for query, want := range map[string]int{
			"select count(*) from effects":                                                  fatalMessages - 1,
			"select count(distinct key) from effects":                                       fatalMessages - 1,
			"select count(*) from inbox_parked":                                             1,
			"select count(*) from inbox_parked where message_key = '" + victimKey + "'":     1,
			"select count(*) from inbox_parked where reason = 'process died'":               1,
			"select count(*) from inbox_starts":                                             0,
			"select count(*) from inbox where message_key not in (select key from effects)": 0,
		} {
			if n := count(t, pool, query); n != want {
				t.Errorf("%s = %d, want %d", query, n, want)
			}
		}
	})
}

// Processes that are killed again and again, whatever message they have: none is
// blamed.
func TestKillsBlameNobody(t *testing.T) {
	t.Parallel()
	onEach(t, func(t *testing.T, s supply) {
		const kills = 8
		seed := uint64(time.Now().UnixNano())
		random := rand.New(rand.NewPCG(seed, 0))
		pool, deaths := killAgain(t, s, func(life int) string {
			if life >= kills {
				return ""
			}
			return fmt.Sprint("CHILD_RUNS=", 1+random.IntN(6))
		})
		if deaths != kills {
			t.Errorf("%d deaths, want %d", deaths, kills)
		}
		for query, want := range map[string]int{
			"select count(*) from effects":            fatalMessages,
			"select count(distinct key) from effects": fatalMessages,
			"select count(*) from inbox_parked":       0,
		} {
			if n := count(t, pool, query); n != want {
				t.Errorf("%s = %d, want %d (seed %d)", query, n, want, seed)
			}
		}
	}, "sqs-fifo")
}

// killAgain starts one process after the other until nothing is left at the broker,
// and returns how many were killed. life says what ends each of them.
func killAgain(t *testing.T, s supply, life func(n int) string) (*pgxpool.Pool, int) {
	t.Helper()
	url := servers.PostgresDurable(t)
	pool := openPool(t, url)
	if _, err := pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	const subscriber = "fatal"
	place := s.at(subscriber)
	place.Lease = time.Second
	bodies := make([]string, fatalMessages)
	for i := range bodies {
		bodies[i] = fmt.Sprintf(`{"id":"o-%d"}`, i)
	}
	s.produce(bodies...)
	eventually(t, time.Minute, "the broker counts the messages", func() bool { return !s.drained(subscriber) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	for deaths := range 20 {
		p := &process{t: t, path: self, log: filepath.Join(t.TempDir(), "child.log"), env: []string{
			"ACKAFTER_CHILD=fatal", "CHILD_URL=" + url, place.environment(), life(deaths),
		}}
		p.start()
		over := make(chan *os.ProcessState, 1)
		cmd := p.cmd
		go func() {
			_ = cmd.Wait()
			over <- cmd.ProcessState
		}()
		var state *os.ProcessState
		eventually(t, 3*time.Minute, "it dies, or nothing is left", func() bool {
			select {
			case state = <-over:
				return true
			default:
			}
			return s.drained(subscriber) && count(t, pool, "select (select count(*) from effects) + (select count(*) from inbox_parked)") >= fatalMessages
		})
		if state != nil {
			if state.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
				t.Fatalf("the child ended with %v: %s", state, p.tail())
			}
			continue
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if state = <-over; !state.Success() {
			t.Errorf("the last child ended with %v: %s", state, p.tail())
		}
		t.Logf("%d deaths in %v", deaths, time.Since(start))
		return pool, deaths
	}
	t.Fatal("it dies for ever")
	return nil, 0
}

// fatalChild is the main function of the child process.
func fatalChild(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, os.Getenv("CHILD_URL"))
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	most, err := strconv.Atoi("0" + os.Getenv("CHILD_RUNS"))
	if err != nil {
		return err
	}
	var runs atomic.Int64
	handler := func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if n := runs.Add(1); m.MessageKey == os.Getenv("CHILD_POISON") || int(n) == most {
			_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
			select {}
		}
		return effect(ctx, tx, m)
	}
	consumer, err := inbox.New(store, "fatal", keyfunc.JSON("id"), handler, nil)
	if err != nil {
		return err
	}
	return runAtPlace(ctx, consumer)
}
