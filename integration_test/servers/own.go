//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Own is a server that belongs to one test alone, which may freeze it, crash it
// and start it again. It comes from a script of integration_test/services, with a
// state folder of its own, whatever the environment says. Its address stays the
// same. The methods are for the test's own goroutine.
type Own struct {
	// Address is what the environment variable of the shared one would say.
	Address string

	server *server
	script string
	state  string
	// pidFile begins with the pid of the server; it may have children.
	pidFile string
	// signal makes it end as in a crash, and its data survive.
	signal syscall.Signal
	// env is what the script needs besides.
	env []string
}

// OwnPostgres starts a PostgreSQL 15 with fsync, synchronous_commit and
// full_page_writes on.
func OwnPostgres(t testing.TB) *Own {
	t.Helper()
	// SIGQUIT is what `pg_ctl stop -m immediate` sends.
	return startOwn(t, &Own{server: postgresDurable, pidFile: "pgdurable/data/postmaster.pid", signal: syscall.SIGQUIT}, "pgdurable")
}

// OwnStandby starts a standby of primary, which [OwnPostgres] started.
func OwnStandby(t testing.TB, primary *Own) *Own {
	t.Helper()
	return startOwn(t, &Own{
		server: postgresStandby, pidFile: "pgstandby/data/postmaster.pid", signal: syscall.SIGQUIT,
		env: []string{"ACKAFTER_STANDBY_OF=" + primary.Address},
	}, "pgstandby")
}

// OwnKafka starts a Kafka broker.
func OwnKafka(t testing.TB) *Own {
	t.Helper()
	return startOwn(t, &Own{server: kafka, pidFile: "kafka.pid", signal: syscall.SIGKILL}, "kafka", "kafka-controller")
}

// OwnRabbitMQ starts a RabbitMQ server; the second result is what [RabbitMQ] would
// say of it.
func OwnRabbitMQ(t testing.TB) (*Own, *RabbitMQServer) {
	t.Helper()
	o := startOwn(t, &Own{server: rabbitMQ, pidFile: "rabbitmq.pid", signal: syscall.SIGKILL},
		"rabbitmq", "rabbitmq-management", "rabbitmq-dist", "rabbitmq-epmd")
	lines, err := o.run(t.Context(), "env")
	management, ok := parseExport(lines, EnvRabbitMQManagement)
	if err != nil || !ok {
		t.Fatalf("servers: a rabbitmq of its own: no address of its management: %v", err)
	}
	return o, &RabbitMQServer{URL: o.Address, Management: management}
}

// OwnSQS starts a server for the protocol of Amazon SQS; its address is what [SQS]
// would return. It keeps everything in memory, so a crash loses it.
func OwnSQS(t testing.TB) *Own {
	t.Helper()
	return startOwn(t, &Own{server: elasticMQ, pidFile: "elasticmq.pid", signal: syscall.SIGKILL}, "elasticmq")
}

// ownMu makes one start at a time: they share what is downloaded.
var ownMu sync.Mutex

func startOwn(t testing.TB, o *Own, ports ...string) *Own {
	t.Helper()
	folder, err := scriptFolder()
	if err != nil {
		skip(t, o.server.name, []string{err.Error()})
	}
	o.script = filepath.Join(folder, o.server.name)
	ownMu.Lock()
	defer ownMu.Unlock()
	if err := o.makeState(t, folder, ports); err != nil {
		t.Fatalf("servers: a %s of its own: %v", o.server.name, err)
	}
	t.Cleanup(func() {
		_ = o.each(syscall.SIGCONT) // it may have ended
		if _, err := o.run(context.WithoutCancel(t.Context()), "down"); err != nil {
			t.Errorf("servers: a %s of its own: %v", o.server.name, err)
		}
		_ = os.RemoveAll(o.state)
	})
	if _, err := o.run(t.Context(), "up"); errors.Is(err, ErrUnavailable) {
		skip(t, o.server.name, []string{err.Error()})
	} else if err != nil {
		t.Fatalf("servers: a %s of its own: %v", o.server.name, err)
	}
	lines, err := o.run(t.Context(), "env")
	var ok bool
	if o.Address, ok = parseExport(lines, o.server.variable); err != nil || !ok {
		t.Fatalf("servers: a %s of its own: no address: %v", o.server.name, err)
	}
	return o
}

// makeState makes the state folder: with the downloads of the shared one, and with
// free ports.
func (o *Own) makeState(t testing.TB, scripts string, ports []string) error {
	t.Helper()
	state, err := os.MkdirTemp("", "ackafter-own-") //nolint:usetesting // the account of the server cannot enter the test's
	if err != nil {
		return fmt.Errorf("make the state folder: %w", err)
	}
	o.state = state
	if err := os.Chmod(state, 0o755); err != nil {
		return fmt.Errorf("make the state folder: %w", err)
	}
	shared, err := exec.CommandContext(t.Context(), "bash", "-c", `. "$0" && echo "$state"`, filepath.Join(scripts, "lib.sh")).Output()
	if err != nil {
		return fmt.Errorf("find the shared state folder: %w", err)
	}
	dist := filepath.Join(strings.TrimSpace(string(shared)), "dist")
	if err := os.MkdirAll(dist, 0o755); err != nil {
		return fmt.Errorf("make the folder of downloads: %w", err)
	}
	if err := os.Symlink(dist, filepath.Join(state, "dist")); err != nil {
		return fmt.Errorf("link the downloads: %w", err)
	}
	for _, name := range ports {
		port, err := lowPort(t.Context())
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(state, name+".port"), []byte(port+"\n"), 0o644); err != nil {
			return fmt.Errorf("choose a port: %w", err)
		}
	}
	return nil
}

// lowPort returns a free port that the kernel gives to nobody by itself: clients
// that connect to it again and again while the server is down could otherwise get
// it, and be connected to themselves.
func lowPort(ctx context.Context) (string, error) {
	const first, ports = 25000, 7000
	var last error
	for range 100 {
		port := strconv.Itoa(first + rand.IntN(ports))
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", net.JoinHostPort("127.0.0.1", port))
		if err == nil {
			return port, listener.Close()
		}
		last = err
	}
	return "", fmt.Errorf("find a free port: %w", last)
}

// run calls the server's script and returns what it prints.
func (o *Own) run(ctx context.Context, arguments ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, nativeTimeout)
	defer cancel()
	env := append([]string{"ACKAFTER_SERVICES_DIR=" + o.state, "ACKAFTER_SERVICES_LOCKED="}, o.env...)
	return runProgram(ctx, env, o.script, arguments...)
}

// Control runs the program that administers a RabbitMQ server, rabbitmqctl, and
// returns what it prints.
func (o *Own) Control(t testing.TB, arguments ...string) string {
	t.Helper()
	out, err := o.run(t.Context(), append([]string{"ctl"}, arguments...)...)
	if err != nil {
		t.Fatalf("servers: control %s: %v", o.server.name, err)
	}
	return out
}

// Freeze stops the server in the middle of whatever it does: connections stay
// open, new ones are accepted by the kernel, and nothing answers.
func (o *Own) Freeze(t testing.TB) {
	t.Helper()
	if err := o.each(syscall.SIGSTOP); err != nil {
		t.Fatalf("servers: freeze %s: %v", o.server.name, err)
	}
}

// Thaw lets a frozen server go on.
func (o *Own) Thaw(t testing.TB) {
	t.Helper()
	if err := o.each(syscall.SIGCONT); err != nil {
		t.Fatalf("servers: thaw %s: %v", o.server.name, err)
	}
}

// Crash ends the server at once, and waits until it is gone.
func (o *Own) Crash(t testing.TB) {
	t.Helper()
	pid, err := o.pid()
	if err == nil {
		err = syscall.Kill(pid, o.signal)
	}
	if err != nil {
		t.Fatalf("servers: crash %s: %v", o.server.name, err)
	}
	deadline := time.Now().Add(time.Minute)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for ; !gone(pid); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatalf("servers: crash %s: the process is still there", o.server.name)
		}
	}
}

// gone tells that a process has ended, with all its threads: the last one closes what
// it listens on. One that nobody has waited for yet is still listed, as a zombie.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	// "pid (name) state ..."; the name may hold anything.
	_, state, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')'):]), " ")
	threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	return err != nil || (strings.HasPrefix(state, "Z") && len(threads) <= 1)
}

// Start starts the server again on its data, and waits until it is ready.
func (o *Own) Start(t testing.TB) {
	t.Helper()
	if _, err := o.run(t.Context(), "up"); err != nil {
		t.Fatalf("servers: start %s again: %v", o.server.name, err)
	}
	// The script takes another port when somebody has this one.
	lines, err := o.run(t.Context(), "env")
	if address, _ := parseExport(lines, o.server.variable); err != nil || address != o.Address {
		t.Fatalf("servers: start %s again: it is at %q now, not at %q: %v", o.server.name, address, o.Address, err)
	}
}

func (o *Own) pid() (int, error) {
	text, err := os.ReadFile(filepath.Join(o.state, o.pidFile))
	if err != nil {
		return 0, fmt.Errorf("find the process: %w", err)
	}
	line, _, _ := strings.Cut(string(text), "\n")
	pid, err := strconv.Atoi(strings.TrimSpace(line))
	if err != nil || pid < 2 {
		return 0, fmt.Errorf("find the process: %s holds %q", o.pidFile, line)
	}
	return pid, nil
}

// each sends a signal to the server and to its children; the server comes first,
// so that it makes no further ones.
func (o *Own) each(signal syscall.Signal) error {
	pid, err := o.pid()
	if err != nil {
		return err
	}
	if err := syscall.Kill(pid, signal); err != nil {
		return fmt.Errorf("signal %d: %w", pid, err)
	}
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, file := range stats {
		// "pid (name) state ppid ..."; the name may hold anything.
		stat, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		_, rest, _ := strings.Cut(string(stat[strings.LastIndexByte(string(stat), ')')+1:]), " ")
		fields := strings.Fields(rest)
		if len(fields) < 2 || fields[1] != strconv.Itoa(pid) {
			continue
		}
		child, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			continue
		}
		if err := syscall.Kill(child, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
			return fmt.Errorf("signal %d: %w", child, err)
		}
	}
	return nil
}
