package integration_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/migrations"
)

// soak tells that tests run at full size.
func soak() bool { return os.Getenv("ACKAFTER_TEST_SOAK") == "1" }

// sized returns small, or full in a soak run.
func sized(small, full int) int {
	if soak() {
		return full
	}
	return small
}

// openPool opens a pool on a database and makes the inbox tables there.
func openPool(t *testing.T, url string) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.New(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	up, err := fs.ReadFile(migrations.Postgres(), "0001_inbox.up.sql")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), string(up)); err != nil {
		t.Fatalf("migrate: %v", err)
	}
	return pool
}

// count runs a query that returns one number.
func count(t *testing.T, pool *pgxpool.Pool, query string, args ...any) int {
	t.Helper()
	var n int
	if err := pool.QueryRow(t.Context(), query, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return n
}

// eventually polls until ok, and fails with what it waited for.
func eventually(t *testing.T, limit time.Duration, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(limit)
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
		<-tick.C
	}
}

// topic is a Kafka topic of one test.
type topic struct {
	t       *testing.T
	name    string
	brokers []string
	client  *kafka.Client
	parts   int

	committed map[int]int64 // what watchOffsets saw last
}

func newTopic(t *testing.T, brokers []string, partitions int) *topic {
	t.Helper()
	return newCopiedTopic(t, brokers, partitions, 1)
}

// newCopiedTopic makes a topic with several copies of each partition.
func newCopiedTopic(t *testing.T, brokers []string, partitions, copies int) *topic {
	t.Helper()
	return newTopicOf(t, brokers, kafka.TopicConfig{NumPartitions: partitions, ReplicationFactor: copies})
}

// newTopicOf makes a topic of a configuration that has no name yet.
func newTopicOf(t *testing.T, brokers []string, config kafka.TopicConfig) *topic {
	t.Helper()
	config.Topic = fmt.Sprintf("%s-%d", strings.ToLower(strings.NewReplacer("/", "-", " ", "-", "=", "-", ",", "").Replace(t.Name())), time.Now().UnixNano())
	tp := &topic{
		t: t, brokers: brokers, parts: max(config.NumPartitions, len(config.ReplicaAssignments)), name: config.Topic,
		client: &kafka.Client{Addr: kafka.TCP(brokers...), Timeout: 10 * time.Second},
	}
	// The library's writers share its connections, and what they know of topics. One
	// of another test may lead to a broker that it has stopped.
	eventually(t, 30*time.Second, "create topic", func() bool {
		r, err := tp.client.CreateTopics(t.Context(), &kafka.CreateTopicsRequest{Topics: []kafka.TopicConfig{config}})
		if err != nil {
			t.Logf("create topic: %v", err)
			return false
		}
		if err := r.Errors[tp.name]; err != nil && !errors.Is(err, kafka.TopicAlreadyExists) {
			t.Fatalf("create topic: %v", err)
		}
		return true
	})
	return tp
}

// kcatPath returns the path of a client that is not ours.
func kcatPath(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("kcat")
	if err != nil {
		missing(t, "kcat is not installed")
	}
	return path
}

// kcat produces the lines with a client that is not ours.
func (tp *topic) kcat(s orders.Stream) {
	tp.t.Helper()
	var in bytes.Buffer
	if _, err := s.WriteTo(&in); err != nil {
		tp.t.Fatal(err)
	}
	cmd := exec.CommandContext(tp.t.Context(), kcatPath(tp.t), "-P", "-b", strings.Join(tp.brokers, ","), "-t", tp.name, "-K", "\t", "-X", "acks=all")
	cmd.Stdin = &in
	if out, err := cmd.CombinedOutput(); err != nil {
		tp.t.Fatalf("kcat: %v\n%s", err, out)
	}
}

// lag returns how many records the group has not committed, -1 while that cannot
// be told.
func (tp *topic) lag(group string) int64 {
	ctx, cancel := context.WithTimeout(tp.t.Context(), 10*time.Second)
	defer cancel()
	var ends []kafka.OffsetRequest
	var parts []int
	for p := range tp.parts {
		ends = append(ends, kafka.LastOffsetOf(p))
		parts = append(parts, p)
	}
	last, err := tp.client.ListOffsets(ctx, &kafka.ListOffsetsRequest{Topics: map[string][]kafka.OffsetRequest{tp.name: ends}})
	if err != nil {
		return -1
	}
	done, err := tp.client.OffsetFetch(ctx, &kafka.OffsetFetchRequest{GroupID: group, Topics: map[string][]int{tp.name: parts}})
	if err != nil || done.Error != nil {
		return -1
	}
	committed := map[int]int64{}
	for _, p := range done.Topics[tp.name] {
		if p.Error != nil {
			return -1
		}
		committed[p.Partition] = max(p.CommittedOffset, 0)
	}
	var lag int64
	for _, p := range last.Topics[tp.name] {
		if p.Error != nil {
			return -1
		}
		lag += p.LastOffset - committed[p.Partition]
	}
	return lag
}

// metadata returns what a broker knows of topics.
func (tp *topic) metadata(topics ...string) (*kafka.MetadataResponse, error) {
	ctx, cancel := context.WithTimeout(tp.t.Context(), 10*time.Second)
	defer cancel()
	return tp.client.Metadata(ctx, &kafka.MetadataRequest{Topics: topics})
}

// watchOffsets checks that the group's offsets never go back, until the returned
// function is called. A later call goes on where this one ended.
func (tp *topic) watchOffsets(group string) (stop func()) {
	ctx, cancel := context.WithCancel(tp.t.Context())
	done := make(chan struct{})
	parts := make([]int, tp.parts)
	for p := range parts {
		parts[p] = p
	}
	go func() {
		defer close(done)
		tick := time.NewTicker(100 * time.Millisecond)
		defer tick.Stop()
		if tp.committed == nil {
			tp.committed = make(map[int]int64)
		}
		for ctx.Err() == nil {
			r, err := tp.client.OffsetFetch(ctx, &kafka.OffsetFetchRequest{GroupID: group, Topics: map[string][]int{tp.name: parts}})
			if err == nil && r.Error == nil {
				for _, p := range r.Topics[tp.name] {
					if p.Error != nil {
						continue
					}
					if last, ok := tp.committed[p.Partition]; ok && p.CommittedOffset < last {
						tp.t.Errorf("the committed offset of partition %d went back from %d to %d", p.Partition, last, p.CommittedOffset)
					}
					tp.committed[p.Partition] = p.CommittedOffset
				}
			}
			select {
			case <-tick.C:
			case <-ctx.Done():
			}
		}
	}()
	stop = func() {
		cancel()
		<-done
	}
	tp.t.Cleanup(stop)
	return stop
}

// rewind sets the offsets of a group without members to the earliest.
func (tp *topic) rewind(group string) {
	tp.t.Helper()
	r, err := tp.client.DeleteGroups(tp.t.Context(), &kafka.DeleteGroupsRequest{GroupIDs: []string{group}})
	if err != nil || r.Errors[group] != nil {
		tp.t.Fatalf("reset offsets: %v, %+v", err, r)
	}
}

// missing skips, or fails where nothing may be skipped.
func missing(t *testing.T, what string) {
	t.Helper()
	if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
		t.Fatal(what)
	}
	t.Skip(what)
}

// process is a program that a test starts and kills.
type process struct {
	t    *testing.T
	path string
	args []string
	env  []string
	log  string

	mu  sync.Mutex
	cmd *exec.Cmd
}

func (p *process) start() {
	p.t.Helper()
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		p.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...) //nolint:noctx // The test kills it on purpose, with a signal of its choice.
	cmd.Env = append(os.Environ(), p.env...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		p.t.Fatal(err)
	}
	p.mu.Lock()
	p.cmd = cmd
	p.mu.Unlock()
}

// end sends a signal and returns how the process ended.
func (p *process) end(sig syscall.Signal) error {
	p.mu.Lock()
	cmd := p.cmd
	p.cmd = nil
	p.mu.Unlock()
	if cmd == nil {
		return nil
	}
	_ = cmd.Process.Signal(sig)
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		_ = cmd.Process.Kill()
		<-done
		return fmt.Errorf("did not end within a minute of %v", sig)
	}
}

// wait waits for the process to end by itself; nil when it does not in time.
func (p *process) wait(limit time.Duration) *os.ProcessState {
	p.mu.Lock()
	cmd := p.cmd
	p.cmd = nil
	p.mu.Unlock()
	kill := time.AfterFunc(limit, func() { _ = cmd.Process.Signal(syscall.SIGTERM) })
	defer kill.Stop()
	_ = cmd.Wait()
	return cmd.ProcessState
}

// tail returns the end of the log.
func (p *process) tail() string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-4000):])
}

// build compiles a command of the module.
func build(t *testing.T, pkg string) string {
	t.Helper()
	out := filepath.Join(t.TempDir(), filepath.Base(pkg))
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", out, pkg)
	if b, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build %s: %v\n%s", pkg, err, b)
	}
	return out
}
