package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

func TestFaultProcessIsSilent(t *testing.T) {
	t.Parallel()
	s, seen := newFakeStore(), &recorder{}
	logs := &strings.Builder{}
	c, _ := inbox.New(s, "billing", keyfunc.JSON("id"), func(context.Context, *fakeTx, *inbox.Message) error { return errors.New("no") },
		&inbox.Config{Hooks: []inbox.Hook{seen}, Logger: slog.New(slog.NewTextHandler(logs, nil))})
	_, err1 := c.Process(t.Context(), message("a-1", ""))
	_, err2 := c.Process(t.Context(), &broker.Message{Body: []byte("hello")})
	if logs.Len() == 0 && len(seen.outcomes)+len(seen.retries) == 0 {
		t.Errorf("a failed and an invalid message left neither a line nor an event: %v, %v", err1, err2)
	}
}

func TestFaultOutageIsSilent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		n := 0
		r.store.fault = func(string, []string) error {
			if n++; n == 1 {
				return errDown
			}
			return errors.New("fake: password authentication failed")
		}
		r.start(write, nil)
		<-time.After(24 * time.Hour)
		_ = r.end()
		if lines := strings.Count(r.logs.String(), "\n"); lines < 2 || !strings.Contains(r.logs.String(), "password") {
			t.Errorf("a day without a database: %d lines, the present cause is not among them", lines)
		}
	})
}

func TestFaultAbsurdWorkers(t *testing.T) {
	t.Parallel()
	if _, err := inbox.New(newFakeStore(), "billing", keyfunc.JSON("id"), write, &inbox.Config{Workers: 50_000_000}); err == nil {
		t.Error("50 million workers are accepted")
	}
}

func TestFaultLogsPiecesOfBody(t *testing.T) {
	t.Parallel()
	const secret = "4111111111111111"
	for name, c := range map[string]struct {
		body string
		h    handler
	}{
		"router":      {`{"id":"a","type":"` + secret + `"}`, inbox.Router(keyfunc.JSON("type"), inbox.Routes[*fakeTx]{"x": write})},
		"json map":    {`{"id":"a","m":{"` + secret + `":"x"}}`, inbox.JSON(func(context.Context, *fakeTx, *inbox.Message, struct{ M map[string]int }) error { return nil })},
		"json number": {`{"id":"a","n":` + secret + `999}`, inbox.JSON(func(context.Context, *fakeTx, *inbox.Message, struct{ N int8 }) error { return nil })},
		"json string": {`{"id":"a","n":"` + secret + `"}`, inbox.JSON(func(context.Context, *fakeTx, *inbox.Message, struct{ N time.Time }) error { return nil })},
		"nul key":     {`{"id":"\u0000` + secret + `"}`, write},
		"object key":  {`{"id":{"` + secret + `":1}}`, write},
		"syntax":      {`{"id":` + secret + `x}`, write},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t)
				r.queue.Publish(&broker.Message{Key: []byte("k"), Body: []byte(c.body)})
				r.start(c.h, nil)
				r.drain()
				_ = r.end()
				if strings.Contains(r.logs.String(), secret) {
					t.Errorf("a piece of the body is in the log:\n%s", r.logs)
				}
			})
		})
	}
}

func TestFaultRunsVersusMaxAttempts(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		runs := 0
		r.publish("a-1")
		r.start(func(context.Context, *fakeTx, *inbox.Message) error { runs++; return errDeadlock },
			&inbox.Config{Retry: inbox.Retry{MaxAttempts: 5}, Parking: inbox.Parking{Hold: -1}})
		r.drain()
		_ = r.end()
		// Four that might have been the database's fault, and five that count.
		if p := r.store.parked[0]; runs != 9 || p.Attempts != 5 {
			t.Errorf("%d runs, parked after %d attempts; want 9 and 5", runs, p.Attempts)
		}
	})
}

func TestFaultPermanentContention(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		runs := 0
		r.publish("a-1")
		r.start(func(context.Context, *fakeTx, *inbox.Message) error {
			runs++
			return inbox.Permanent(fmt.Errorf("serialization: %w", errDeadlock))
		}, nil)
		r.drain()
		_ = r.end()
		if runs != 1 {
			t.Errorf("Permanent: the handler ran %d times", runs)
		}
	})
}

// The number of OnOutcome calls, one a delivery, over a mixed run.
func TestFaultOneOutcomePerDelivery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t)
		for i := range 200 {
			r.publish(fmt.Sprintf("%d-%d", i%9, i/2))
		}
		r.start(func(_ context.Context, tx *fakeTx, m *inbox.Message) error {
			switch n := m.Position.Offset; {
			case n%11 == 0 && m.Attempt < 3:
				return errors.New("no")
			case n%13 == 0 && m.Attempt < 2:
				return tx.Cut()
			case n%17 == 0:
				return inbox.Permanent(errors.New("no"))
			case n%19 == 0:
				return inbox.Skip("x")
			}
			return tx.Write(m.MessageKey)
		}, nil)
		r.drain()
		_ = r.end()
		if n := len(r.seen.outcomes); n != 200 {
			t.Errorf("%d outcomes for 200 deliveries", n)
		}
	})
}
