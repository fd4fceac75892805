package inbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
)

// healthRig is a consumer over a memory queue whose health is looked at.
type healthRig struct {
	t     *testing.T
	store *fakeStore
	down  atomic.Bool // the database
	queue *memory.Queue
	c     *inbox.Consumer[*fakeTx]
	stop  context.CancelFunc
	done  chan error
}

func newHealthRig(t *testing.T, h handler, cfg *inbox.Config) *healthRig {
	t.Helper()
	r := &healthRig{t: t, store: newFakeStore(), queue: memory.New("orders", nil)}
	r.store.fault = func(op string, _ []string) error {
		if r.down.Load() && (op == "check" || op == "begin") {
			return errDown
		}
		return nil
	}
	r.c = newConsumer(t, r.store, h, cfg)
	return r
}

func (r *healthRig) run(src broker.Source) {
	ctx, stop := context.WithCancel(r.t.Context())
	done := make(chan error, 1)
	r.stop, r.done = stop, done
	go func() { done <- r.c.Run(ctx, src) }()
	synctest.Wait()
}

// want checks the state and what makes the consumer ready, live, or worth a look.
func (r *healthRig) want(state inbox.State, live bool, problems string) inbox.Health {
	r.t.Helper()
	h := r.c.Health()
	if got := strings.Join(h.Problems(), "; "); h.State != state || h.Live() != live || got != problems || h.Ready() != (problems == "") {
		r.t.Errorf("%v, live %v, ready %v, problems %q; want %v, live %v, problems %q", h.State, h.Live(), h.Ready(), got, state, live, problems)
	}
	return h
}

func TestHealthOfLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		release := make(chan struct{})
		r := newHealthRig(t, func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
			<-release
			return write(ctx, tx, m)
		}, &inbox.Config{HandlerTimeout: -1})
		r.want(inbox.StateIdle, true, "it is idle")

		r.down.Store(true)
		r.run(r.queue.Source())
		h := r.want(inbox.StateStarting, true, "it is starting; the database cannot be used")
		if !errors.Is(h.PauseErr, errDown) || h.PausedSince.IsZero() || h.LastErrorKind != inbox.KindUnavailable || h.Runs != 1 {
			t.Errorf("starting: %+v", h)
		}
		r.down.Store(false)
		<-time.After(time.Minute)
		synctest.Wait()
		r.want(inbox.StateRunning, true, "")

		r.queue.Publish(message("a-1", ""))
		<-time.After(time.Second)
		start := time.Now()
		r.queue.Publish(message("a-2", ""))
		synctest.Wait()
		h = r.want(inbox.StateRunning, true, "")
		if h.InFlight != 2 || h.InFlightBytes != int64(message("a-1", "").Size()+message("a-2", "").Size())+inFlightExtra(r.queue) ||
			start.Sub(h.OldestInFlight) != time.Second || len(h.Handlers) != 1 || !h.LastSuccess.IsZero() {
			t.Errorf("in work: %+v", h)
		}
		want := inbox.RunningHandler{MessageKey: "a-1", MessageID: h.Handlers[0].MessageID, Source: "memory:orders", Attempt: 1, Messages: 1, Since: start.Add(-time.Second)}
		if got := h.Handlers[0]; got != want {
			t.Errorf("the running handler is %+v, want %+v", got, want)
		}

		r.stop()
		synctest.Wait()
		r.want(inbox.StateStopping, true, "it is stopping")
		close(release)
		if err := <-r.done; err != nil {
			t.Error(err)
		}
		h = r.want(inbox.StateStopped, true, "it is stopped")
		if h.InFlight != 0 || !h.OldestInFlight.IsZero() || len(h.Handlers) != 0 || h.LastSuccess.IsZero() {
			t.Errorf("stopped: %+v", h)
		}
	})
}

// inFlightExtra is what the queue added to the two messages: ids and its name.
func inFlightExtra(*memory.Queue) int64 {
	return int64(2 * (len("memory:orders") + len("orders-1")))
}

// A pause is no reason to restart the process, and it is over when the database
// answers again, although nothing was to be committed.
func TestHealthOfPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newHealthRig(t, write, nil)
		r.run(r.queue.Source())
		r.down.Store(true)
		start := time.Now()
		r.queue.Publish(message("a-1", ""))
		<-time.After(time.Minute)
		h := r.want(inbox.StateRunning, true, "the database cannot be used")
		if !h.Paused || !errors.Is(h.PauseErr, errDown) || !h.PausedSince.Equal(start) || h.InFlight != 1 || !h.OldestInFlight.Equal(start) {
			t.Errorf("paused: %+v", h)
		}
		r.down.Store(false)
		<-time.After(time.Minute)
		if h := r.want(inbox.StateRunning, true, ""); h.Paused || h.PauseErr != nil || h.InFlight != 0 || h.LastSuccess.Before(start) {
			t.Errorf("after the pause: %+v", h)
		}
		r.stop()
		<-r.done
	})
}

// A handler that does not return is visible with its key until it does (the
// process lives; the message itself goes on).
func TestHealthOfStuckHandler(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		timeout    time.Duration
		after      time.Duration // when it is stuck
		leftBehind bool
	}{
		{time.Minute, time.Minute, true},
		{-1, 10 * time.Minute, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			release := make(chan struct{})
			r := newHealthRig(t, func(context.Context, *fakeTx, *inbox.Message) error {
				<-release
				return nil
			}, &inbox.Config{HandlerTimeout: row.timeout, Retry: inbox.Retry{MaxAttempts: 1}})
			r.run(r.queue.Source())
			r.queue.Publish(message("a-1", ""))
			<-time.After(row.after)
			if h := r.want(inbox.StateRunning, true, ""); len(h.Handlers) != 1 || h.Handlers[0].Stuck || len(h.Warnings()) > 0 {
				t.Errorf("not yet stuck: %+v", h)
			}
			<-time.After(2 * time.Second)
			h := r.want(inbox.StateRunning, true, "")
			if len(h.Handlers) != 1 || !h.Handlers[0].Stuck || h.Handlers[0].MessageKey != "a-1" || h.Handlers[0].LeftBehind != row.leftBehind {
				t.Errorf("stuck: %+v", h)
			}
			if w := strings.Join(h.Warnings(), "; "); !strings.HasPrefix(w, "1 handlers ") || strings.Contains(w, "left behind") != row.leftBehind {
				t.Errorf("warnings %q", w)
			}
			if row.leftBehind && (h.LastErrorKind != inbox.KindTimeout || h.LastError.IsZero()) {
				t.Errorf("last error %v at %v, want a timeout", h.LastErrorKind, h.LastError)
			}
			close(release)
			synctest.Wait()
			if h := r.c.Health(); len(h.Handlers) != 0 || len(h.Warnings()) != 0 {
				t.Errorf("after it has returned: %+v", h)
			}
			r.stop()
			<-r.done
		})
	}
}

func TestHealthOfFailedRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newHealthRig(t, write, nil)
		gone := errors.New("topic is gone")
		r.run(&brokenSource{receive: gone})
		if h := r.want(inbox.StateFailed, false, "a Run ended with an error"); !errors.Is(h.Err, gone) || h.Runs != 0 {
			t.Errorf("failed: %+v", h)
		}
		<-r.done
		r.run(r.queue.Source()) // Somebody has mended it.
		r.want(inbox.StateRunning, true, "")
		r.stop()
		<-r.done
		r.want(inbox.StateStopped, true, "it is stopped")
	})
}

// ailing is a source with something to complain of.
type ailing struct {
	broker.Source
	err error
}

func (s *ailing) Health() error { return s.err }

func TestHealthOfSources(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newHealthRig(t, write, nil)
		silent := struct{ broker.Source }{r.queue.Source()} // tells nothing
		r.run(silent)
		r.want(inbox.StateRunning, true, "")
		stop, done := r.stop, r.done
		offline := errors.New("not in the group")
		r.run(&ailing{r.queue.Source(), offline})
		if h := r.want(inbox.StateRunning, true, "a source is in trouble"); !errors.Is(h.SourceErr, offline) || h.Runs != 2 {
			t.Errorf("with a source in trouble: %+v", h)
		}
		r.stop()
		<-r.done
		r.want(inbox.StateRunning, true, "")
		stop()
		<-done
	})
}

func TestErrorKinds(t *testing.T) {
	t.Parallel()
	for want, h := range map[inbox.ErrorKind]handler{
		inbox.KindMessage:     func(context.Context, *fakeTx, *inbox.Message) error { return errSQL },
		inbox.KindPermanent:   func(context.Context, *fakeTx, *inbox.Message) error { return inbox.Permanent(errSQL) },
		inbox.KindTimeout:     func(ctx context.Context, _ *fakeTx, _ *inbox.Message) error { <-ctx.Done(); return ctx.Err() },
		inbox.KindPanic:       func(context.Context, *fakeTx, *inbox.Message) error { panic("no") },
		inbox.KindContention:  func(context.Context, *fakeTx, *inbox.Message) error { return errDeadlock },
		inbox.KindUnavailable: func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { return tx.Cut() },
		inbox.KindInFlight:    func(context.Context, *fakeTx, *inbox.Message) error { return inbox.ErrInFlight },
	} {
		synctest.Test(t, func(t *testing.T) {
			c := newConsumer(t, newFakeStore(), h, &inbox.Config{HandlerTimeout: time.Second})
			if _, err := c.Process(t.Context(), message("a-1", "")); err == nil {
				t.Error("no error")
			}
			if h := c.Health(); h.LastErrorKind != want || !h.LastError.Equal(time.Now()) || !h.LastSuccess.IsZero() || len(h.Handlers) != 0 {
				t.Errorf("health %+v, want the error kind %q", h, want)
			}
		})
	}
}

// fixed is a consumer of which the health is known.
type fixed inbox.Health

func (f fixed) Health() inbox.Health { return inbox.Health(f) }

func TestHealthHandler(t *testing.T) {
	t.Parallel()
	well := fixed{Consumer: "billing", State: inbox.StateRunning, Runs: 1}
	secret := errors.New("anna@example.org has no limit")
	since := time.Now().Add(-time.Minute)
	paused := fixed{Consumer: "mail", State: inbox.StateRunning, Runs: 1, Paused: true, PausedSince: since, PauseErr: secret, SourceErr: secret, LastErrorKind: inbox.KindUnavailable, LastError: since}
	stuck := fixed{Consumer: "stock", State: inbox.StateRunning, Handlers: []inbox.RunningHandler{{MessageKey: "anna@example.org", Tenant: "anna", MessageID: "anna", Source: "kafka:anna", Attempt: 2, Messages: 1, Since: since, Stuck: true}}}
	failed := fixed{Consumer: "audit", State: inbox.StateFailed, Err: secret}
	for _, row := range []struct {
		name              string
		consumers         []inbox.HealthReporter
		live, ready       int
		problem, warnings string
	}{
		{"well", []inbox.HealthReporter{well}, 200, 200, "[]", "[]"},
		{"paused", []inbox.HealthReporter{well, paused}, 200, 503, "[mail: the database cannot be used mail: a source is in trouble]", "[]"},
		{"stuck", []inbox.HealthReporter{stuck, well}, 200, 200, "[]", "[stock: 1 handlers are stuck]"},
		{"failed", []inbox.HealthReporter{well, failed}, 503, 503, "[audit: a Run ended with an error]", "[]"},
		{"none", nil, 200, 503, "[]", "[]"},
	} {
		for _, details := range []bool{false, true} {
			h := inbox.HealthHandler(&inbox.HealthConfig{Details: details}, row.consumers...)
			for target, want := range map[string]int{"/livez": row.live, "/health/live": row.live, "/readyz": row.ready, "/": row.ready} {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, target, nil))
				var body struct {
					Live, Ready        bool
					Problems, Warnings []string
					Consumers          []map[string]any
				}
				if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
					t.Fatalf("%s: %v\n%s", row.name, err, w.Body)
				}
				if w.Code != want || body.Live != (row.live == 200) || body.Ready != (row.ready == 200) || len(body.Consumers) != len(row.consumers) {
					t.Errorf("%s: GET %s is %d, want %d:\n%s", row.name, target, w.Code, want, w.Body)
				}
				if got := sprint(body.Problems); got != row.problem {
					t.Errorf("%s: problems %s, want %s", row.name, got, row.problem)
				}
				if got := sprint(body.Warnings); got != row.warnings {
					t.Errorf("%s: warnings %s, want %s", row.name, got, row.warnings)
				}
				if secrets := row.name != "well" && row.name != "none" && details; strings.Contains(w.Body.String(), "anna") != secrets {
					t.Errorf("%s: details %v:\n%s", row.name, details, w.Body)
				}
			}
		}
	}
}

func sprint(texts []string) string { return "[" + strings.Join(texts, " ") + "]" }

func TestHealthHandlerMethods(t *testing.T) {
	t.Parallel()
	for method, want := range map[string]int{http.MethodGet: 503, http.MethodHead: 503, http.MethodPost: 405, http.MethodDelete: 405} {
		w := httptest.NewRecorder()
		newConsumer(t, newFakeStore(), write, nil).HealthHandler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "/readyz", nil))
		if w.Code != want {
			t.Errorf("%s is %d, want %d", method, w.Code, want)
		}
	}
}

// An answer is bounded, however many handlers run.
func TestHealthHandlerIsBounded(t *testing.T) {
	t.Parallel()
	many := fixed{Consumer: "billing", State: inbox.StateRunning, Handlers: make([]inbox.RunningHandler, 5000)}
	w := httptest.NewRecorder()
	inbox.HealthHandler(nil, many).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	if w.Body.Len() > 4096 || !strings.Contains(w.Body.String(), `"running_handlers":5000`) {
		t.Errorf("%d bytes: %.200s", w.Body.Len(), w.Body)
	}
}

// Whoever adds a field to Health decides whether the handler shows it.
func TestHealthFieldsAreJudged(t *testing.T) {
	t.Parallel()
	if n := reflect.TypeFor[inbox.Health]().NumField(); n != 15 {
		t.Errorf("Health has %d fields: may the handler show the new ones without Details?", n)
	}
}
