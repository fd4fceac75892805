package inbox_test

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// wrapper is a hook that wraps runs and writes down what it sees.
type wrapper struct {
	name  string
	quiet bool // returns nothing

	mu     *sync.Mutex
	events *[]string
	errs   []error
	sets   []int
}

type wrapperKey string

func (w *wrapper) note(event string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*w.events = append(*w.events, event)
}

func (w *wrapper) OnHandle(ctx context.Context, e inbox.HandleEvent) (context.Context, func(error)) {
	w.note("begin " + w.name)
	w.sets = append(w.sets, len(e.Messages))
	if w.quiet {
		return nil, nil
	}
	return context.WithValue(ctx, wrapperKey(w.name), e.Consumer+"/"+e.Messages[0].MessageKey), func(err error) {
		w.note("end " + w.name)
		w.errs = append(w.errs, err)
	}
}

func wrappers(names ...string) (ws []*wrapper, events *[]string) {
	events = &[]string{}
	mu := &sync.Mutex{}
	for _, name := range names {
		ws = append(ws, &wrapper{name: name, mu: mu, events: events, quiet: name == "quiet"})
	}
	return ws, events
}

// Hooks wrap a run like layers; the handler gets what all of them put into its
// context.
func TestOnHandleWraps(t *testing.T) {
	t.Parallel()
	ws, events := wrappers("outer", "quiet", "inner")
	var outer, inner any
	c := newConsumer(t, newFakeStore(), func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
		outer, inner = ctx.Value(wrapperKey("outer")), ctx.Value(wrapperKey("inner"))
		ws[0].note("handler")
		return write(ctx, tx, m)
	}, &inbox.Config{Hooks: []inbox.Hook{ws[0], ws[1], ws[2]}})
	for range 2 { // A replay is no run.
		if _, err := c.Process(t.Context(), message("a-1", "")); err != nil {
			t.Fatal(err)
		}
	}
	if outer != "billing/a-1" || inner != "billing/a-1" {
		t.Errorf("the handler's context has %v and %v", outer, inner)
	}
	want := []string{"begin outer", "begin quiet", "begin inner", "handler", "end inner", "end outer"}
	if !slices.Equal(*events, want) {
		t.Errorf("events %q, want %q", *events, want)
	}
}

// What a run ended with is told as it counts: a handler that reports success and
// is not believed has failed.
func TestOnHandleTellsVerdict(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		name string
		h    handler
		want error // nil: the run is kept
	}{
		{"done", write, nil},
		{"skip", func(context.Context, *fakeTx, *inbox.Message) error { return inbox.Skip("nothing to do") }, nil},
		{"error", func(context.Context, *fakeTx, *inbox.Message) error { return errSQL }, errSQL},
		{"database", func(context.Context, *fakeTx, *inbox.Message) error { return errDeadlock }, errDeadlock},
		{"panic", func(context.Context, *fakeTx, *inbox.Message) error { panic("no") }, inbox.ErrPanic},
		{"swallowed", func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { _ = tx.Fail(); return nil }, inbox.ErrSwallowed},
		{"transaction ended", func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { tx.End(); return nil }, inbox.ErrTxEnded},
		{"timeout", func(ctx context.Context, _ *fakeTx, _ *inbox.Message) error { <-ctx.Done(); return ctx.Err() }, inbox.ErrHandlerTimeout},
		{"left behind", func(context.Context, *fakeTx, *inbox.Message) error { <-time.After(time.Hour); return nil }, inbox.ErrHandlerTimeout},
	} {
		synctest.Test(t, func(t *testing.T) {
			ws, _ := wrappers(row.name)
			c := newConsumer(t, newFakeStore(), row.h, &inbox.Config{Hooks: []inbox.Hook{ws[0]}, HandlerTimeout: time.Second})
			_, err := c.Process(t.Context(), message("a-1", ""))
			if (err == nil) != (row.want == nil) {
				t.Errorf("%s: Process = %v", row.name, err)
			}
			if len(ws[0].errs) == 0 || !errors.Is(ws[0].errs[0], row.want) {
				t.Errorf("%s: the hook was told %v, want %v", row.name, ws[0].errs, row.want)
			}
			<-time.After(2 * time.Hour) // Who was left behind ends.
		})
	}
}

func TestOnHandleGetsBulkSet(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		ws, _ := wrappers("bulk")
		r.publish("a-1", "b-1", "c-1")
		r.startBulk(func(cfg *inbox.Config) (*inbox.Consumer[*fakeTx], error) {
			cfg.Workers = 1
			return inbox.NewBulk(r.store, "billing", keyfunc.JSON("id"), func(_ context.Context, tx *fakeTx, ms []*inbox.Message) error {
				for _, m := range ms {
					if err := tx.Write(m.MessageKey); err != nil {
						return err
					}
				}
				return nil
			}, cfg)
		}, &inbox.Config{Hooks: []inbox.Hook{ws[0]}})
		r.drain()
		if err := r.end(); err != nil {
			t.Fatal(err)
		}
		r.wantEffects("a-1", "b-1", "c-1")
		sum := 0
		for _, n := range ws[0].sets {
			sum += n
		}
		if sum != 3 || len(ws[0].errs) != len(ws[0].sets) || errors.Join(ws[0].errs...) != nil {
			t.Errorf("sets of %v, ended with %v", ws[0].sets, ws[0].errs)
		}
	})
}
