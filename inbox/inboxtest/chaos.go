package inboxtest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// World is what one round of Chaos happens to: a database that nothing was done
// to yet, and the handler that works on it.
type World[Tx any] struct {
	// Store keeps the inbox. Its tables must be there and empty. Required.
	Store inbox.Store[Tx]

	// Handler is what is tested; or Bulk. Exactly one is required. Under
	// FaultOverlap it runs for two messages at once.
	Handler inbox.Handler[Tx]
	Bulk    inbox.BulkHandler[Tx]

	// State returns all that the handler's work has left, in a form that
	// reflect.DeepEqual compares and fmt prints: rows in a fixed order, sums. What
	// the handler does outside of its transaction (mail, calls, metrics) is found
	// only if it is in here. What is new in every run (ids from a sequence, the
	// time of writing) must not be. It is called when nothing runs. Required.
	State func(ctx context.Context) (any, error)

	// Restart is called each time when another process takes over after the first
	// one has died or was stopped: what the handler keeps in memory is to be
	// forgotten. Nil: it lives on.
	Restart func()
}

// ChaosConfig configures Chaos. A nil *ChaosConfig means all defaults.
type ChaosConfig struct {
	// Seed is the seed of the first round; the next one has the next seed. The
	// same seed with the same messages and configuration is the same schedule.
	// Default 1.
	Seed uint64

	// Rounds is how many schedules are tried. Default 100. Negative is an error.
	Rounds int

	// Faults are the kinds of faults that happen. Default DefaultFaults.
	Faults Fault

	// Lane names the ordering domain of a message, as memory.Config.Lane: messages
	// of one lane are delivered in the order in which they were given to Chaos,
	// those of different lanes in any order. Choose what your broker does. Default
	// memory.ByKey: a lane for each broker key, none for messages without one.
	Lane func(m *broker.Message) string

	// Consumer is your configuration: Tenant, Fingerprint, EventTime, OnConflict,
	// Retention, HandlerTimeout, Hooks, Logger and the like are used; Workers,
	// batches, retries and parking are chosen by Chaos. Nil: all defaults, and no
	// log.
	Consumer *inbox.Config

	// Timeout bounds a round. One that takes longer is a failure: something is
	// stuck. Default 1 min. Negative is an error.
	Timeout time.Duration
}

const (
	defaultChaosRounds  = 100
	defaultChaosTimeout = time.Minute
	// chaosConsumer is the name of the consumer that runs the handler.
	chaosConsumer = "chaos"
)

// Chaos checks that the handler's work is done once whatever goes wrong. It runs
// the handler once for each of the messages, in their order and undisturbed, and
// looks at the state of the database: that is how it must end. Then, in every
// round, it gives the messages to the handler on a fresh database under a
// schedule of faults made from a seed (see Fault), until each is handled, and
// compares. It drives the real loop, inbox.Consumer's Run and Process, over
// package broker/memory; faults come in between loop and store, between loop and
// handler, and from the source.
//
// open makes the world of one round. It is called once for each round, by the
// goroutine of the test, and must give the same each time. What its t is asked to
// clean up (Cleanup, TempDir, Context) is cleaned up at the end of the round.
//
// The messages must be events of their own, with distinct keys; a message that is
// there twice, byte for byte, is a duplicate. Ids, positions and times that are
// missing are filled in. A message that the handler refuses for good may be among
// them: it is a dead letter, then it has to be one under every schedule.
//
// It reports, by t.Errorf, the first seed that fails: what differs, the shortest
// schedule that still shows it, what happened step by step, and how to run that
// seed again. It is a failure when the state differs, when a message is a
// dead letter in one run and not in the other, when one is handled twice (its key
// is not stable), when a round does not end, and when two undisturbed runs differ.
// With two messages whose work depends on their order, and which are in no common
// lane, it finds that too.
//
// Two things are not seen: what a handler does beyond its Tx and State does not
// show, and what depends on timing that no schedule sets. Errors that are injected
// tell their SQLSTATE by a method SQLState, but are not the driver's type.
func Chaos[Tx any](t testing.TB, open func(t testing.TB) *World[Tx], key keyfunc.Func, messages []*broker.Message, cfg *ChaosConfig) {
	t.Helper()
	c, err := newChaos(t, open, key, messages, cfg)
	if err != nil {
		t.Fatalf("inboxtest: chaos: %v", err)
		return
	}
	if finding := c.run(); finding != "" {
		t.Errorf("inboxtest: chaos: %s", finding)
	}
}

// chaos is one call of Chaos.
type chaos[Tx any] struct {
	t        testing.TB
	open     func(t testing.TB) *World[Tx]
	key      keyfunc.Func
	messages []*broker.Message // the caller's, complete
	lanes    []string          // by message
	names    []string          // by message, for people
	indexes  map[string]int    // by broker id
	cfg      ChaosConfig

	// references are the undisturbed runs, by the messages that are left out.
	references map[string]*roundEnd
	statements []int // by message: how many its handler sent, undisturbed
	// blocked counts overlaps, in a row, that did not come to be because there
	// could be no second transaction, see maxBlocked.
	blocked int
	// patient tells that goroutines of handlers are waited for. It ends with the
	// first one that does not end.
	patient bool
}

func newChaos[Tx any](t testing.TB, open func(t testing.TB) *World[Tx], key keyfunc.Func, messages []*broker.Message, cfg *ChaosConfig) (*chaos[Tx], error) {
	c := &chaos[Tx]{t: t, open: open, key: key, indexes: map[string]int{}, references: map[string]*roundEnd{}, patient: true}
	if cfg != nil {
		c.cfg = *cfg
	}
	c.cfg.Seed = cmp.Or(c.cfg.Seed, 1)
	c.cfg.Rounds = cmp.Or(c.cfg.Rounds, defaultChaosRounds)
	c.cfg.Faults = cmp.Or(c.cfg.Faults, DefaultFaults)
	c.cfg.Timeout = cmp.Or(c.cfg.Timeout, defaultChaosTimeout)
	if c.cfg.Lane == nil {
		c.cfg.Lane = memory.ByKey
	}
	if c.cfg.Consumer == nil {
		c.cfg.Consumer = &inbox.Config{}
	}
	switch {
	case open == nil:
		return nil, errors.New("open: must not be nil")
	case key == nil:
		return nil, errors.New("key: must not be nil")
	case len(messages) == 0:
		return nil, errors.New("messages: there are none")
	case c.cfg.Rounds < 0:
		return nil, fmt.Errorf("config: Rounds = %d: must not be negative", c.cfg.Rounds)
	case c.cfg.Timeout < 0:
		return nil, fmt.Errorf("config: Timeout = %v: must not be negative: a round has to end", c.cfg.Timeout)
	}
	for i, m := range messages {
		if m == nil {
			return nil, fmt.Errorf("message %d: must not be nil", i+1)
		}
		if err := c.add(i, m); err != nil {
			return nil, err
		}
	}
	c.statements = make([]int, len(c.messages))
	return c, nil
}

// add takes a message over, complete, so that it is the same in every run.
func (c *chaos[Tx]) add(i int, m *broker.Message) error {
	own := *m
	if own.ID == "" {
		own.ID = fmt.Sprintf("message-%d", i+1)
	}
	if own.Source == "" {
		own.Source = "memory:chaos"
	}
	if !own.Position.Known {
		own.Position = broker.At(int64(i))
	}
	if own.Time.IsZero() {
		own.Time = time.Date(2020, time.January, 1, 12, 0, i, 0, time.UTC)
	}
	if before, ok := c.indexes[own.ID]; ok {
		if !sameMessage(c.messages[before], &own) {
			return fmt.Errorf("messages %d and %d have the same ID %q and are not the same", before+1, i+1, own.ID)
		}
	} else {
		c.indexes[own.ID] = i
	}
	name := fmt.Sprintf("message %d", i+1)
	if key, err := keyfunc.Derive(c.key, &own); err == nil {
		name += fmt.Sprintf(" (key %q)", short(key))
	}
	c.messages = append(c.messages, &own)
	c.lanes = append(c.lanes, c.cfg.Lane(&own))
	c.names = append(c.names, name)
	return nil
}

// sameMessage tells that b is a duplicate of a.
func sameMessage(a, b *broker.Message) bool {
	return bytes.Equal(a.Body, b.Body) && bytes.Equal(a.Key, b.Key) && reflect.DeepEqual(a.Headers, b.Headers)
}

// run returns what is wrong, "" when nothing is.
func (c *chaos[Tx]) run() string {
	undisturbed := c.plain()
	once, finding := c.reference(undisturbed)
	if finding != "" {
		return finding
	}
	again := c.play(undisturbed)
	if finding := c.compare(once, again); finding != "" {
		return "two undisturbed runs over the messages differ: does the handler or State use the clock, chance, " +
			"or what another run has left behind?\n" + finding
	}
	for seed := c.cfg.Seed; seed-c.cfg.Seed < uint64(c.cfg.Rounds); seed++ { //nolint:gosec // Rounds is not negative.
		s := c.generate(seed)
		if finding, e := c.fails(s); finding != "" {
			return c.report(seed, s, finding, e)
		}
	}
	return ""
}

// fails plays a schedule and returns what is wrong with its end.
func (c *chaos[Tx]) fails(s *schedule) (string, *roundEnd) {
	once, finding := c.reference(s)
	if finding != "" {
		return "", once // Without these messages there is nothing to compare with.
	}
	e := c.play(s)
	return c.compare(once, e), e
}

// reference returns the end of the undisturbed run over the messages that are to
// be handled under s.
func (c *chaos[Tx]) reference(s *schedule) (*roundEnd, string) {
	plain := c.plain()
	for i := range c.messages {
		plain.absent[i] = s.absent[i] || i == s.poison
	}
	id := fmt.Sprint(plain.absent)
	if e := c.references[id]; e != nil {
		return e, ""
	}
	plain.entries = withoutMessages(plain.entries, plain.absent)
	e := c.play(plain)
	if finding := c.unfit(e); finding != "" {
		return e, finding
	}
	c.references[id] = e
	return e, ""
}

// unfit tells why the undisturbed run says nothing.
func (c *chaos[Tx]) unfit(e *roundEnd) string {
	if e.err != nil {
		return "the undisturbed run failed: " + e.err.Error() + "\n" + e.story()
	}
	handled := false
	for i, f := range e.fates {
		switch {
		case e.conflicts[i], f == fateHandled && e.firsts[i] == 0 && !c.repeated(i):
			return fmt.Sprintf("%s is taken for another message: each must be an event of its own, with a key of its own "+
				"(inboxtest.Conflict is for conflicts)\n%s", c.names[i], e.story())
		case f == fateHandled:
			handled = true
		}
	}
	if !handled && e.published > 0 {
		return "the undisturbed run handled none of the messages\n" + e.story()
	}
	return ""
}

// repeated tells that a message is a copy of one before it.
func (c *chaos[Tx]) repeated(i int) bool {
	for _, m := range c.messages[:i] {
		if sameMessage(m, c.messages[i]) {
			return true
		}
	}
	return false
}

// hasDuplicate tells that another one of the messages is the same.
func (c *chaos[Tx]) hasDuplicate(i int) bool {
	for j, m := range c.messages {
		if j != i && sameMessage(m, c.messages[i]) {
			return true
		}
	}
	return false
}

// compare tells what an end has that the undisturbed one has not.
func (c *chaos[Tx]) compare(once, e *roundEnd) string {
	if e.err != nil {
		return e.err.Error()
	}
	for i, keys := range e.handled {
		if len(keys) > 1 {
			return fmt.Sprintf("%s was handled %d times, under the keys %q: the key must be the same for every delivery",
				c.names[i], len(keys), keys)
		}
		if e.firsts[i] > 1 {
			return fmt.Sprintf("the work for %s was committed %d times: the store does not keep its key", c.names[i], e.firsts[i])
		}
	}
	for i, conflict := range e.conflicts {
		if conflict {
			return fmt.Sprintf("a delivery of %s was a conflict with another one: the fingerprint must be the same for every delivery", c.names[i])
		}
	}
	for i, f := range e.fates {
		if want := once.fates[i]; f != want && f != fateNone && want != fateNone {
			return fmt.Sprintf("%s was %s, undisturbed it is %s%s", c.names[i], f, want, because(e.reasons[i], once.reasons[i]))
		}
	}
	if reflect.DeepEqual(once.state, e.state) {
		return ""
	}
	return fmt.Sprintf("the state is not that of an undisturbed run\n  undisturbed: %s\n  now:         %s", show(once.state), show(e.state))
}

func because(reasons ...string) string {
	if r := cmp.Or(reasons...); r != "" {
		return ": " + r
	}
	return ""
}

// show prints a state on one line, shortened.
func show(state any) string {
	const limit = 2000
	text := strings.ReplaceAll(fmt.Sprintf("%+v", state), "\n", "\n    ")
	if len(text) > limit {
		text = fmt.Sprintf("%s... (%d bytes)", text[:limit], len(text))
	}
	return text
}

// consumerConfig returns the configuration of a process.
func (c *chaos[Tx]) consumerConfig(batchSize int, hooks ...inbox.Hook) *inbox.Config {
	cfg := *c.cfg.Consumer
	cfg.Workers = 1
	cfg.BatchSize = batchSize
	cfg.BatchTime = -1
	cfg.MaxInFlight, cfg.MaxInFlightBytes = -1, -1
	cfg.ReplacesKey = ""
	// As many as it may take until all that it could wait for was handled.
	cfg.Retry = inbox.Retry{MaxAttempts: c.maxAttempts(), Backoff: -1}
	cfg.Parking = inbox.Parking{Hold: -1, Poll: -1}
	if cfg.ShutdownTimeout == 0 {
		cfg.ShutdownTimeout = 5 * time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	cfg.Hooks = append(append([]inbox.Hook{}, cfg.Hooks...), hooks...)
	return &cfg
}

func (c *chaos[Tx]) maxAttempts() int { return 10 + 2*len(c.messages) }
