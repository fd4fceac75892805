package integration_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/sqs"
)

// The way to SQS is a black hole for 20 s, while messages are sent and handled, and
// longer than a lease lasts: it is noticed, there is no hot loop, a stop ends in time,
// consuming goes on by itself, and every message has one effect, in the order of its
// group.
func TestSQSBlackHole(t *testing.T) {
	t.Parallel()
	const lasts = 20 * time.Second
	address := strings.TrimPrefix(servers.SQS(t), "http://")
	network := newProxies(t, address)
	var through []*holed
	for name, fifo := range sqsKinds {
		through = append(through, newHoled(t, name, fifo, "http://"+network.routes[address]))
	}
	for _, h := range through {
		eventually(t, time.Minute, h.name+": the load is worked on", func() bool { return h.count(inbox.FirstAttempt) > 100 })
		h.hold.Store(true)
		eventually(t, time.Minute, h.name+": handlers wait", func() bool { return h.held.Load() > 0 })
		h.before = h.source().Stats()
	}

	cure, err := blackHole(network, []string{address})
	if err != nil {
		t.Fatal(err)
	}
	end := time.After(lasts)
	for _, h := range through {
		close(h.release)
	}
	for _, h := range through {
		eventually(t, lasts, h.name+": acks are unsent", func() bool { return h.source().Stats().Unsent > 0 })
		eventually(t, lasts, h.name+": Health says so", func() bool { return h.source().Health() != nil })
		if err := h.source().Health(); !strings.Contains(err.Error(), "not receiving") {
			t.Errorf("%s: health: %v", h.name, err)
		}
		eventually(t, lasts, h.name+": leases end", func() bool { return h.source().Stats().Lost > 0 })
		h.hold.Store(false)
	}
	again := through[0] // the order of a map is random
	began := time.Now()
	again.runs[0].stop(t)
	took := time.Since(began)
	t.Logf("%s: a stop took %v", again.name, took.Round(10*time.Millisecond))
	if took > 10*time.Second {
		t.Errorf("a stop took %v", took)
	}
	<-end // This is how long the fault lasts.
	for _, h := range through {
		h.checkTries(lasts)
	}
	if err := cure(); err != nil {
		t.Fatal(err)
	}
	cured := time.Now()
	again.start()
	for _, h := range through {
		eventually(t, time.Minute, h.name+": consuming goes on", func() bool { return h.progress.beyond(cured, 1) })
		t.Logf("%s: going on after %v", h.name, time.Since(cured).Round(10*time.Millisecond))
	}
	for _, h := range through {
		h.finish()
	}
}

// holed is a consumer of a queue that is reached through a network of the test's, and
// one who sends to it all the time by another way.
type holed struct {
	*testing.T
	name     string
	pool     *pgxpool.Pool
	queue    *sqsQueue
	endpoint string
	runs     []*sqsRun
	progress *progress
	hold     atomic.Bool   // handlers wait: most for release, some for the end of their leases
	held     atomic.Int64  // that do
	release  chan struct{} // closed: these go on
	before   sqs.Stats
	stop     chan struct{} // closed: send no more
	sent     chan error
	n        int // messages that were sent
}

func newHoled(t *testing.T, name string, fifo bool, endpoint string) *holed {
	t.Helper()
	h := &holed{
		T: t, name: name, pool: openPool(t, servers.Postgres(t)), queue: newSQSQueue(t, fifo, nil), endpoint: endpoint,
		progress: newProgress(), release: make(chan struct{}), stop: make(chan struct{}), sent: make(chan error, 1),
	}
	if _, err := h.pool.Exec(t.Context(), "create table effects (key text not null, n bigserial)"); err != nil {
		t.Fatal(err)
	}
	h.start()
	go func() { h.sent <- h.send(t.Context()) }()
	return h
}

// start starts the consumer.
func (h *holed) start() {
	h.Helper()
	h.runs = append(h.runs, h.queue.start(h.pool, h.handle, &inbox.Config{
		BatchSize: 1, AckTimeout: 3 * time.Second, Hooks: []inbox.Hook{h.progress},
	}, &sqs.Config{
		Endpoint: h.endpoint, VisibilityTimeout: 6 * time.Second, WaitTime: 2 * time.Second, RequestTimeout: 3 * time.Second,
	}))
}

func (h *holed) handle(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	if h.hold.Load() {
		h.held.Add(1)
		goOn := h.release
		if strings.HasSuffix(m.MessageKey, "1") || strings.HasSuffix(m.MessageKey, "6") {
			goOn = nil
		}
		select {
		case <-goOn:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return effect(ctx, tx, m)
}

func (h *holed) source() *sqs.Source { return h.runs[len(h.runs)-1].source }

// count returns how many messages had the outcome, in all runs.
func (h *holed) count(o inbox.Outcome) int {
	n := 0
	for _, run := range h.runs {
		n += run.count(o)
	}
	return n
}

// send sends ten messages in a while, until stop is closed.
func (h *holed) send(ctx context.Context) error {
	beat := time.NewTicker(80 * time.Millisecond)
	defer beat.Stop()
	for {
		select {
		case <-beat.C:
		case <-h.stop:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
		messages := make([]sqsMessage, 10)
		for i := range messages {
			messages[i] = sqsMessage{fmt.Sprintf("k%d", h.n%sqsGroups), fmt.Sprintf(`{"id":"m-%d"}`, h.n)}
			h.n++
		}
		if err := h.queue.trySend(ctx, messages...); err != nil {
			return err
		}
	}
}

// checkTries checks that there was no hot loop in the black hole.
func (h *holed) checkTries(lasted time.Duration) {
	h.Helper()
	st := h.source().Stats()
	receives, beats, lost := st.ReceiveErrors-h.before.ReceiveErrors, st.HeartbeatErrors-h.before.HeartbeatErrors, st.Lost-h.before.Lost
	h.Logf("%s: in %v %d requests for messages and %d leases failed, %d deliveries were lost, %d acks are unsent",
		h.name, lasted, receives, beats, lost, st.Unsent)
	if receives == 0 || receives > 2*int64(lasted/time.Second) {
		h.Errorf("%s: %d requests for messages failed in %v", h.name, receives, lasted)
	}
}

// finish ends the load and checks what came of it.
func (h *holed) finish() {
	h.Helper()
	close(h.stop)
	if err := <-h.sent; err != nil {
		h.Fatal(err)
	}
	eventually(h.T, 2*time.Minute, h.name+": nothing is left", h.queue.drained)
	eventually(h.T, time.Minute, h.name+": Health is green", func() bool { return h.source().Health() == nil })
	h.runs[len(h.runs)-1].stop(h.T)
	h.Logf("%s: %d messages, outcomes %s", h.name, h.n, h.progress.counts())
	if n, failed := h.count(inbox.FirstAttempt), h.count(inbox.Dead)+h.count(inbox.Conflict); n != h.n || failed != 0 {
		h.Errorf("%s: %d first attempts of %d messages, %d failures", h.name, n, h.n, failed)
	}
	onceEach(h.T, h.pool, h.n)
	h.queue.empty()
	if !h.queue.fifo {
		return
	}
	if wrong := count(h.T, h.pool, fmt.Sprintf(`select count(*) from (
		select id, lag(id) over (partition by id %% %d order by n) as before from (select substr(key, 3)::int as id, n from effects) e) o
		where id < before`, sqsGroups)); wrong != 0 {
		h.Errorf("%d effects came before an earlier one of their group", wrong)
	}
}
