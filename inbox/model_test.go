package inbox_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

var discard = slog.New(slog.DiscardHandler)

// Whatever fails, at random and in any order, nothing is doubled, nothing is lost,
// lanes keep their order, and no message is both dead and done.
func TestModel(t *testing.T) {
	t.Parallel()
	for _, v := range []int{0, 1, 2, 3} {
		bulk, unlaned := v&1 == 1, v&2 == 2
		for seed := range uint64(150) {
			synctest.Test(t, func(t *testing.T) { modelRun(t, seed, bulk, unlaned) })
			if t.Failed() {
				t.Fatalf("seed %d bulk %v", seed, bulk)
			}
		}
	}
}

func modelRun(t *testing.T, seed uint64, bulk, unlaned bool) {
	rnd := rand.New(rand.NewPCG(seed, 1))
	var rmu sync.Mutex
	chance := func(p float64) bool { rmu.Lock(); defer rmu.Unlock(); return rnd.Float64() < p }
	num := func(n int) int { rmu.Lock(); defer rmu.Unlock(); return rnd.IntN(n) }
	s := newFakeStore()
	infra, fail := 0.03*float64(num(3)), 0.05*float64(num(4))
	s.fault = func(op string, _ []string) error {
		if op == "check" || !chance(infra) {
			return nil
		}
		switch op {
		case "commit", "committed":
			return fmt.Errorf("%w: %w", inbox.ErrCommitUnknown, errDown)
		}
		if chance(0.5) {
			return errDeadlock
		}
		return errDown
	}
	laned := !unlaned
	var mc *memory.Config
	if !laned {
		mc = &memory.Config{Lane: func(*broker.Message) string { return "" }}
	}
	q := memory.New("m", mc)
	type pub struct{ lane, key string }
	var pubs []pub
	laneCount := 1 + num(6)
	for i := range 150 {
		l := fmt.Sprintf("l%d", num(laneCount))
		k := fmt.Sprintf("%s-%03d", l, i)
		if chance(0.15) && len(pubs) > 0 { // a twin in the same lane
			for _, p := range slices.Backward(pubs) {
				if p.lane == l {
					k = p.key
					break
				}
			}
		}
		extra := ""
		if chance(0.03) {
			extra = `,"other":1`
		}
		body := fmt.Sprintf(`{"id":%q%s}`, k, extra)
		if chance(0.03) {
			body, k = "hello", ""
		}
		pubs = append(pubs, pub{l, k})
		q.Publish(&broker.Message{Key: []byte(l), Body: []byte(body)})
	}
	var mu sync.Mutex
	active := map[string]int{}
	handle := func(_ context.Context, tx *fakeTx, ms []*inbox.Message) error {
		for _, m := range ms {
			mu.Lock()
			lane := string(m.Key)
			active[lane]++
			mu.Unlock()
			defer func() { mu.Lock(); active[lane]--; mu.Unlock() }()
			if chance(0.3) {
				<-time.After(time.Duration(num(300)) * time.Millisecond)
			}
			switch {
			case chance(fail):
				_ = tx.Write("never " + m.MessageKey)
				return errors.New("no")
			case chance(fail / 4):
				panic("x")
			case chance(infra / 2):
				return tx.Cut()
			case chance(fail / 8):
				_ = tx.Fail()
			}
			if err := tx.Write(m.MessageKey); err != nil {
				return err
			}
		}
		return nil
	}
	type inst struct {
		stop context.CancelFunc
		src  *memory.Source
		done chan error
	}
	begin := func() *inst {
		cfg := &inbox.Config{Workers: 1 + num(4), BatchSize: 1 + num(12), MaxInFlight: 5 + num(60), ShutdownTimeout: time.Duration(num(500)+1) * time.Millisecond,
			Retry: inbox.Retry{Backoff: 50 * time.Millisecond, MaxBackoff: time.Second, MaxAttempts: 3}, BatchTime: time.Duration(1+num(400)) * time.Millisecond}
		cfg.Logger = discard
		var c *inbox.Consumer[*fakeTx]
		var err error
		if bulk {
			c, err = inbox.NewBulk(s, "billing", keyfunc.JSON("id"), handle, cfg)
		} else {
			c, err = inbox.New(s, "billing", keyfunc.JSON("id"), func(ctx context.Context, tx *fakeTx, m *inbox.Message) error {
				return handle(ctx, tx, []*inbox.Message{m})
			}, cfg)
		}
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		i := &inst{stop, q.Source(), make(chan error, 1)}
		go func() { i.done <- c.Run(ctx, i.src) }()
		return i
	}
	is := []*inst{begin(), begin()}
	for range 12 {
		<-time.After(time.Duration(num(2000)) * time.Millisecond)
		i := num(2)
		switch num(3) {
		case 0:
			is[i].src.Revoke()
		case 1:
			is[i].stop()
			if err := <-is[i].done; err != nil {
				t.Error(err)
			}
			is[i] = begin()
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Hour)
	defer cancel()
	if err := q.Drained(ctx); err != nil {
		t.Error(err)
	}
	for _, i := range is {
		i.stop()
		<-i.done
	}
	// Checks.
	have, last := map[string]int{}, map[string]string{}
	for _, e := range s.effects {
		have[e]++
		lane := e[:2]
		if e < last[lane] && laned {
			t.Errorf("lane %s: %s after %s", lane, e, last[lane])
		}
		last[lane] = e
	}
	dead := map[string]inbox.Reason{}
	for _, p := range s.parked {
		dead[p.MessageKey+"/"+string(p.Reason)] = p.Reason
		if p.Reason != inbox.ReasonConflict && p.Reason != inbox.ReasonInvalidKey && have[p.MessageKey] > 0 {
			// Another body of the same key may have succeeded.
			if row := s.rows[p.Key]; row == nil || string(row.Fingerprint) == string(p.Fingerprint) {
				t.Errorf("dead (%s) and done: %s", p.Reason, p.MessageKey)
			}
		}
	}
	for _, p := range pubs {
		if p.key == "" {
			continue
		}
		if have[p.key] > 1 {
			t.Errorf("%s: %d effects", p.key, have[p.key])
		}
		if have[p.key] == 0 && dead[p.key+"/"+string(inbox.ReasonAttempts)] == "" {
			t.Errorf("%s: neither an effect nor a dead letter", p.key)
		}
	}
}
