package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// advisingStore is a store that has something to say.
type advisingStore struct {
	*fakeStore
	advise func(ctx context.Context, r inbox.AdviceRequest) ([]inbox.Finding, error)
}

func (s *advisingStore) Advise(ctx context.Context, r inbox.AdviceRequest) ([]inbox.Finding, error) {
	return s.advise(ctx, r)
}

func says(code string, severity inbox.Severity) func(context.Context, inbox.AdviceRequest) ([]inbox.Finding, error) {
	return func(context.Context, inbox.AdviceRequest) ([]inbox.Finding, error) {
		return []inbox.Finding{{Code: code, Severity: severity, Setting: "s", Value: "v", Meaning: "m", Advice: "a"}}, nil
	}
}

func nothing(context.Context, *fakeTx, *inbox.Message) error { return nil }

func checked(t *testing.T, store inbox.Store[*fakeTx], cfg *inbox.Config) ([]inbox.Finding, error) {
	t.Helper()
	c, err := inbox.New(store, "billing", keyfunc.JSON("id"), nothing, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return c.Check(t.Context())
}

func codesOf(found []inbox.Finding) (all []string) {
	for _, f := range found {
		all = append(all, f.Code)
	}
	return all
}

func TestCheckConfig(t *testing.T) {
	t.Parallel()
	if found, err := checked(t, newFakeStore(), nil); err != nil || len(found) > 0 {
		t.Errorf("with the defaults: %v, %v", found, err)
	}
	for code, c := range map[string]struct {
		cfg      inbox.Config
		severity inbox.Severity
	}{
		"handler_timeout": {inbox.Config{HandlerTimeout: -1}, inbox.SeverityWarning},
		"max_in_flight":   {inbox.Config{MaxInFlight: 199}, inbox.SeverityInfo},
		"max_attempts":    {inbox.Config{Retry: inbox.Retry{MaxAttempts: -1}}, inbox.SeverityInfo},
		"parking_poll":    {inbox.Config{Parking: inbox.Parking{Poll: -1}}, inbox.SeverityInfo},
		"retention":       {inbox.Config{Retention: -1}, inbox.SeverityInfo},
	} {
		found, err := checked(t, newFakeStore(), &c.cfg)
		if err != nil || len(found) != 1 || found[0].Code != code || found[0].Severity != c.severity {
			t.Errorf("%s: %+v, %v", code, found, err)
		}
	}
	for _, cfg := range []*inbox.Config{{MaxInFlight: 200}, {MaxInFlight: -1}} {
		if found, err := checked(t, newFakeStore(), cfg); err != nil || len(found) > 0 {
			t.Errorf("%+v: %v, %v", cfg, found, err)
		}
	}
	plain := struct{ inbox.Store[*fakeTx] }{newFakeStore()}
	if found, err := checked(t, plain, nil); err != nil || !slices.Equal(codesOf(found), []string{"parking_store"}) {
		t.Errorf("a store that is no Parker: %v, %v", found, err)
	}
}

func TestCheckStore(t *testing.T) {
	t.Parallel()
	none := func(context.Context, inbox.AdviceRequest) ([]inbox.Finding, error) { return nil, nil }
	for name, c := range map[string]struct {
		check  error
		advise func(context.Context, inbox.AdviceRequest) ([]inbox.Finding, error)
		want   []string
		err    error
	}{
		"all is well":             {advise: none},
		"no tables":               {check: inbox.ErrNoSchema, advise: none, want: []string{"tables_missing"}},
		"other tables":            {check: &inbox.SchemaVersionError{Have: 1, Need: 2}, advise: none, want: []string{"tables_version"}},
		"something else":          {check: errSQL, advise: none, want: []string{"store"}},
		"explained by a finding":  {check: errSQL, advise: says("foreign_keys", inbox.SeverityError), want: []string{"foreign_keys"}},
		"not explained by it":     {check: errSQL, advise: says("some", inbox.SeverityInfo), want: []string{"store", "some"}},
		"unreachable":             {check: errDown, advise: says("some", inbox.SeverityInfo), err: errDown},
		"unreachable in a moment": {advise: func(context.Context, inbox.AdviceRequest) ([]inbox.Finding, error) { return nil, errDown }, err: errDown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := &advisingStore{newFakeStore(), c.advise}
			store.fault = func(op string, _ []string) error {
				if op == "check" {
					return c.check
				}
				return nil
			}
			found, err := checked(t, store, nil)
			if !errors.Is(err, c.err) || !slices.Equal(codesOf(found), c.want) {
				t.Errorf("Check = %v, %v; want %v, %v", codesOf(found), err, c.want, c.err)
			}
			if err == nil {
				return
			}
			if found, _ := checked(t, store, &inbox.Config{Retention: -1}); !slices.Equal(codesOf(found), []string{"retention"}) {
				t.Errorf("what needs no database: %v", found)
			}
		})
	}
}

func TestCheckAsks(t *testing.T) {
	t.Parallel()
	var got []inbox.AdviceRequest
	store := &advisingStore{newFakeStore(), func(ctx context.Context, r inbox.AdviceRequest) ([]inbox.Finding, error) {
		if _, ok := ctx.Deadline(); !ok {
			t.Error("without a deadline")
		}
		got = append(got, r)
		return nil, nil
	}}
	cfg := &inbox.Config{Workers: 3, BatchSize: 7, BatchTime: time.Second, HandlerTimeout: time.Minute, LockTimeout: time.Hour}
	if _, err := checked(t, store, cfg); err != nil {
		t.Fatal(err)
	}
	bulk, err := inbox.NewBulk(store, "billing", keyfunc.JSON("id"), func(context.Context, *fakeTx, []*inbox.Message) error { return nil }, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bulk.Check(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := inbox.AdviceRequest{Consumer: "billing", Workers: 3, BatchSize: 7, BatchTime: time.Second, HandlerTimeout: time.Minute, LockTimeout: time.Hour}
	alone := want
	alone.BatchSize = 1
	if !slices.Equal(got, []inbox.AdviceRequest{want, alone}) {
		t.Errorf("asked for %+v", got)
	}
}

// A Run logs what is found, once for a consumer, and neither waits for it nor fails
// by it.
func TestRunChecks(t *testing.T) {
	t.Parallel()
	hangs := func(ctx context.Context, _ inbox.AdviceRequest) ([]inbox.Finding, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	for name, c := range map[string]struct {
		advise func(context.Context, inbox.AdviceRequest) ([]inbox.Finding, error)
		want   string
	}{
		"error":   {says("fsync", inbox.SeverityError), "level=WARN"},
		"warning": {says("fsync", inbox.SeverityWarning), "level=WARN"},
		"info":    {says("fsync", inbox.SeverityInfo), "level=INFO"},
		"hangs":   {hangs, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				asked := 0
				store := &advisingStore{newFakeStore(), nil}
				store.advise = func(ctx context.Context, r inbox.AdviceRequest) ([]inbox.Finding, error) {
					asked++
					if r.Consumer != "" {
						t.Error("overdue messages say nothing at a start")
					}
					return c.advise(ctx, r)
				}
				logs := &lockedWriter{}
				consumer, err := inbox.New(store, "billing", keyfunc.JSON("id"), nothing, &inbox.Config{Logger: slog.New(slog.NewTextHandler(logs, nil))})
				if err != nil {
					t.Fatal(err)
				}
				for i := range 2 {
					ctx, stop := context.WithCancel(t.Context())
					queue := memory.New("orders", nil)
					src, done := queue.Source(), make(chan error, 1)
					go func() { done <- consumer.Run(ctx, src) }()
					queue.Publish(message(fmt.Sprint("k-", i), ""))
					synctest.Wait()
					if queue.Stats().Acked != 1 {
						t.Error("the check holds the start up")
					}
					begun := time.Now()
					stop()
					if err := <-done; err != nil || time.Since(begun) > time.Second {
						t.Errorf("Run = %v after %v", err, time.Since(begun))
					}
				}
				if asked != 1 {
					t.Errorf("asked %d times", asked)
				}
				var lines []string
				for line := range strings.Lines(logs.String()) {
					if strings.Contains(line, `msg="inbox: check"`) {
						lines = append(lines, line)
					}
				}
				switch {
				case c.want == "" && len(lines) == 0:
				case len(lines) != 1 || !strings.Contains(lines[0], c.want) || !strings.Contains(lines[0], "code=fsync"):
					t.Errorf("logged %q", lines)
				}
			})
		})
	}
}
