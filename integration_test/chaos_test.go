package integration_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/integration_test/servers"
)

// chaosPatience is how long a process in a broken network may take to stop.
const chaosPatience = 5 * time.Second

// Consumers of Kafka, RabbitMQ and SQS, two processes each, on one database. Messages
// fail, are poison, are repeated, and have keys that others have with another body.
// Meanwhile processes are killed and frozen, PostgreSQL and the brokers are crashed
// and frozen, and the network is cut. In the end every distinct message has exactly
// one effect or exactly one dead letter, the brokers have nothing left, and in each
// lane the effects are in the order of the messages.
//
// ACKAFTER_TEST_SEED repeats the messages and the faults of an earlier run.
// ACKAFTER_TEST_CHAOS_SABOTAGE breaks a rule in the processes: the test must fail.
func TestChaos(t *testing.T) {
	t.Parallel()
	seed := chaosSeed(t)
	t.Logf("ACKAFTER_TEST_SEED=%d", seed)
	c := newChaos(t, seed)
	stop, sent := make(chan struct{}), make(chan error, len(c.parties))
	for _, p := range c.parties {
		go func() { sent <- p.stream.produce(t.Context(), stop, p.rate, p.broker) }()
	}
	for _, k := range c.consumers {
		k.process.start()
	}
	began := time.Now()
	for _, p := range c.parties {
		eventually(t, 2*time.Minute, p.name+": messages are handled", func() bool { return len(p.events()) > 10 })
	}
	lasts := 50 * time.Second
	if soak() {
		lasts = 10 * time.Minute
	}
	f := &chaosFaults{t: t, seed: seed, began: time.Now(), until: time.Now().Add(lasts)}
	f.run(c.consumers, c.own, c.parties)
	if t.Failed() {
		t.FailNow()
	}
	close(stop)
	for range c.parties {
		if err := <-sent; err != nil {
			t.Fatal(err)
		}
	}
	calm := time.Now()
	c.drain(time.Duration(sized(3, 10)) * time.Minute)
	drained := time.Since(calm)
	for _, k := range c.consumers {
		if took, killed := k.stop(time.Minute); killed {
			t.Errorf("%s did not stop within %v", k.name, took)
		}
	}
	c.check()
	c.report(began)
	if f.kills.Load() == 0 || f.crashes.Load() == 0 || f.cuts.Load() == 0 {
		t.Error("nothing was broken")
	}
	t.Logf("%d kills -9, %d stops and %d freezes of consumers, %d crashes and %d freezes of servers, %d times the network was broken, in %v; nothing was left %v after it; seed %d",
		f.kills.Load(), f.stops.Load(), f.freezes.Load(), f.crashes.Load(), f.serverFreezes.Load(), f.cuts.Load(),
		calm.Sub(f.began).Round(time.Second), drained.Round(100*time.Millisecond), seed)
}

// chaosSeed is a new one, or that of an earlier run.
func chaosSeed(t *testing.T) uint64 {
	t.Helper()
	text := os.Getenv("ACKAFTER_TEST_SEED")
	if text == "" {
		return rand.Uint64()
	}
	seed, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("ACKAFTER_TEST_SEED: %v", err)
	}
	return seed
}

// chaos is all that takes part.
type chaos struct {
	*testing.T
	own       *servers.Own // the database's server
	pool      *pgxpool.Pool
	parties   []*chaosParty
	consumers []*chaosConsumer
}

// chaosParty is a broker, and what belongs to it.
type chaosParty struct {
	name      string
	broker    chaosBroker
	stream    *chaosStream
	rate      int      // messages sent in a second
	network   *proxies // from its consumers to the broker and to the database
	consumers []*chaosConsumer
}

// chaosConsumer is a consumer process.
type chaosConsumer struct {
	name    string
	process *process
	events  string

	mu    sync.Mutex
	ended []error // how it ended by itself
}

func newChaos(t *testing.T, seed uint64) *chaos {
	t.Helper()
	c := &chaos{T: t, own: servers.OwnPostgres(t)}
	c.pool = openPool(t, c.own.Address)
	if _, err := c.pool.Exec(t.Context(), chaosTables); err != nil {
		t.Fatal(err)
	}
	c.parties = []*chaosParty{
		{name: "kafka", broker: newChaosKafka(t, "chaos-kafka"), rate: 50, stream: newChaosStream(seed, 11, "chaos-kafka", 50)},
		// Without lanes many accounts keep handlers from each other's deadlocks, mostly.
		{name: "rabbitmq", broker: newChaosRabbit(t), rate: 50, stream: newChaosStream(seed, 12, "chaos-rabbitmq", 2000)},
		{name: "sqs", broker: newChaosSQS(t), rate: 30, stream: newChaosStream(seed, 13, "chaos-sqs", sqsGroups)},
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	r := rand.New(rand.NewPCG(seed, 14))
	for _, p := range c.parties {
		p.network = newProxies(t, p.broker.address(), hostOf(c.own))
		for i := range 2 {
			k := &chaosConsumer{name: fmt.Sprintf("%s-%d", p.name, i)}
			s := chaosSetup{
				Consumer: p.stream.consumer, Worker: k.name, Database: c.own.Address, Routes: p.network.routes,
				Events: filepath.Join(t.TempDir(), k.name+".events"), Workers: 2 + r.IntN(3), BatchSize: []int{1, 10, 50}[r.IntN(3)],
				Sabotage: os.Getenv("ACKAFTER_TEST_CHAOS_SABOTAGE"),
			}
			p.broker.describe(&s)
			setup, err := json.Marshal(s)
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("%s: %d workers, batches of %d", k.name, s.Workers, s.BatchSize)
			k.events = s.Events
			k.process = &process{t: t, path: self, log: filepath.Join(t.TempDir(), k.name+".log"), env: []string{"ACKAFTER_CHILD=chaos", envChaos + "=" + string(setup)}}
			t.Cleanup(func() {
				_ = k.process.end(syscall.SIGKILL)
				if t.Failed() {
					t.Logf("the end of the log of %s:\n%s", k.name, k.process.tail())
				}
			})
			p.consumers = append(p.consumers, k)
		}
		c.consumers = append(c.consumers, p.consumers...)
	}
	return c
}

func hostOf(database *servers.Own) string {
	u, err := url.Parse(database.Address)
	if err != nil {
		return err.Error()
	}
	return u.Host
}

// signal sends a signal to the process that runs.
func (k *chaosConsumer) signal(s syscall.Signal) {
	k.process.mu.Lock()
	defer k.process.mu.Unlock()
	_ = k.process.cmd.Process.Signal(s)
}

// kill ends the process at once.
func (k *chaosConsumer) kill() { k.note(k.process.end(syscall.SIGKILL)) }

// stop stops the process in order, and kills it when that takes too long.
func (k *chaosConsumer) stop(limit time.Duration) (took time.Duration, killed bool) {
	k.process.mu.Lock()
	running := k.process.cmd.Process
	k.process.mu.Unlock()
	began := time.Now()
	timer := time.AfterFunc(limit, func() { _ = running.Kill() })
	k.note(k.process.end(syscall.SIGTERM))
	return time.Since(began), !timer.Stop()
}

// note keeps how a process ended, if it was not by a signal. (One that has just
// started does not know SIGTERM yet.)
func (k *chaosConsumer) note(err error) {
	var exit *exec.ExitError
	if err == nil || (errors.As(err, &exit) && exit.Sys().(syscall.WaitStatus).Signaled()) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.ended = append(k.ended, err)
}

// events are those of the consumers of a broker, in their order.
func (p *chaosParty) events() []chaosEvent {
	var all []chaosEvent
	for _, k := range p.consumers {
		b, err := os.ReadFile(k.events)
		if err != nil {
			continue // It has not come so far.
		}
		for line := range bytes.Lines(b) {
			var e chaosEvent
			if json.Unmarshal(line, &e) == nil { // A kill may have cut it off.
				all = append(all, e)
			}
		}
	}
	slices.SortFunc(all, func(a, b chaosEvent) int { return a.Time.Compare(b.Time) })
	return all
}

// left says what is not done with yet; empty when all is.
func (c *chaos) left() string {
	c.Helper()
	var left []string
	for _, p := range c.parties {
		if some := p.broker.left(); some != "" {
			left = append(left, p.name+": "+some)
		}
	}
	if n := count(c.T, c.pool, "select count(*) from inbox_parked where state in ('retry', 'waiting')"); n != 0 {
		left = append(left, fmt.Sprintf("%d parked", n))
	}
	return strings.Join(left, "; ")
}

// drain waits until nothing is left.
func (c *chaos) drain(limit time.Duration) {
	c.Helper()
	timeout := time.After(limit)
	for left := c.left(); left != ""; left = c.left() {
		select {
		case <-time.After(100 * time.Millisecond):
		case <-timeout:
			c.Errorf("%v after the last fault there is left: %s", limit, left)
			return
		}
	}
}

// check compares what was sent with what became of it.
func (c *chaos) check() {
	c.Helper()
	l := &ledger{sent: map[entryID]bool{}, lanes: map[string][]entryID{}}
	for _, p := range c.parties {
		for e, poison := range p.stream.sent {
			l.sent[e] = poison
		}
		for lane, entries := range p.broker.order(p.stream) {
			l.lanes[p.name+" "+lane] = entries
		}
	}
	l.read(c.T, c.pool)
	wrong := l.check()
	const most = 10
	for _, v := range wrong[:min(most, len(wrong))] {
		c.Errorf("%v\n%s", v, c.history(v.entry))
	}
	if len(wrong) > most {
		c.Errorf("and %d more", len(wrong)-most)
	}
	if left := c.left(); left != "" {
		c.Errorf("in the end there is left: %s", left)
	}
	for _, k := range c.consumers {
		for _, err := range k.ended {
			c.Errorf("%s ended by itself: %v", k.name, err)
		}
		log, err := os.ReadFile(k.process.log)
		if err != nil {
			c.Error(err)
		}
		for _, bad := range []string{"WARNING: DATA RACE", "fatal error:", "\npanic:"} {
			if at := bytes.Index(log, []byte(bad)); at >= 0 {
				c.Errorf("%s: %s", k.name, log[at:min(len(log), at+6000)])
			}
		}
	}
	c.Logf("%d effects, the order of %d of them was checked in %d lanes; %d dead letters", len(l.effects), l.ordered(), len(l.lanes), len(l.dead))
}

// history is what the consumers told of a key.
func (c *chaos) history(of entryID) string {
	var b strings.Builder
	for _, p := range c.parties {
		if p.stream.consumer != of.consumer {
			continue
		}
		for _, e := range p.events() {
			if e.Key == of.key {
				fmt.Fprintf(&b, "\t%s %.8s %s %s %d attempt %d %.100s\n", e.Time.Format("15:04:05.000"), e.Fingerprint, e.What, e.Source, e.Offset, e.Attempt, e.Reason)
			}
		}
	}
	return b.String()
}

// report prints the counts. Where nothing happened, nothing was tested.
func (c *chaos) report(began time.Time) {
	for _, p := range c.parties {
		counts, last, longest := map[string]int{}, began, time.Duration(0)
		for _, e := range p.events() {
			counts[e.What]++
			if e.What == chaosPause || e.What == chaosRetry {
				continue
			}
			longest, last = max(longest, e.Time.Sub(last)), e.Time
		}
		for _, what := range []inbox.Outcome{inbox.FirstAttempt, inbox.Replay, inbox.WasParked, inbox.Dead} {
			if counts[string(what)] == 0 {
				c.Errorf("%s: no message ended as %s", p.name, what)
			}
		}
		s := p.stream
		c.Logf("%s: %d messages: %d distinct, %d of them fail some times and %d always, %d are conflicts; %d duplicates, %d of them in another lane. Counted (without what a kill cut off): %s. Longest pause %v",
			p.name, len(s.messages), len(s.bodies), s.failing, s.poison, s.conflicts, s.duplicates, s.strays, listOf(counts), longest.Round(10*time.Millisecond))
	}
}

func listOf(counts map[string]int) string {
	var list []string
	for _, what := range slices.Sorted(maps.Keys(counts)) {
		list = append(list, fmt.Sprintf("%d %s", counts[what], what))
	}
	return strings.Join(list, ", ")
}
