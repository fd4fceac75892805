package integration_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
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
	up, err := migrations.Script(migrations.Postgres())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), up); err != nil {
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

// checkOffsets checks that no commit of the group's took an offset back: it reads
// the brokers' own log of them, because a broker that has just ceased to be the
// group's coordinator may answer a question with what is no longer so.
func (tp *topic) checkOffsets(group string) {
	tp.t.Helper()
	ctx, cancel := context.WithTimeout(tp.t.Context(), time.Minute)
	defer cancel()
	const name = "__consumer_offsets"
	all, err := tp.metadata(name)
	if err != nil || len(all.Topics) != 1 || len(all.Topics[0].Partitions) == 0 {
		tp.t.Fatalf("the brokers' log of offsets: %v, %+v", err, all)
	}
	part := int(javaHash(group)&math.MaxInt32) % len(all.Topics[0].Partitions)
	var end int64
	eventually(tp.t, 30*time.Second, "the end of the brokers' log of offsets is known", func() bool {
		end, err = tp.end(ctx, name, part)
		return err == nil // The leader may have changed just now.
	})
	log := kafka.NewReader(kafka.ReaderConfig{Brokers: tp.brokers, Topic: name, Partition: part, MaxWait: 100 * time.Millisecond})
	defer log.Close()
	commits, at := 0, map[int32]int64{}
	for log.Offset() < end {
		m, err := log.ReadMessage(ctx)
		if err != nil {
			tp.t.Fatalf("read the brokers' log of offsets to %d: %v", end, err)
		}
		key, ok := bytes.CutPrefix(m.Key[2:], lengthFirst(group))
		if version := binary.BigEndian.Uint16(m.Key); version > 1 || !ok {
			continue // another group's, or its members
		}
		if key, ok = bytes.CutPrefix(key, lengthFirst(tp.name)); !ok {
			continue
		}
		p := int32(binary.BigEndian.Uint32(key))
		if m.Value == nil { // The test has set it back.
			delete(at, p)
			continue
		}
		offset := int64(binary.BigEndian.Uint64(m.Value[2:]))
		if last, ok := at[p]; ok && offset < last {
			tp.t.Errorf("the committed offset of partition %d went back from %d to %d", p, last, offset)
		}
		at[p] = offset
		commits++
	}
	if commits == 0 {
		tp.t.Errorf("the brokers' log of offsets has no commit of group %s", group)
	}
	tp.t.Logf("%d commits, none back", commits)
}

// end asks the leader of a partition for its end, on a new connection.
func (tp *topic) end(ctx context.Context, name string, partition int) (int64, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	var errs []error
	for _, b := range tp.brokers {
		conn, err := kafka.DialLeader(ctx, "tcp", b, name, partition)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			return 0, err
		}
		end, err := conn.ReadLastOffset()
		if err == nil {
			return end, nil
		}
		errs = append(errs, err)
	}
	return 0, errors.Join(errs...)
}

// lengthFirst is a string as Kafka writes it.
func lengthFirst(s string) []byte {
	return append(binary.BigEndian.AppendUint16(nil, uint16(len(s))), s...)
}

// javaHash is what Java's String.hashCode is, for ASCII.
func javaHash(s string) (h int32) {
	for _, c := range []byte(s) {
		h = 31*h + int32(c)
	}
	return h
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
