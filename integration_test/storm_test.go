package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/integration_test/servers"
)

const (
	stormMembers    = 3
	stormPartitions = 12
	// stormBeat is the time between two changes of the group.
	stormBeat = 2 * time.Second
	// stormSession is short, so that the partitions of a killed member come back
	// while the storm goes on. The drain timeout is a third of it.
	stormSession = 3 * time.Second
)

// change is what happens to the group at one beat.
type change string

const (
	joins change = "a member joins"
	stops change = "a member stops"
	dies  change = "a member is killed"
)

// stormPlan is n changes: in each two a member joins and one leaves, every other
// time by kill -9. So the group has from two to four members.
func stormPlan(r *rand.Rand, n int) []change {
	var plan []change
	for i := range n / 2 {
		pair := []change{joins, dies}
		if i%2 == 1 {
			pair[1] = stops
		}
		r.Shuffle(2, func(i, j int) { pair[i], pair[j] = pair[j], pair[i] })
		plan = append(plan, pair...)
	}
	return plan
}

// The rebalance storm: while keyed messages flow, members join and leave, half
// of those that leave by kill -9. Every key has one effect, the events of one
// order have theirs in order, committed offsets never go back, nothing is left.
func TestRebalanceStorm(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	r := rand.New(rand.NewPCG(seed, 0))
	stream, err := orders.Generate(orders.Config{Events: sized(20_000, 200_000), Repeats: 0.2, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	plan := stormPlan(r, sized(8, 30))
	t.Logf("seed %d, %d messages, %d distinct keys, %d changes", seed, len(stream.Lines), stream.Distinct, len(plan))
	s := newStorm(t, stream)
	for range stormMembers {
		s.join()
	}
	eventually(t, time.Minute, "the first member has partitions", func() bool { return len(s.events("assigned")) > 0 })
	produced := s.produce(stream.Lines, time.Duration(len(plan))*stormBeat+stormBeat/2)
	began := time.Now()

	beat := time.NewTicker(stormBeat)
	defer beat.Stop()
	for _, c := range plan {
		<-beat.C
		if lag := s.lag(); lag <= 0 {
			t.Errorf("when %s the lag is %d: nothing flows", c, lag)
		}
		s.apply(r, c)
	}
	inStorm := count(t, s.pool, "select count(*) from effects")
	t.Logf("the storm is over after %v, %d effects, lag %d", time.Since(began).Round(time.Millisecond), inStorm, s.lag())
	if inStorm == 0 || inStorm == stream.Distinct {
		t.Errorf("%d of %d effects were made in the storm: it did not hit the work", inStorm, stream.Distinct)
	}
	if err := <-produced; err != nil {
		t.Fatal(err)
	}
	eventually(t, 5*time.Minute, "lag 0 after the storm", func() bool { return s.lag() == 0 })
	t.Logf("lag 0 after %v", time.Since(began).Round(time.Millisecond))
	for _, m := range slices.Clone(s.members) {
		s.stop(m)
	}
	s.leaving.Wait()
	s.tp.checkOffsets(s.tp.name)
	s.checkEffects(stream)
	s.report(plan)
}

// storm is a group whose members are processes.
type storm struct {
	t    *testing.T
	tp   *topic
	pool *pgxpool.Pool
	url  string
	self string
	dir  string

	members []*stormMember // in the group
	all     []*stormMember
	leaving sync.WaitGroup
	running sync.WaitGroup

	kills, hits, open int // hits: kills of members with open transactions
}

type stormMember struct {
	process
	name string
}

// signal sends a signal that does not end the member.
func (m *stormMember) signal(sig syscall.Signal) {
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = m.cmd.Process.Signal(sig)
}

func newStorm(t *testing.T, stream orders.Stream) *storm {
	t.Helper()
	url := servers.PostgresDurable(t)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	s := &storm{t: t, tp: newTopic(t, servers.Kafka(t), stormPartitions), pool: openPool(t, url), url: url, self: self, dir: t.TempDir()}
	t.Cleanup(func() {
		for _, m := range s.all {
			_ = m.end(syscall.SIGKILL)
		}
		s.leaving.Wait()
		s.running.Wait()
	})
	// seen is how many effects of the order were there before this one. There is
	// no unique constraint: a second effect must show.
	if _, err := s.pool.Exec(t.Context(), `
		create table effects (id bigint generated always as identity, order_id text not null, event_type text not null,
			seen int not null, worker text not null, source text not null, source_offset bigint not null);
		create index on effects (order_id);
		create table expected (order_id text not null, event_type text not null, seq int not null)`); err != nil {
		t.Fatal(err)
	}
	s.expect(stream)
	return s
}

// expect stores the distinct events, each with its number within its order.
func (s *storm) expect(stream orders.Stream) {
	s.t.Helper()
	known, length := map[[2]string]bool{}, map[string]int{}
	var rows [][]any
	for _, l := range stream.Lines {
		var e orders.Event
		if err := json.Unmarshal(l.Body, &e); err != nil {
			s.t.Fatal(err)
		}
		if id := [2]string{e.OrderID, e.EventType}; !known[id] {
			known[id] = true
			rows = append(rows, []any{e.OrderID, e.EventType, length[e.OrderID]})
			length[e.OrderID]++
		}
	}
	if _, err := s.pool.CopyFrom(s.t.Context(), pgx.Identifier{"expected"}, []string{"order_id", "event_type", "seq"}, pgx.CopyFromRows(rows)); err != nil {
		s.t.Fatal(err)
	}
}

func (s *storm) apply(r *rand.Rand, c change) {
	s.t.Helper()
	switch c {
	case joins:
		s.join()
	case stops:
		s.stop(s.members[r.IntN(len(s.members))])
	case dies:
		s.kill(s.members[r.IntN(len(s.members))])
	}
}

func (s *storm) join() *stormMember {
	s.t.Helper()
	name := fmt.Sprintf("member-%d", len(s.all))
	m := &stormMember{name: name, process: process{t: s.t, path: s.self, log: filepath.Join(s.dir, name+".log"), env: []string{
		"ACKAFTER_CHILD=storm", "CHILD_NAME=" + name, "CHILD_URL=" + s.url, "CHILD_BROKERS=" + strings.Join(s.tp.brokers, ","), "CHILD_TOPIC=" + s.tp.name,
	}}}
	s.members, s.all = append(s.members, m), append(s.all, m)
	m.start()
	return m
}

// remove takes a member off the list.
func (s *storm) remove(m *stormMember) {
	s.members = slices.DeleteFunc(s.members, func(o *stormMember) bool { return o == m })
}

// stop ends a member in order; the storm does not wait for it.
func (s *storm) stop(m *stormMember) {
	s.remove(m)
	s.leaving.Go(func() {
		if err := m.end(syscall.SIGTERM); err != nil {
			s.t.Errorf("%s stopped with %v: %s", m.name, err, m.tail())
		}
	})
}

// kill ends a member with SIGKILL, if there is one at a moment when it has
// transactions open.
func (s *storm) kill(m *stormMember) {
	s.t.Helper()
	s.remove(m)
	open := s.freeze(m)
	if err := m.end(syscall.SIGKILL); err == nil {
		s.t.Errorf("%s had ended before it was killed: %s", m.name, m.tail())
	}
	s.kills++
	s.open += open
	if open > 0 {
		s.hits++
	}
}

// freeze stops a member's process where it is, within half a beat at a moment
// when it has transactions open, and returns how many.
func (s *storm) freeze(m *stormMember) int {
	s.t.Helper()
	for limit := time.Now().Add(stormBeat / 2); ; {
		m.signal(syscall.SIGSTOP)
		open := count(s.t, s.pool, `select count(*) from pg_stat_activity
			where datname = current_database() and application_name = $1 and xact_start is not null`, m.name)
		if open > 0 || time.Now().After(limit) {
			return open
		}
		m.signal(syscall.SIGCONT)
		<-time.After(5 * time.Millisecond)
	}
}

// lag is how much is not committed.
func (s *storm) lag() int64 {
	s.t.Helper()
	lag := int64(-1)
	eventually(s.t, time.Minute, "the lag is known", func() bool {
		lag = s.tp.lag(s.tp.name)
		return lag >= 0
	})
	return lag
}

// produce writes the lines at an even pace with one kcat.
func (s *storm) produce(lines []orders.Line, over time.Duration) <-chan error {
	s.t.Helper()
	path, err := exec.LookPath("kcat")
	if err != nil {
		missing(s.t, "kcat is not installed")
	}
	ctx := s.t.Context()
	// Without idempotence a resent request could change the order.
	cmd := exec.CommandContext(ctx, path, "-P", "-b", strings.Join(s.tp.brokers, ","), "-t", s.tp.name, "-K", "\t", "-X", "enable.idempotence=true")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	in, err := cmd.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	done := make(chan error, 1)
	s.running.Go(func() {
		err := errors.Join(pour(ctx, in, lines, over), in.Close(), cmd.Wait())
		if err != nil {
			err = fmt.Errorf("kcat: %w\n%s", err, out.Bytes())
		}
		done <- err
	})
	return done
}

// pour writes the lines at an even pace.
func pour(ctx context.Context, to io.Writer, lines []orders.Line, over time.Duration) error {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	w := bufio.NewWriter(to)
	for began, sent := time.Now(), 0; sent < len(lines); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		due := min(len(lines), int(float64(len(lines))*time.Since(began).Seconds()/over.Seconds()))
		if _, err := (orders.Stream{Lines: lines[sent:due]}).WriteTo(w); err != nil {
			return err
		}
		if err := w.Flush(); err != nil {
			return err
		}
		sent = due
	}
	return nil
}

// checkEffects checks that each event has one effect, in the order of its order's
// events, and that the inbox agrees.
func (s *storm) checkEffects(stream orders.Stream) {
	s.t.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects": stream.Distinct,
		"select count(*) from (select distinct order_id, event_type from effects) e":                stream.Distinct,
		"select count(*) from effects join expected using (order_id, event_type)":                   stream.Distinct,
		"select count(*) from inbox where status = 'done'":                                          stream.Distinct,
		"select count(*) from inbox":                                                                stream.Distinct,
		"select count(*) from inbox_parked":                                                         0,
		"select count(*) from inbox_guard":                                                          0,
		"select count(distinct source) from effects":                                                stormPartitions,
		"select count(*) from effects join expected using (order_id, event_type) where seen <> seq": 0,
		`select count(*) from (select seq, row_number() over (partition by order_id order by id) - 1 as place
			from effects join expected using (order_id, event_type)) e where seq <> place`: 0,
		`select count(*) from effects e join inbox i on i.message_key = e.order_id || '|' || e.event_type
			and i.source = e.source and i.position = e.source_offset and i.worker = e.worker`: stream.Distinct,
	} {
		if n := count(s.t, s.pool, query); n != want {
			s.t.Errorf("%s = %d, want %d", query, n, want)
		}
	}
}

// report checks that the storm was one, and prints what it did.
func (s *storm) report(plan []change) {
	s.t.Helper()
	did := map[change]int{}
	for _, c := range plan {
		did[c]++
	}
	s.t.Logf("%d joins, %d stops, %d kills, %d of them of a member with open transactions (%d)", did[joins], did[stops], did[dies], s.hits, s.open)
	if s.kills != did[dies] || len(s.all) != stormMembers+did[joins] || len(s.members) != 0 {
		s.t.Errorf("%d kills, %d members, %d left: not as planned", s.kills, len(s.all), len(s.members))
	}
	if s.hits == 0 {
		s.t.Error("no kill hit a member at work")
	}
	generations := map[int32]bool{}
	for _, e := range s.events("assigned") {
		generations[e.Generation] = true
	}
	var drains []time.Duration
	lost, late := 0, 0
	revoked := s.events("revoked")
	for _, e := range revoked {
		drains = append(drains, e.Drain)
		lost += e.Lost
		if e.Err != "" {
			late++
		}
	}
	s.t.Logf("%d generations, %d revocations, %d deliveries lost in them, %d of them without the last commit, %d stale acks, %d failed commits",
		len(generations), len(revoked), lost, late, len(s.events("stale ack")), len(s.events("commit error")))
	s.t.Logf("drain: %s; from revoked to assigned again: %s", spread(drains), spread(s.pauses()))
	if len(generations) < len(plan)/2 {
		s.t.Errorf("%d generations in %d changes: no storm", len(generations), len(plan))
	}
}

// pauses are the times that members had no partitions between two generations,
// the drain included.
func (s *storm) pauses() []time.Duration {
	var pauses []time.Duration
	for _, m := range s.all {
		var from time.Time
		for _, e := range m.events() {
			switch {
			case e.Msg == "revoked":
				from = e.Time.Add(-e.Drain)
			case e.Msg == "assigned" && !from.IsZero():
				pauses = append(pauses, e.Time.Sub(from))
				from = time.Time{}
			}
		}
	}
	return pauses
}

// spread prints the middle, the slow end and the worst of durations.
func spread(ds []time.Duration) string {
	if len(ds) == 0 {
		return "none"
	}
	slices.Sort(ds)
	at := func(share float64) time.Duration { return ds[int(share*float64(len(ds)-1))].Round(time.Millisecond) }
	return fmt.Sprintf("p50 %v, p95 %v, max %v (%d)", at(0.5), at(0.95), at(1), len(ds))
}
