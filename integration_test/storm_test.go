package integration_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
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
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
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
	stream, err := orders.Generate(orders.Config{Events: sized(30_000, 200_000), Repeats: 0.2, Seed: seed})
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
	watch := s.watchOffsets()
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
	watch.stop()
	s.checkEffects(stream)
	s.report(plan, watch)
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

func (s *storm) join() {
	s.t.Helper()
	name := fmt.Sprintf("member-%d", len(s.all))
	m := &stormMember{name: name, process: process{t: s.t, path: s.self, log: filepath.Join(s.dir, name+".log"), env: []string{
		"ACKAFTER_CHILD=storm", "CHILD_NAME=" + name, "CHILD_URL=" + s.url, "CHILD_BROKERS=" + strings.Join(s.tp.brokers, ","), "CHILD_TOPIC=" + s.tp.name,
	}}}
	s.members, s.all = append(s.members, m), append(s.all, m)
	m.start()
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

// kill ends a member with SIGKILL, within a moment, and if there is one while it
// has transactions open. It is frozen to look.
func (s *storm) kill(m *stormMember) {
	s.t.Helper()
	s.remove(m)
	open := 0
	for limit := time.Now().Add(stormBeat / 2); ; {
		_ = m.cmd.Process.Signal(syscall.SIGSTOP)
		open = count(s.t, s.pool, `select count(*) from pg_stat_activity
			where datname = current_database() and application_name = $1 and xact_start is not null`, m.name)
		if open > 0 || time.Now().After(limit) {
			break
		}
		_ = m.cmd.Process.Signal(syscall.SIGCONT)
		<-time.After(5 * time.Millisecond)
	}
	if err := m.end(syscall.SIGKILL); err == nil {
		s.t.Errorf("%s had ended before it was killed: %s", m.name, m.tail())
	}
	s.kills++
	s.open += open
	if open > 0 {
		s.hits++
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

// offsetWatch samples the committed offsets.
type offsetWatch struct {
	stop    func()
	samples int
	longest time.Duration // between two samples
}

// watchOffsets samples until stopped, and fails the test when an offset goes
// back.
func (s *storm) watchOffsets() *offsetWatch {
	ctx, cancel := context.WithCancel(s.t.Context())
	w, ended := &offsetWatch{}, make(chan struct{})
	w.stop = func() {
		cancel()
		<-ended
	}
	s.running.Go(func() {
		defer close(ended)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		known, at := map[int]int64{}, time.Now()
		for {
			offsets := s.committed(ctx)
			for p, offset := range offsets {
				if offset < known[p] {
					s.t.Errorf("the committed offset of partition %d went back from %d to %d", p, known[p], offset)
				}
				known[p] = offset
			}
			if len(offsets) > 0 {
				w.samples++
				w.longest, at = max(w.longest, time.Since(at)), time.Now()
			}
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
	return w
}

// committed asks the broker for the group's offsets; none for a partition
// without one.
func (s *storm) committed(ctx context.Context) map[int]int64 {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	parts := make([]int, stormPartitions)
	for p := range parts {
		parts[p] = p
	}
	offsets := map[int]int64{}
	r, err := s.tp.client.OffsetFetch(ctx, &kafkago.OffsetFetchRequest{GroupID: s.tp.name, Topics: map[string][]int{s.tp.name: parts}})
	if err != nil || r.Error != nil {
		return offsets
	}
	for _, p := range r.Topics[s.tp.name] {
		if p.Error == nil && p.CommittedOffset >= 0 {
			offsets[p.Partition] = p.CommittedOffset
		}
	}
	return offsets
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
func (s *storm) report(plan []change, w *offsetWatch) {
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
	if w.samples == 0 {
		s.t.Error("no offset was ever sampled")
	}
	s.t.Logf("offsets sampled %d times, at most %v apart", w.samples, w.longest.Round(time.Millisecond))

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

// stormEvent is a line of a member's log.
type stormEvent struct {
	Time       time.Time     `json:"time"`
	Msg        string        `json:"msg"`
	Generation int32         `json:"generation"`
	Partitions int           `json:"partitions"`
	Lost       int           `json:"lost"`
	Drain      time.Duration `json:"drain"`
	Err        string        `json:"err"`
}

// events returns the events of one kind of all members.
func (s *storm) events(msg string) []stormEvent {
	var found []stormEvent
	for _, m := range s.all {
		for _, e := range m.events() {
			if e.Msg == msg {
				found = append(found, e)
			}
		}
	}
	return found
}

// events reads the member's log; a last line cut off by a kill is left out.
func (m *stormMember) events() []stormEvent {
	b, err := os.ReadFile(m.log)
	if err != nil {
		m.t.Error(err)
	}
	var found []stormEvent
	for line := range bytes.Lines(b) {
		var e stormEvent
		if json.Unmarshal(line, &e) == nil {
			found = append(found, e)
		}
	}
	return found
}

// stormChild is the main function of a member.
func stormChild(ctx context.Context) error {
	name, topic := os.Getenv("CHILD_NAME"), os.Getenv("CHILD_TOPIC")
	cfg, err := pgxpool.ParseConfig(os.Getenv("CHILD_URL"))
	if err != nil {
		return err
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = name
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return err
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		return err
	}
	quiet := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	consumer, err := inbox.New(store, "storm", keyfunc.JSON("orderId", "eventType"), inbox.JSON(stormHandler(name)), &inbox.Config{
		Workers: 3, BatchSize: 10, Worker: name, Logger: quiet,
	})
	if err != nil {
		return err
	}
	src, err := kafka.Open(ctx, strings.Split(os.Getenv("CHILD_BROKERS"), ","), topic, []string{topic}, &kafka.Config{
		SessionTimeout: stormSession, CommitInterval: 100 * time.Millisecond, Logger: quiet,
		Hooks: []kafka.Hook{stormHook{slog.New(slog.NewJSONHandler(os.Stdout, nil))}},
	})
	if err != nil {
		return err
	}
	return consumer.Run(ctx, src)
}

// stormHandler writes the effect of an event, and how many effects of its order
// it saw. One in a hundred takes long, one in ten thousand longer than a rebalance
// waits.
func stormHandler(name string) func(context.Context, pgx.Tx, *inbox.Message, orders.Event) error {
	return func(ctx context.Context, tx pgx.Tx, m *inbox.Message, e orders.Event) error {
		took := time.Duration(rand.IntN(1000)) * time.Microsecond
		switch n := rand.IntN(10_000); {
		case n < 1:
			took = stormSession / 2
		case n < 100:
			took = stormSession / 10
		}
		select {
		case <-time.After(took):
		case <-ctx.Done():
			return ctx.Err()
		}
		_, err := tx.Exec(ctx, `insert into effects (order_id, event_type, worker, source, source_offset, seen)
			select $1, $2, $3, $4, $5, (select count(*) from effects where order_id = $1)`,
			e.OrderID, e.EventType, name, m.Source, m.Position.Offset)
		return err
	}
}

// stormHook writes what happens to the membership into the log, at once: a
// member may be killed.
type stormHook struct{ log *slog.Logger }

func (h stormHook) OnAssigned(ctx context.Context, e kafka.AssignedEvent) {
	h.log.InfoContext(ctx, "assigned", "generation", e.Generation, "partitions", len(e.Partitions))
}

func (h stormHook) OnRevoked(ctx context.Context, e kafka.RevokedEvent) {
	err := ""
	if e.Err != nil {
		err = e.Err.Error()
	}
	h.log.InfoContext(ctx, "revoked", "generation", e.Generation, "partitions", len(e.Partitions), "lost", e.Lost, "drain", e.Drain, "err", err)
}

func (h stormHook) OnStaleAck(ctx context.Context, e kafka.StaleAckEvent) {
	h.log.InfoContext(ctx, "stale ack", "partition", e.Partition)
}

func (h stormHook) OnCommitError(ctx context.Context, e kafka.CommitErrorEvent) {
	h.log.InfoContext(ctx, "commit error", "err", e.Err.Error())
}
