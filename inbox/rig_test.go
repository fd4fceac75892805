package inbox_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// rig runs one consumer over a memory queue inside a synctest bubble.
type rig struct {
	t     *testing.T
	store *fakeStore
	queue *memory.Queue
	src   *memory.Source
	seen  *recorder
	logs  *lockedWriter
	stop  context.CancelFunc
	done  chan error
}

type handler = inbox.Handler[*fakeTx]

// recorder is a hook that keeps everything.
type recorder struct {
	mu       sync.Mutex
	outcomes []inbox.OutcomeEvent
	retries  []inbox.RetryEvent
	pauses   []inbox.PauseEvent
	stale    int
	batches  []inbox.BatchEvent
}

func (r *recorder) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.outcomes = append(r.outcomes, e)
}

func (r *recorder) OnRetry(_ context.Context, e inbox.RetryEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.retries = append(r.retries, e)
}

func (r *recorder) OnPause(_ context.Context, e inbox.PauseEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pauses = append(r.pauses, e)
}

func (r *recorder) OnStaleAck(context.Context, inbox.StaleAckEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stale++
}

func (r *recorder) OnBatch(_ context.Context, e inbox.BatchEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.batches = append(r.batches, e)
}

// count returns how many messages had the outcome.
func (r *recorder) count(o inbox.Outcome) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, e := range r.outcomes {
		if e.Outcome == o {
			n++
		}
	}
	return n
}

// counted returns how many failed attempts were counted, and how many not.
func (r *recorder) counted() (counted, free int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, e := range r.retries {
		if e.Counted {
			counted++
		} else {
			free++
		}
	}
	return counted, free
}

func newRig(t *testing.T) *rig {
	t.Helper()
	return &rig{t: t, store: newFakeStore(), queue: memory.New("orders", nil), seen: &recorder{}, logs: &lockedWriter{}}
}

// start runs a consumer; cfg may be nil.
func (r *rig) start(h handler, cfg *inbox.Config) {
	r.t.Helper()
	r.startBulk(func(c *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
		return inbox.New(r.store, "billing", keyfunc.JSON("id"), h, c)
	}, cfg)
}

func (r *rig) startBulk(construct func(*inbox.Config) (*inbox.Consumer[*fakeTx], error), cfg *inbox.Config) {
	r.t.Helper()
	if cfg == nil {
		cfg = &inbox.Config{}
	}
	cfg.Hooks = append(cfg.Hooks, r.seen)
	cfg.Logger = slog.New(slog.NewTextHandler(r.logs, nil))
	c, err := construct(cfg)
	if err != nil {
		r.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(r.t.Context())
	src, done := r.queue.Source(), make(chan error, 1)
	r.src, r.stop, r.done = src, stop, done
	go func() { done <- c.Run(ctx, src) }()
}

type lockedWriter struct {
	mu sync.Mutex
	w  bytes.Buffer
}

func (l *lockedWriter) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.String()
}

func (l *lockedWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.w.Write(p)
}

// drain waits until every message is acked, and none is parked for later.
func (r *rig) drain() {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), time.Hour)
	defer cancel()
	if err := r.queue.Drained(ctx); err != nil {
		r.t.Fatalf("not drained: %v\nlogs:\n%s", err, r.logs)
	}
	r.store.unparked(ctx, r.t)
	synctest.Wait()
}

// end stops the consumer and returns what Run returned.
func (r *rig) end() error {
	r.t.Helper()
	r.stop()
	return <-r.done
}

// publish sends messages {"id":"ID","n":N}, the lane being the part of the id
// before a dash.
func (r *rig) publish(ids ...string) {
	for _, id := range ids {
		r.queue.Publish(message(id, ""))
	}
}

func message(id, extra string) *broker.Message {
	lane, _, _ := bytes.Cut([]byte(id), []byte("-"))
	return &broker.Message{Key: lane, Body: fmt.Appendf(nil, `{"id":%q%s}`, id, extra)}
}

// write is a handler that writes its key.
func write(_ context.Context, tx *fakeTx, m *inbox.Message) error { return tx.Write(m.MessageKey) }

// wantEffects checks that the committed effects are exactly want, in any order.
func (r *rig) wantEffects(want ...string) {
	r.t.Helper()
	effects, _, _ := r.store.state()
	have := map[string]int{}
	for _, e := range effects {
		have[e]++
	}
	for _, e := range want {
		if have[e] != 1 {
			r.t.Errorf("effect %q happened %d times, want once", e, have[e])
		}
		delete(have, e)
	}
	for e, n := range have {
		r.t.Errorf("effect %q happened %d times, want never", e, n)
	}
}
