package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

func newConsumer(t *testing.T, s *fakeStore, h handler, cfg *inbox.Config) *inbox.Consumer[*fakeTx] {
	t.Helper()
	if cfg == nil {
		cfg = &inbox.Config{}
	}
	cfg.Logger = slog.New(slog.DiscardHandler)
	c, err := inbox.New(s, "billing", keyfunc.JSON("id"), h, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestProcess(t *testing.T) {
	t.Parallel()
	s := newFakeStore()
	c := newConsumer(t, s, func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
		if err := tx.Write(m.MessageKey); err != nil {
			return err
		}
		return m.SetResult(map[string]string{"receipt": "R-" + m.MessageKey})
	}, nil)
	first, err := c.Process(t.Context(), message("a-1", ""))
	if err != nil || first.Outcome != inbox.FirstAttempt || string(first.Value) != `{"receipt":"R-a-1"}` || first.First != nil {
		t.Fatalf("first: %+v, %v", first, err)
	}
	again, err := c.Process(t.Context(), message("a-1", ""))
	var got struct{ Receipt string }
	if err != nil || again.Outcome != inbox.Replay || again.First == nil || again.Decode(&got) != nil || got.Receipt != "R-a-1" {
		t.Fatalf("again: %+v, %v", again, err)
	}
	other, err := c.Process(t.Context(), message("a-1", `,"amount":2`))
	if !errors.Is(err, inbox.ErrConflict) || other.Outcome != inbox.Conflict || other.First == nil {
		t.Fatalf("other body: %+v, %v", other, err)
	}
	if effects, rows, parked := s.state(); len(effects) != 1 || rows != 1 || parked != 0 {
		t.Errorf("%v, %d rows, %d parked: Process must not park", effects, rows, parked)
	}
	if _, err := c.Process(t.Context(), nil); err == nil {
		t.Error("a nil message is no error")
	}
}

func TestProcessErrors(t *testing.T) {
	t.Parallel()
	own := errors.New("no such customer")
	for _, c := range []struct {
		name      string
		body      string
		handler   handler
		fault     func(string, []string) error
		is        []error
		permanent bool
	}{
		{name: "handler", handler: func(context.Context, *fakeTx, *inbox.Message) error { return own }, is: []error{own}},
		{name: "permanent", handler: func(context.Context, *fakeTx, *inbox.Message) error { return inbox.Permanent(own) }, is: []error{own}, permanent: true},
		{name: "panic", handler: func(context.Context, *fakeTx, *inbox.Message) error { panic("x") }, is: []error{inbox.ErrPanic}},
		{name: "goexit", handler: func(context.Context, *fakeTx, *inbox.Message) error { goexit(); return nil }, is: []error{inbox.ErrPanic}},
		{name: "invalid key", body: `{"id":null}`, handler: write, is: []error{keyfunc.ErrInvalid}, permanent: true},
		{name: "swallowed", handler: func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { _ = tx.Fail(); return nil }, is: []error{inbox.ErrSwallowed, errSQL}},
		{name: "ended", handler: func(_ context.Context, tx *fakeTx, _ *inbox.Message) error { tx.End(); return nil }, is: []error{inbox.ErrTxEnded}, permanent: true},
		{name: "database down", handler: write, fault: always("begin", errDown), is: []error{errDown}},
		{name: "contention for ever", handler: write, fault: always("commit", fmt.Errorf("%w: %w", inbox.ErrNotCommitted, errDeadlock)), is: []error{errDeadlock}},
		{name: "no schema", handler: write, fault: always("check", inbox.ErrNoSchema), is: []error{inbox.ErrNoSchema}},
		{name: "unknown for ever", handler: write, fault: always("commit", fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, errDown)), is: []error{inbox.ErrCommitUnknown}},
		{name: "timeout", handler: func(ctx context.Context, _ *fakeTx, _ *inbox.Message) error { <-ctx.Done(); return ctx.Err() }, is: []error{inbox.ErrHandlerTimeout}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				s := newFakeStore()
				s.fault = c.fault
				m := message("a-1", "")
				if c.body != "" {
					m.Body = []byte(c.body)
				}
				r, err := newConsumer(t, s, c.handler, nil).Process(t.Context(), m)
				if err == nil {
					t.Fatalf("no error: %+v", r)
				}
				for _, want := range c.is {
					if !errors.Is(err, want) {
						t.Errorf("error %v is not %v", err, want)
					}
				}
				if inbox.IsPermanent(err) != c.permanent {
					t.Errorf("permanent = %v: %v", inbox.IsPermanent(err), err)
				}
				if r.Outcome != "" {
					t.Errorf("outcome %q with an error", r.Outcome)
				}
				if effects, rows, parked := s.state(); len(effects)+rows+parked != 0 {
					t.Errorf("%v, %d rows, %d parked after an error", effects, rows, parked)
				}
			})
		})
	}
}

func always(op string, err error) func(string, []string) error {
	return func(o string, _ []string) error {
		if o == op {
			return err
		}
		return nil
	}
}

// case D9: Process learns from the database what became of a COMMIT.
func TestProcessCommitUnknown(t *testing.T) {
	t.Parallel()
	for op, want := range map[string]inbox.Outcome{"commit": inbox.FirstAttempt, "committed": inbox.Replay} {
		s := newFakeStore()
		once := true
		s.fault = func(o string, _ []string) error {
			if o == op && once {
				once = false
				return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, errDown)
			}
			return nil
		}
		r, err := newConsumer(t, s, write, nil).Process(t.Context(), message("a-1", ""))
		if effects, _, _ := s.state(); err != nil || r.Outcome != want || len(effects) != 1 {
			t.Errorf("fault at %s: %+v, %v, effects %v", op, r, err, effects)
		}
	}
}

func TestProcessInFlight(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeStore()
		s.locked[inbox.Key{Consumer: "billing", MessageKey: "a-1"}] = true
		c := newConsumer(t, s, write, &inbox.Config{LockTimeout: 2 * time.Second})
		start := time.Now()
		r, err := c.Process(t.Context(), message("a-1", ""))
		if !errors.Is(err, inbox.ErrInFlight) || r.Outcome != inbox.InFlight || time.Since(start) != 2*time.Second {
			t.Errorf("%+v, %v after %v", r, err, time.Since(start))
		}
	})
}

func TestProcessCancelled(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		s := newFakeStore()
		ctx, cancel := context.WithCancel(t.Context())
		c := newConsumer(t, s, func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
			_ = tx.Write(m.MessageKey)
			cancel()
			<-ctx.Done()
			return ctx.Err()
		}, nil)
		if _, err := c.Process(ctx, message("a-1", "")); !errors.Is(err, context.Canceled) {
			t.Errorf("Process = %v, want context.Canceled", err)
		}
		if effects, rows, _ := s.state(); len(effects)+rows != 0 {
			t.Errorf("%v, %d rows after a cancelled call", effects, rows)
		}
	})
}

func TestProcessScopes(t *testing.T) {
	t.Parallel()
	s := newFakeStore()
	tenant := func(m *broker.Message) (string, error) {
		v, ok := m.Headers.Get("tenant")
		if !ok {
			return "", errors.New("no tenant header")
		}
		return string(v), nil
	}
	c := newConsumer(t, s, write, &inbox.Config{Tenant: tenant})
	for _, name := range []string{"t1", "t2"} {
		m := message("a-1", "")
		m.Headers = broker.Headers{{Name: "tenant", Value: []byte(name)}}
		if r, err := c.Process(t.Context(), m); err != nil || r.Outcome != inbox.FirstAttempt || r.Key.Tenant != name {
			t.Errorf("tenant %s: %+v, %v", name, r, err)
		}
	}
	if _, err := c.Process(t.Context(), message("a-1", "")); !inbox.IsPermanent(err) {
		t.Errorf("without a tenant: %v, want a permanent error", err)
	}
	panics := newConsumer(t, s, write, &inbox.Config{Fingerprint: func(*broker.Message) ([]byte, error) { panic("x") }})
	if _, err := panics.Process(t.Context(), message("b-1", "")); !errors.Is(err, inbox.ErrPanic) {
		t.Errorf("a fingerprint that panics: %v", err)
	}
	same := newConsumer(t, s, write, &inbox.Config{Fingerprint: func(*broker.Message) ([]byte, error) { return []byte("same"), nil }})
	for _, extra := range []string{`,"sent":1`, `,"sent":2`} {
		if _, err := same.Process(t.Context(), message("c-1", extra)); err != nil {
			t.Errorf("a fingerprint that leaves the time of sending out: %v", err)
		}
	}
}
