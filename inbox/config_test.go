package inbox_test

import (
	"context"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

func goexit() { runtime.Goexit() }

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	small := newFakeStore()
	small.pool = 3
	key := keyfunc.JSON("id")
	var noStore *fakeStore
	for _, c := range []struct {
		name  string
		store inbox.Store[*fakeTx]
		who   string
		key   keyfunc.Func
		h     handler
		cfg   *inbox.Config
		want  []string
	}{
		{"nil store", nil, "c", key, write, nil, []string{"store"}},
		{"typed nil store", noStore, "c", key, write, nil, []string{"store"}},
		{"empty name", small, "", key, write, nil, []string{"consumer", "empty"}},
		{"blank name", small, " \t", key, write, nil, []string{"consumer", "empty"}},
		{"long name", small, strings.Repeat("x", 201), key, write, nil, []string{"consumer", "200"}},
		{"NUL in name", small, "a\x00", key, write, nil, []string{"consumer", "NUL"}},
		{"bad UTF-8 in name", small, "a\xff", key, write, nil, []string{"consumer", "UTF-8"}},
		{"nil key", small, "c", nil, write, nil, []string{"key function", "nil"}},
		{"key without fields", small, "c", keyfunc.JSON(), write, nil, []string{"key function"}},
		{"nil handler", small, "c", key, nil, nil, []string{"handler", "nil"}},
		{"router without routes", small, "c", key, inbox.Router[*fakeTx](key, nil), nil, []string{"handler"}},
		{"pool too small", small, "c", key, write, &inbox.Config{Workers: 4}, []string{"Workers", "4", "3"}},
		{"negative workers", small, "c", key, write, &inbox.Config{Workers: -1}, []string{"Workers", "-1"}},
		{"name with a space", small, "billing ", key, write, nil, []string{"consumer", "white space"}},
		{"seconds forgotten", small, "c", key, write, &inbox.Config{HandlerTimeout: 30}, []string{"HandlerTimeout", "30ns", "1ms"}},
		{"seconds forgotten", small, "c", key, write, &inbox.Config{BatchTime: 30}, []string{"BatchTime", "1ms"}},
		{"seconds forgotten", small, "c", key, write, &inbox.Config{ShutdownTimeout: 30}, []string{"ShutdownTimeout", "1ms"}},
		{"endless handler", small, "c", key, write, &inbox.Config{HandlerTimeout: math.MaxInt64}, []string{"HandlerTimeout", "480h"}},
		{"NUL in worker", small, "c", key, write, &inbox.Config{Worker: "a\x00"}, []string{"Worker", "NUL"}},
		{"absurd batch", small, "c", key, write, &inbox.Config{BatchSize: 1001}, []string{"BatchSize", "1001", "1000"}},
		{"absurd batch", small, "c", key, write, &inbox.Config{BatchSize: math.MaxInt}, []string{"BatchSize"}},
		{"endless lock wait", small, "c", key, write, &inbox.Config{LockTimeout: -1}, []string{"LockTimeout"}},
		{"endless ack", small, "c", key, write, &inbox.Config{AckTimeout: -1}, []string{"AckTimeout"}},
		{"short retention", small, "c", key, write, &inbox.Config{Retention: time.Millisecond}, []string{"Retention", "1s"}},
		{"backoff over its cap", small, "c", key, write, &inbox.Config{Retry: inbox.Retry{Backoff: time.Hour, MaxBackoff: time.Second}}, []string{"Retry.MaxBackoff", "1h"}},
		{"negative cap", small, "c", key, write, &inbox.Config{Retry: inbox.Retry{MaxBackoff: -1}}, []string{"Retry.MaxBackoff"}},
		{"unknown policy", small, "c", key, write, &inbox.Config{OnConflict: 7}, []string{"OnConflict", "7"}},
		{"unknown policy", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{OnDead: 2}}, []string{"Parking.OnDead", "2"}},
		{"unknown policy", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{OnDead: -1}}, []string{"Parking.OnDead", "-1"}},
		{"blocks nothing", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{OnDead: inbox.DeadBlock, Unordered: true}}, []string{"Parking.OnDead", "Unordered"}},
		{"seconds forgotten", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{Poll: 5}}, []string{"Parking.Poll", "5ns", "10ms"}},
		{"short lease", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{Lease: time.Millisecond}}, []string{"Parking.Lease", "1s"}},
		{"no lease", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{Lease: -1}}, []string{"Parking.Lease"}},
		{"endless lease", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{Lease: math.MaxInt64}}, []string{"Parking.Lease", "480h"}},
		{"short dead retention", small, "c", key, write, &inbox.Config{Parking: inbox.Parking{DeadRetention: time.Millisecond}}, []string{"Parking.DeadRetention", "1s"}},
		{"not a hook", small, "c", key, write, &inbox.Config{Hooks: []inbox.Hook{3}}, []string{"Hooks[0]", "int"}},
		{"nil hook", small, "c", key, write, &inbox.Config{Hooks: []inbox.Hook{nil}}, []string{"Hooks[0]"}},
		{"long worker", small, "c", key, write, &inbox.Config{Worker: strings.Repeat("x", 201)}, []string{"Worker", "200"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := inbox.New(c.store, c.who, c.key, c.h, c.cfg)
			if err == nil {
				t.Fatal("no error")
			}
			if !strings.HasPrefix(err.Error(), "inbox: ") {
				t.Errorf("%q does not begin with the package", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q does not say %q", err, w)
				}
			}
		})
	}
	if _, err := inbox.NewBulk(small, "c", key, nil, nil); err == nil {
		t.Error("NewBulk takes a nil handler")
	}
}

// Zero and negative values of every field, and a store with few connections.
func TestConfigValues(t *testing.T) {
	t.Parallel()
	s := newFakeStore()
	s.pool = 1
	off := &inbox.Config{
		Workers: 1, BatchSize: -1, BatchTime: -1, HandlerTimeout: -1, ShutdownTimeout: -1, MaxInFlight: -1,
		MaxInFlightBytes: -1, Retention: -1, Retry: inbox.Retry{MaxAttempts: -1, MaxCrashes: -1, Backoff: -1},
		Parking: inbox.Parking{Hold: -1, MaxWaiting: -1, MaxWaitingBytes: -1, Poll: -1, DeadRetention: -1},
	}
	for _, cfg := range []*inbox.Config{nil, {}, off} {
		c, err := inbox.New(s, "c", keyfunc.JSON("id"), write, cfg)
		if err != nil {
			t.Fatalf("New(%+v): %v", cfg, err)
		}
		if c.Name() != "c" {
			t.Errorf("Name = %q", c.Name())
		}
	}
	if off.Retry.MaxBackoff != 0 || off.Logger != nil || off.BatchSize != -1 {
		t.Error("New changed the caller's Config")
	}
}

func TestHandlers(t *testing.T) {
	t.Parallel()
	type order struct{ ID string }
	decoded := inbox.JSON(func(_ context.Context, tx *fakeTx, _ *inbox.Message, o order) error { return tx.Write("order " + o.ID) })
	routes := inbox.Routes[*fakeTx]{
		"paid":    decoded,
		"ignored": nil,
	}
	router := inbox.Router(keyfunc.JSON("type"), routes)
	routes["late"] = decoded // Must not reach the router.
	fallback := inbox.Router(keyfunc.JSON("type"), inbox.Routes[*fakeTx]{"": write})
	for _, c := range []struct {
		name, body string
		h          handler
		effects    int
		permanent  bool
		skipped    bool
		err        string
	}{
		{"json", `{"id":"1","ID":"1"}`, decoded, 1, false, false, ""},
		{"json that does not fit", `{"id":"1","ID":7}`, decoded, 0, true, false, `field "ID"`},
		{"route", `{"id":"1","type":"paid"}`, router, 1, false, false, ""},
		{"nil route", `{"id":"1","type":"ignored"}`, router, 0, false, true, ""},
		{"no route", `{"id":"1","type":"secret-value"}`, router, 0, true, false, "no route"},
		{"added later", `{"id":"1","type":"late"}`, router, 0, true, false, "no route"},
		{"no type", `{"id":"1"}`, router, 0, true, false, "event type"},
		{"fallback", `{"id":"1","type":"x"}`, fallback, 1, false, false, ""},
		{"fallback without type", `{"id":"1"}`, fallback, 1, false, false, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newFakeStore()
			m := message("x", "")
			m.Body = []byte(c.body)
			r, err := newConsumer(t, s, c.h, nil).Process(t.Context(), m)
			if effects, _, _ := s.state(); len(effects) != c.effects {
				t.Errorf("effects %v, want %d", effects, c.effects)
			}
			if inbox.IsPermanent(err) != c.permanent || (r.Skipped != "") != c.skipped {
				t.Errorf("%+v, %v", r, err)
			}
			if c.err != "" && (err == nil || !strings.Contains(err.Error(), c.err)) {
				t.Errorf("error %v does not say %q", err, c.err)
			}
		})
	}
	if inbox.JSON[order, *fakeTx](nil) != nil {
		t.Error("JSON(nil) is not nil, so that New could not refuse it")
	}
}

func TestVerdictsOfNil(t *testing.T) {
	t.Parallel()
	if inbox.Permanent(nil) != nil || inbox.RetryAfter(nil, time.Second) != nil || inbox.IsPermanent(nil) {
		t.Error("a verdict on nil is not nil")
	}
}

func TestNewClaim(t *testing.T) {
	t.Parallel()
	c, err := inbox.NewClaim("billing", "k", inbox.WithTenant("t"), inbox.WithFingerprint([]byte("f")), inbox.WithRetention(-1), inbox.WithMessage(message("a", "")))
	if err != nil || c.Tenant != "t" || string(c.Fingerprint) != "f" || c.Retention > 0 || c.Worker == "" {
		t.Errorf("%+v, %v", c, err)
	}
	if c, _ := inbox.NewClaim("billing", "k", inbox.WithRetention(0)); c.Retention != inbox.DefaultRetention {
		t.Errorf("retention %v", c.Retention)
	}
	for what, fn := range map[string]func() error{
		"consumer":    func() error { _, err := inbox.NewClaim("", "k"); return err },
		"message key": func() error { _, err := inbox.NewClaim("c", " "); return err },
		"NUL":         func() error { _, err := inbox.NewClaim("c", "a\x00b"); return err },
		"UTF-8":       func() error { _, err := inbox.NewClaim("c", "a\xffb"); return err },
		"tenant":      func() error { _, err := inbox.NewClaim("c", "k", inbox.WithTenant("\x00")); return err },
		"65536":       func() error { _, err := inbox.NewClaim("c", strings.Repeat("x", 65537)); return err },
	} {
		if err := fn(); err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("%s: %v", what, err)
		}
	}
}
