package integration_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/keyfunc"
)

// witness keeps the events of a consumer and its source, in their order.
type witness struct {
	mu       sync.Mutex
	outcomes []inbox.OutcomeEvent
	at       []time.Time // of the outcomes
	gaps     []kafka.GapError
	resets   []kafka.ResetError
	commits  []kafka.CommitErrorEvent
}

func (w *witness) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.outcomes, w.at = append(w.outcomes, e), append(w.at, time.Now())
}

func (w *witness) OnGap(_ context.Context, e kafka.GapError) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.gaps = append(w.gaps, e)
}

func (w *witness) OnReset(_ context.Context, e kafka.ResetError) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.resets = append(w.resets, e)
}

func (w *witness) OnCommitError(_ context.Context, e kafka.CommitErrorEvent) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.commits = append(w.commits, e)
}

// count returns how many messages had the outcome.
func (w *witness) count(o inbox.Outcome) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	n := 0
	for _, e := range w.outcomes {
		if e.Outcome == o {
			n++
		}
	}
	return n
}

// consumer is a consumer of a pipeline that runs, and what it tells.
type consumer struct {
	witness
	source *kafka.Source
	cancel context.CancelFunc
	done   chan error
}

// start starts a consumer in the group of the topic's name; either configuration
// may be nil.
func (p *pipeline) start(key keyfunc.Func, h inbox.Handler[pgx.Tx], cfg *inbox.Config, source *kafka.Config) *consumer {
	p.t.Helper()
	return p.startIn(p.topic.name, key, h, cfg, source)
}

func (p *pipeline) startIn(group string, key keyfunc.Func, h inbox.Handler[pgx.Tx], cfg *inbox.Config, source *kafka.Config) *consumer {
	p.t.Helper()
	c := &consumer{done: make(chan error, 1)}
	if cfg == nil {
		cfg = &inbox.Config{}
	}
	if source == nil {
		source = &kafka.Config{}
	}
	cfg.Hooks = append(cfg.Hooks, inbox.Hook(&c.witness))
	source.Hooks = append(source.Hooks, kafka.Hook(&c.witness))
	source.CommitInterval, source.SessionTimeout = 20*time.Millisecond, 6*time.Second
	cfg.Logger, source.Logger = slog.New(slog.DiscardHandler), slog.New(slog.DiscardHandler)
	store, err := inboxpgx.New(p.pool)
	if err != nil {
		p.t.Fatal(err)
	}
	in, err := inbox.New(store, p.topic.name, key, h, cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	opening, opened := context.WithTimeout(p.t.Context(), time.Minute)
	defer opened()
	if c.source, err = kafka.Open(opening, p.topic.brokers, group, []string{p.topic.name}, source); err != nil {
		p.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(p.t.Context())
	c.cancel = cancel
	go func() { c.done <- in.Run(ctx, c.source) }()
	return c
}

// stop stops the consumer in order.
func (c *consumer) stop(t *testing.T) {
	t.Helper()
	c.cancel()
	if err := <-c.done; err != nil {
		t.Errorf("Run = %v", err)
	}
}

// ended waits until Run ends by itself, and returns its error.
func (c *consumer) ended(t *testing.T, limit time.Duration) error {
	t.Helper()
	defer c.cancel()
	select {
	case err := <-c.done:
		return err
	case <-time.After(limit):
		t.Fatalf("Run did not end within %v; health: %v", limit, c.source.Health())
		return nil
	}
}

// lag0 waits until the group has committed everything.
func (p *pipeline) lag0() {
	p.t.Helper()
	eventually(p.t, time.Minute, "lag 0", func() bool { return p.topic.lag(p.topic.name) == 0 })
}

// write writes messages to a partition.
func (p *pipeline) write(partition int, ms ...kafkago.Message) {
	p.t.Helper()
	w := &kafkago.Writer{
		Addr: kafkago.TCP(p.topic.brokers...), Topic: p.topic.name, RequiredAcks: kafkago.RequireAll, BatchTimeout: time.Millisecond,
		Balancer: kafkago.BalancerFunc(func(kafkago.Message, ...int) int { return partition }),
	}
	defer w.Close()
	if err := w.WriteMessages(p.t.Context(), ms...); err != nil {
		p.t.Fatal(err)
	}
}

// commitAs sets the group's offset of partition 0 as an administrator does.
func (p *pipeline) commitAs(offset int64) {
	p.t.Helper()
	r, err := p.topic.client.OffsetCommit(p.t.Context(), &kafkago.OffsetCommitRequest{
		GroupID: p.topic.name, GenerationID: -1,
		Topics: map[string][]kafkago.OffsetCommit{p.topic.name: {{Partition: 0, Offset: offset}}},
	})
	if err == nil {
		err = r.Topics[p.topic.name][0].Error
	}
	if err != nil {
		p.t.Fatalf("commit: %v", err)
	}
}

// case S3 for Kafka keys: a failing message holds its key and no other.
func TestKeyOrderAroundAFailure(t *testing.T) {
	t.Parallel()
	for _, batch := range []int{1, 50} {
		t.Run("batch="+strconv.Itoa(batch), func(t *testing.T) {
			t.Parallel()
			p := newPipeline(t)
			steps := newSteps(t, p.pool)
			p.write(0, kafkago.Message{Key: []byte("g1"), Value: []byte(`{"id":"a"}`)}, kafkago.Message{Key: []byte("g1"), Value: []byte(`{"id":"b"}`)},
				kafkago.Message{Key: []byte("g2"), Value: []byte(`{"id":"c"}`)}, kafkago.Message{Key: []byte("g1"), Value: []byte(`{"id":"d"}`)})
			c := p.start(keyfunc.JSON("id"), steps.handle, &inbox.Config{BatchSize: batch}, nil)
			p.lag0()
			// What waits for another attempt may be parked.
			eventually(t, time.Minute, "all are handled", func() bool { return c.count(inbox.FirstAttempt) == 4 })
			c.stop(t)
			steps.check(t)
		})
	}
}

// steps are what a handler did with the messages a, b and d of one lane and c of
// another one. a fails once.
type steps struct {
	pool *pgxpool.Pool
	mu   sync.Mutex
	runs []string
}

func newSteps(t *testing.T, pool *pgxpool.Pool) *steps {
	t.Helper()
	if _, err := pool.Exec(t.Context(), "create table steps (n bigserial, key text)"); err != nil {
		t.Fatal(err)
	}
	return &steps{pool: pool}
}

func (s *steps) handle(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	s.mu.Lock()
	s.runs = append(s.runs, m.MessageKey+strconv.Itoa(m.Attempt))
	s.mu.Unlock()
	if _, err := tx.Exec(ctx, "insert into steps (key) values ($1)", m.MessageKey); err != nil {
		return err
	}
	if m.MessageKey == "a" && m.Attempt == 1 {
		// The second attempt comes when c is done.
		return inbox.RetryAfter(errors.New("not yet"), 2*time.Second)
	}
	return nil
}

// check is called at the end.
func (s *steps) check(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	again := slices.Index(s.runs, "a2")
	if cRun := slices.Index(s.runs, "c1"); cRun < 0 || again < cRun || again < slices.Index(s.runs, "a1") ||
		len(s.runs) != 5 || !slices.Equal(s.runs[again:], []string{"a2", "b1", "d1"}) {
		t.Errorf("the handler ran for %v", s.runs)
	}
	var order string
	if err := s.pool.QueryRow(t.Context(), "select string_agg(key, '' order by n) from steps").Scan(&order); err != nil {
		t.Fatal(err)
	}
	if order != "cabd" {
		t.Errorf("effects in the order %q, want c, a, b, d", order)
	}
}

// case K2: a commit fails, the connection breaks under it. The message is handled
// once, the commit is tried again by itself, and the next message does not wait for
// it.
func TestSpoiledCommit(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name    string
		reaches bool
	}{{"answer lost", true}, {"request lost", false}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			p := newPipeline(t)
			n := &network{}
			// The very first commit is that of the first position.
			n.spoilNext(offsetCommitRequest, row.reaches)
			c := p.start(keyfunc.JSON("id"), effect, nil, &kafka.Config{Dial: n.dial})
			eventually(t, time.Minute, "the first position is committed", func() bool { return p.committed() == 0 && c.source.Stats().Commits > 0 })
			for i := range 2 {
				n.spoilNext(offsetCommitRequest, row.reaches)
				p.write(0, kafkago.Message{Value: fmt.Appendf(nil, `{"id":"m-%d"}`, i)})
				// Its commit, or that of the message before, fails meanwhile.
				eventually(t, 10*time.Second, "the message is done", func() bool { return c.count(inbox.FirstAttempt) == i+1 })
			}
			p.lag0()
			c.stop(t)
			p.once(2)
			if st := c.source.Stats(); st.CommitErrors != 3 || len(c.commits) != 3 || st.Rebalances != 1 {
				t.Errorf("%d commit errors in %d generations, events %+v", st.CommitErrors, st.Rebalances, c.commits)
			}
			if len(c.outcomes) != 2 {
				t.Errorf("%d outcomes, want 2: %+v", len(c.outcomes), c.outcomes)
			}
			if at := p.committed(); at != 2 {
				t.Errorf("committed offset %d, want 2", at)
			}
		})
	}
}

// case K3: a partition from which nothing was consumed yet, and a restart with
// defaults.
func TestQuietPartition(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	p.topic = newTopic(t, p.topic.brokers, 3)
	p.write(0, kafkago.Message{Value: []byte(`{"id":"early"}`)})
	c := p.start(keyfunc.JSON("id"), effect, nil, nil)
	eventually(t, time.Minute, "the first partition is done", func() bool { return p.committed() == 1 })
	c.stop(t)
	for i := range 5 {
		p.write(2, kafkago.Message{Value: fmt.Appendf(nil, `{"id":"late-%d"}`, i)})
	}
	c = p.start(keyfunc.JSON("id"), effect, nil, nil)
	p.lag0()
	c.stop(t)
	p.once(6)
}

// case K4: retention has passed the committed offset.
func TestGap(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name   string
		policy kafka.GapPolicy
	}{{"continue", kafka.GapContinue}, {"stop", kafka.GapStop}} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			p := newPipeline(t)
			p.produce(600)
			p.commitAs(100)
			p.deleteRecords(500)
			want := kafka.GapError{Topic: p.topic.name, From: 100, To: 500}
			c := p.start(keyfunc.JSON("id"), effect, nil, &kafka.Config{OnGap: row.policy})
			if row.policy == kafka.GapStop {
				err := c.ended(t, time.Minute)
				var gap *kafka.GapError
				if !errors.As(err, &gap) || *gap != want || gap.Count() != 400 {
					t.Errorf("Run = %v, want the gap", err)
				}
				if at := p.committed(); at != 100 {
					t.Errorf("committed offset %d after the stop, want 100", at)
				}
				p.once(0)
			} else {
				p.lag0()
				if err := c.source.Health(); err == nil || !says(err, "offsets 100 to 499 (400) are gone") {
					t.Errorf("Health = %v, want the gap", err)
				}
				if st := c.source.Stats(); st.Gaps != 1 || st.GapOffsets != 400 {
					t.Errorf("%d gaps of %d offsets", st.Gaps, st.GapOffsets)
				}
				c.stop(t)
				p.once(100)
			}
			if len(c.gaps) != 1 || c.gaps[0] != want {
				t.Errorf("events %+v, want %+v", c.gaps, want)
			}
		})
	}
}

// case K5: the topic is created anew with ten messages while the group is at
// offset 1000.
func TestTopicCreatedAnew(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		// known tells that the ten messages are ones that were handled before.
		known   bool
		policy  kafka.ResetPolicy
		running bool // the consumer runs meanwhile
		keep    bool // the group keeps its offset, as after a restore or a switch of clusters
	}{
		{name: "stop, running", running: true},
		{name: "stop, offset kept", keep: true},
		{name: "stop, offset gone"}, // the broker forgets it with the topic: it is a new topic
		{name: "restart, running", policy: kafka.ResetRestart, running: true},
		{name: "restart, running, messages known", policy: kafka.ResetRestart, running: true, known: true},
		{name: "restart, offset kept", policy: kafka.ResetRestart, keep: true},
		{name: "restart, offset kept, messages known", policy: kafka.ResetRestart, keep: true, known: true},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			const before = 1000
			p := newPipeline(t)
			p.produce(before)
			source := func() *kafka.Config {
				cfg := &kafka.Config{OnReset: row.policy}
				if row.policy == kafka.ResetRestart {
					cfg.WatchInterval = time.Second // the other policy shows that the default is good enough
				}
				return cfg
			}
			c := p.start(keyfunc.JSON("id"), effect, nil, source())
			p.lag0()
			if !row.running {
				c.stop(t)
			}
			p.recreate()
			if row.keep {
				p.commitAs(before)
			}
			began := time.Now()
			if !row.running {
				c = p.start(keyfunc.JSON("id"), effect, nil, source())
			}
			prefix := "new"
			if row.known {
				prefix = "m"
			}
			for i := range 10 {
				p.write(0, kafkago.Message{Value: fmt.Appendf(nil, `{"id":"%s-%d"}`, prefix, i)})
			}
			switch {
			case row.policy == kafka.ResetStop && !row.running && !row.keep:
				p.lag0()
				c.stop(t)
				p.once(before + 10)
				return
			case row.policy == kafka.ResetStop:
				err := c.ended(t, time.Minute)
				took := time.Since(began)
				t.Logf("after %v: %v", took, err)
				var reset *kafka.ResetError
				if !errors.As(err, &reset) || reset.Topic != p.topic.name || took > 30*time.Second {
					t.Errorf("after %v Run = %v, want a ResetError within 30 s", took, err)
				}
				return
			}
			eventually(t, time.Minute, "all of the new topic is committed", func() bool { return p.committed() == 10 })
			t.Logf("after %v", time.Since(began))
			if err := c.source.Health(); err == nil {
				t.Error("Health is silently green")
			}
			c.stop(t)
			effects, replays := before+10, 0
			if row.known {
				effects, replays = before, 10
			}
			p.once(effects)
			// What came before it was noticed comes again.
			if n := c.count(inbox.Replay); n < replays || n > replays+10 {
				t.Errorf("%d replays, want %d", n, replays)
			}
			if len(c.resets) == 0 || c.resets[0].Topic != p.topic.name {
				t.Errorf("events %+v", c.resets)
			}
		})
	}
}

// recreate deletes the topic and creates it anew.
func (p *pipeline) recreate() {
	p.t.Helper()
	r, err := p.topic.client.DeleteTopics(p.t.Context(), &kafkago.DeleteTopicsRequest{Topics: []string{p.topic.name}})
	if err != nil || r.Errors[p.topic.name] != nil {
		p.t.Fatalf("delete topic: %v, %+v", err, r)
	}
	eventually(p.t, time.Minute, "the topic is created anew", func() bool {
		r, err := p.topic.client.CreateTopics(p.t.Context(), &kafkago.CreateTopicsRequest{Topics: []kafkago.TopicConfig{{
			Topic: p.topic.name, NumPartitions: 1, ReplicationFactor: 1,
		}}})
		return err == nil && r.Errors[p.topic.name] == nil
	})
}
