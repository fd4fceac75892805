//go:build unix

package servers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

const (
	// EnvKafka3 is the list of the brokers of a Kafka cluster that tests may break:
	// the one of integration_test/services/kafka3, as nothing else says how to stop
	// and start a broker.
	EnvKafka3 = "ACKAFTER_TEST_KAFKA3"

	// clusterTimeout bounds stopping and starting brokers.
	clusterTimeout = 3 * time.Minute
	// turnTimeout bounds the wait for the other tests that break the cluster.
	turnTimeout = 15 * time.Minute
)

var kafka3 = newServer("kafka3", EnvKafka3, nil)

// Cluster is a Kafka cluster of three brokers that a test may break. Topics have
// three copies unless a test says otherwise, and a write with acks=all is
// acknowledged when two have it. The brokers have the ids 1, 2 and 3.
type Cluster struct {
	// Brokers are the addresses, in the order of the ids.
	Brokers []string

	script string
}

// Kafka3 returns the cluster. It belongs to the test until its end: other tests
// that want it wait, those of other processes too. Brokers that were stopped are
// started again at the end.
func Kafka3(t testing.TB) *Cluster {
	t.Helper()
	addresses := find(t, kafka3)
	folder, err := scriptFolder()
	if err != nil {
		t.Fatalf("servers: kafka3: %v", err)
	}
	c := &Cluster{Brokers: strings.Split(addresses, ","), script: filepath.Join(folder, "kafka3")}
	lockCluster(t, strings.TrimSpace(c.run(t, "home")))
	c.Start(t, 1, 2, 3) // a test binary that was killed may have left some stopped
	t.Cleanup(func() { c.Start(t, 1, 2, 3) })
	if here, ok := parseExport(c.run(t, "env"), EnvKafka3); !ok || here != addresses {
		t.Fatalf("servers: %s is %q, and services/kafka3 runs at %q: only that one can be broken", EnvKafka3, addresses, here)
	}
	return c
}

// Stop ends brokers as an operator does: they hand over what they lead, as long
// as there is somebody to hand it to.
func (c *Cluster) Stop(t testing.TB, ids ...int) {
	t.Helper()
	c.run(t, "stop-node", ids...)
}

// Kill ends brokers by SIGKILL.
func (c *Cluster) Kill(t testing.TB, ids ...int) {
	t.Helper()
	c.run(t, "kill-node", ids...)
}

// Start starts brokers and waits until they serve. It leaves alone what runs.
func (c *Cluster) Start(t testing.TB, ids ...int) {
	t.Helper()
	c.run(t, "start-node", ids...)
}

func (c *Cluster) run(t testing.TB, verb string, ids ...int) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), clusterTimeout)
	defer cancel()
	arguments := []string{verb}
	for _, id := range ids {
		arguments = append(arguments, strconv.Itoa(id))
	}
	command := exec.CommandContext(ctx, c.script, arguments...)
	command.WaitDelay = 5 * time.Second
	var said strings.Builder
	command.Stderr = &said
	out, err := command.Output()
	if err != nil {
		t.Fatalf("servers: kafka3 %s: %v: %s", strings.Join(arguments, " "), err, strings.TrimSpace(said.String()))
	}
	return string(out)
}

// lockCluster takes the lock of the cluster's folder until the end of the test.
func lockCluster(t testing.TB, home string) {
	t.Helper()
	file, err := os.OpenFile(filepath.Join(home, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		t.Fatalf("servers: %s is set, but services/kafka3 does not run here: %v", EnvKafka3, err)
	}
	t.Cleanup(func() { _ = file.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), turnTimeout)
	defer cancel()
	if err := flock(ctx, file); err != nil {
		t.Fatalf("servers: kafka3: another test has it: %v", err)
	}
}

// flock waits for an exclusive lock, which goes with the file or the process.
func flock(ctx context.Context, file *os.File) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return fmt.Errorf("lock %s: %w", file.Name(), err)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("lock %s: %w", file.Name(), ctx.Err())
		}
	}
}
