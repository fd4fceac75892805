package integration_test

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// faultPartitions is how many partitions the topic of the fault tests has.
const faultPartitions = 6

// Two members of a group, with the default configuration, on a cluster of three
// brokers whose brokers are stopped, killed and restarted under load. After each
// fault consuming goes on by itself, nothing is lost, nothing is doubled,
// committed offsets never go back, and in the end nothing is left to do.
func TestBrokerFaults(t *testing.T) { //nolint:paralleltest // It measures times, and the machine is small.
	f := newFaults(t)
	for range sized(1, 3) {
		f.inject("the leader is stopped", func(t *testing.T) {
			id := f.leader(t)
			defer f.restart(t, id)
			began := time.Now()
			f.cluster.Stop(t, id)
			f.resumed(t, began)
		})
		leads := 0
		f.inject("the group's coordinator is killed", func(t *testing.T) {
			id := f.coordinator(t)
			leads = f.leads(t, id)
			t.Logf("it leads %d partitions", leads)
			defer f.restart(t, id)
			f.cluster.Kill(t, id)
			f.resumed(t, time.Now())
		})
		if leads == 0 || soak() { // As a rule the coordinator was a leader too.
			f.inject("the leader is killed", func(t *testing.T) {
				id := f.leader(t)
				defer f.restart(t, id)
				f.cluster.Kill(t, id)
				f.resumed(t, time.Now())
			})
		}
		f.inject("rolling restart", func(t *testing.T) {
			for id := 1; id <= 3; id++ {
				f.cluster.Stop(t, id)
				f.restart(t, id)
			}
			f.resumed(t, time.Now())
		})
		f.inject("all brokers are stopped", func(t *testing.T) {
			f.cluster.Stop(t, 1, 2, 3)
			<-time.After(time.Duration(sized(10, 30)) * time.Second) // This is how long the fault lasts.
			f.cluster.Start(t, 1, 2, 3)
			f.resumed(t, time.Now())
		})
		if !soak() {
			continue
		}
		f.inject("two of three brokers are killed", func(t *testing.T) {
			f.cluster.Kill(t, 1, 2)
			<-time.After(10 * time.Second) // This is how long the fault lasts.
			f.cluster.Start(t, 1, 2)
			f.resumed(t, time.Now())
		})
	}
	f.stop()
}

// faults is a cluster under load.
type faults struct {
	t        *testing.T
	cluster  *servers.Cluster
	topic    *topic
	pool     *pgxpool.Pool
	traffic  *traffic
	progress *progress
	members  []func() error
	sources  []*kafka.Source
}

func newFaults(t *testing.T) *faults {
	t.Helper()
	f := &faults{t: t, pool: openPool(t, servers.Postgres(t)), cluster: servers.Kafka3(t), progress: newProgress()}
	if _, err := f.pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	f.topic = newCopiedTopic(t, f.cluster.Brokers, faultPartitions, 3)
	f.traffic = &traffic{brokers: f.cluster.Brokers, topic: f.topic.name}
	for range 2 {
		f.member()
	}
	return f
}

// member starts a consumer.
func (f *faults) member() {
	f.t.Helper()
	log := slog.New(slog.NewTextHandler(f.t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	store, err := inboxpgx.New(f.pool)
	if err != nil {
		f.t.Fatal(err)
	}
	c, err := inbox.New(store, f.topic.name, keyfunc.JSON("id"), effect, &inbox.Config{Workers: 2, Logger: log, Hooks: []inbox.Hook{f.progress}})
	if err != nil {
		f.t.Fatal(err)
	}
	opening, cancel := context.WithTimeout(f.t.Context(), time.Minute)
	defer cancel()
	src, err := kafka.Open(opening, f.cluster.Brokers, f.topic.name, []string{f.topic.name}, &kafka.Config{Logger: log})
	if err != nil {
		f.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(f.t.Context())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx, src) }()
	f.sources = append(f.sources, src)
	end := sync.OnceValue(func() error {
		stop()
		return <-done
	})
	f.t.Cleanup(func() { _ = end() })
	f.members = append(f.members, end)
}

// inject lets the cluster suffer a fault under load.
func (f *faults) inject(name string, fault func(*testing.T)) {
	f.t.Helper()
	ok := f.t.Run(name, func(t *testing.T) {
		f.traffic.start(f.t.Context())
		eventually(t, time.Minute, "the load is worked on", f.passed(time.Now()))
		f.progress.longest()
		fault(t)
		n := f.traffic.end(t)
		eventually(t, time.Minute, "lag 0", func() bool { return f.topic.lag(f.topic.name) == 0 })
		t.Logf("longest pause %v; so far %d messages, %d writes repeated, outcomes %s", f.progress.longest().Round(time.Millisecond), n, f.traffic.failed.Load(), f.progress.counts())
		onceEach(t, f.pool, n)
		f.reports(t)
	})
	if !ok {
		f.t.FailNow()
	}
}

// passed returns a check whether messages that are made after a time are done, of
// every partition.
func (f *faults) passed(at time.Time) func() bool {
	return func() bool { return f.progress.beyond(at, faultPartitions) }
}

// resumed waits until messages of every partition are done that were made after
// the end of a fault, and reports how long it took.
func (f *faults) resumed(t *testing.T, end time.Time) {
	t.Helper()
	eventually(t, time.Minute, "consuming goes on", f.passed(end))
	t.Logf("consuming all partitions again %v after the fault's end", time.Since(end).Round(10*time.Millisecond))
}

// restart starts a broker and waits until it has caught up.
func (f *faults) restart(t *testing.T, id int) {
	t.Helper()
	f.cluster.Start(t, id)
	eventually(t, time.Minute, "all copies are in sync", func() bool {
		m, err := f.topic.metadata(f.topic.name, "__consumer_offsets")
		if err != nil {
			return false
		}
		for _, topic := range m.Topics {
			for _, p := range topic.Partitions {
				if len(p.Isr) != 3 {
					return false
				}
			}
		}
		return len(m.Topics) == 2
	})
}

// leader returns the broker that leads partition 0.
func (f *faults) leader(t *testing.T) int {
	t.Helper()
	return f.leaders(t)[0]
}

// leads returns how many partitions a broker leads.
func (f *faults) leads(t *testing.T, id int) int {
	t.Helper()
	n := 0
	for _, leader := range f.leaders(t) {
		if leader == id {
			n++
		}
	}
	return n
}

// leaders returns the leader of each partition.
func (f *faults) leaders(t *testing.T) map[int]int {
	t.Helper()
	leaders := make(map[int]int)
	eventually(t, time.Minute, "all partitions have leaders", func() bool {
		m, err := f.topic.metadata(f.topic.name)
		if err != nil {
			return false
		}
		clear(leaders)
		for _, p := range m.Topics[0].Partitions {
			if p.Leader.ID > 0 {
				leaders[p.ID] = p.Leader.ID
			}
		}
		return len(leaders) == faultPartitions
	})
	return leaders
}

// coordinator returns the broker that coordinates the group.
func (f *faults) coordinator(t *testing.T) (id int) {
	t.Helper()
	eventually(t, time.Minute, "the group has a coordinator", func() bool {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		r, err := f.topic.client.FindCoordinator(ctx, &kafkago.FindCoordinatorRequest{Key: f.topic.name, KeyType: kafkago.CoordinatorKeyTypeConsumer})
		if err != nil || r.Error != nil {
			return false
		}
		id = r.Coordinator.NodeID
		return id > 0
	})
	return id
}

// reports checks what the members say of themselves after a fault.
func (f *faults) reports(t *testing.T) {
	t.Helper()
	for i, src := range f.sources {
		eventually(t, time.Minute, fmt.Sprintf("member %d is healthy: %v", i, src.Health()), func() bool { return src.Health() == nil })
		s := src.Stats()
		t.Logf("member %d: generation %d, %d partitions, %d lost, %d stale acks, %d commit errors, %d fetch errors", i, s.Generation, len(s.Partitions), s.Lost, s.StaleAcks, s.CommitErrors, s.FetchErrors)
		if s.Gaps != 0 || s.Resets != 0 {
			t.Errorf("member %d saw %d gaps, %d resets", i, s.Gaps, s.Resets)
		}
	}
}

// stop ends the members.
func (f *faults) stop() {
	f.t.Helper()
	for i, stop := range f.members {
		if err := stop(); err != nil {
			f.t.Errorf("member %d: Run = %v", i, err)
		}
	}
	f.topic.checkOffsets(f.topic.name)
}
