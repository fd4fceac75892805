package integration_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
)

// case D2: the database is away for a while with 100 messages in flight, and more
// arrive meanwhile.
func TestDatabaseOutage(t *testing.T) {
	t.Parallel()
	for _, kind := range slices.Sorted(maps.Keys(outageBrokers)) {
		for _, row := range []struct {
			name     string
			down, up func(*servers.Own, testing.TB)
		}{
			{"crashed", (*servers.Own).Crash, (*servers.Own).Start},
			{"frozen", (*servers.Own).Freeze, (*servers.Own).Thaw},
		} {
			t.Run(kind+"/"+row.name, func(t *testing.T) {
				t.Parallel()
				if !soak() && (t.Name() == "TestDatabaseOutage/sqs/crashed" || t.Name() == "TestDatabaseOutage/sqs-fifo/frozen") {
					t.Skip("each kind of queue has one row of the two unless ACKAFTER_TEST_SOAK is 1")
				}
				o := newOutage(t)
				o.broker = outageBrokers[kind](o)
				o.broker.produce(0, outageInFlight, 0)
				stop := o.run()
				o.awaitInFlight()
				row.down(o.database, t)
				close(o.release)
				eventually(t, time.Minute, "receiving pauses", o.paused.Load)
				o.broker.produce(outageInFlight, outageFlood, 2<<10)
				o.endure(time.Duration(sized(8, 60)) * time.Second)
				row.up(o.database, t)
				o.recover()
				if err := stop(); err != nil {
					t.Errorf("Run = %v", err)
				}
				o.check()
			})
		}
	}
}

const (
	outageInFlight    = 100
	outageFlood       = 2000
	outageMaxInFlight = 150
)

// outageBroker is where the messages come from. A check that fails fails its test.
type outageBroker interface {
	// produce writes n messages of a size with the ids from m-FROM on.
	produce(from, n, size int)
	// open begins to receive.
	open(log *slog.Logger) broker.Source
	// inFlight is how many deliveries are out.
	inFlight() int
	// begin, half and end are moments of the outage; sample checks, again and again
	// during it, that nothing is acked, that what is held is bounded, and that the
	// connection stays; end that there was no hot loop.
	begin()
	sample()
	half()
	end(length time.Duration)
	// drained tells whether nothing is left, as far as the broker says.
	drained() bool
	// check is called when the consumer has stopped.
	check()
}

var outageBrokers = map[string]func(*outage) outageBroker{
	"kafka": newKafkaOutage, "rabbitmq": newRabbitOutage, "sqs": newSQSOutage, "sqs-fifo": newSQSFIFOOutage,
}

// outage is a broker -> inbox -> a PostgreSQL that goes away.
type outage struct {
	*testing.T
	database *servers.Own
	pool     *pgxpool.Pool
	broker   outageBroker
	release  chan struct{} // closed when handlers may go on

	dials   atomic.Int64 // to the database
	lines   atomic.Int64 // of the log
	running atomic.Int64 // handlers that were started before release
	paused  atomic.Bool
	first   atomic.Pointer[time.Time] // of the first outcome

	mu       sync.Mutex
	attempts []string // what counts as a failed attempt
	log      bytes.Buffer
}

func newOutage(t *testing.T) *outage {
	t.Helper()
	o := &outage{T: t, database: servers.OwnPostgres(t), release: make(chan struct{})}
	admin := openPool(t, o.database.Address)
	if _, err := admin.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	admin.Close()
	cfg, err := pgxpool.ParseConfig(o.database.Address)
	if err != nil {
		t.Fatal(err)
	}
	cfg.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		o.dials.Add(1)
		return new(net.Dialer).DialContext(ctx, network, address)
	}
	if o.pool, err = pgxpool.NewWithConfig(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.pool.Close)
	return o
}

// run starts the consumer; the returned function stops it and waits.
func (o *outage) run() (stop func() error) {
	o.Helper()
	store, err := inboxpgx.New(o.pool)
	if err != nil {
		o.Fatal(err)
	}
	logger := slog.New(slog.NewTextHandler(o, nil))
	consumer, err := inbox.New(store, "outage", keyfunc.JSON("id"), o.handle, &inbox.Config{
		Workers: 4, BatchSize: 10, MaxInFlight: outageMaxInFlight,
		// Shorter than the outage.
		HandlerTimeout: time.Duration(sized(3, 20)) * time.Second, Retry: inbox.Retry{MaxAttempts: 2},
		Logger: logger, Hooks: []inbox.Hook{o},
	})
	if err != nil {
		o.Fatal(err)
	}
	source := o.broker.open(logger)
	ctx, cancel := context.WithCancel(o.Context())
	done := make(chan error, 1)
	go func() { done <- consumer.Run(ctx, source) }()
	return func() error {
		cancel()
		return <-done
	}
}

func (o *outage) handle(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
	if m.Attempt != 1 {
		o.failedAttempt("attempt %d of %s is started", m.Attempt, m.MessageKey)
	}
	o.running.Add(1)
	select {
	case <-o.release:
	case <-ctx.Done():
		return ctx.Err()
	}
	return effect(ctx, tx, m)
}

func (o *outage) failedAttempt(format string, args ...any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.attempts = append(o.attempts, fmt.Sprintf(format, args...))
}

// Write takes the lines of the log.
func (o *outage) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.lines.Add(1)
	o.log.Write(b)
	return len(b), nil
}

// OnRetry implements inbox.OnRetry.
func (o *outage) OnRetry(_ context.Context, e inbox.RetryEvent) {
	if e.Counted {
		o.failedAttempt("attempt %d of %s has failed: %v", e.Attempt, e.MessageKey, e.Err)
	}
}

// OnOutcome implements inbox.OnOutcome.
func (o *outage) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	now := time.Now()
	o.first.CompareAndSwap(nil, &now)
	if e.Outcome != inbox.FirstAttempt && e.Outcome != inbox.Replay {
		o.failedAttempt("%s: %v, %v", e.MessageKey, e.Outcome, e.Err)
	}
}

// OnPause implements inbox.OnPause.
func (o *outage) OnPause(_ context.Context, e inbox.PauseEvent) { o.paused.Store(e.Paused) }

// awaitInFlight waits until all messages are out and every worker has one in its
// handler.
func (o *outage) awaitInFlight() {
	o.Helper()
	eventually(o.T, time.Minute, "all messages are in flight", func() bool {
		return o.broker.inFlight() == outageInFlight && o.running.Load() == 4
	})
}

// endure watches for the time of the outage.
func (o *outage) endure(length time.Duration) {
	o.Helper()
	dials, lines := o.dials.Load(), o.lines.Load()
	o.broker.begin()
	half := time.After(length / 2)
	end := time.After(length)
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for running := true; running; {
		select {
		case <-tick.C:
			o.broker.sample()
		case <-half:
			o.broker.half()
		case <-end:
			running = false
		}
	}
	o.broker.end(length)
	dials, lines = o.dials.Load()-dials, o.lines.Load()-lines
	o.Logf("%v of outage: %d connections, %d log lines", length, dials, lines)
	seconds := int(length.Seconds())
	if dials > int64(20+2*seconds) || lines > int64(40+seconds) {
		o.Errorf("a hot loop: %d connections to the database and %d log lines in %v\n%s", dials, lines, length, o.tail())
	}
}

// recover waits until the consumer goes on by itself.
func (o *outage) recover() {
	o.Helper()
	began := time.Now()
	eventually(o.T, 2*time.Minute, "nothing is left", o.broker.drained)
	if first := o.first.Load(); first == nil {
		o.Error("nothing was handled")
	} else if took := first.Sub(began); took > 30*time.Second || took < -time.Second {
		o.Errorf("went on after %v", took)
	} else {
		o.Logf("went on after %v, all done after %v", took, time.Since(began))
	}
}

func (o *outage) check() {
	o.Helper()
	const all = outageInFlight + outageFlood
	for query, want := range map[string]int{
		"select count(*) from effects":                                         all,
		"select count(distinct key) from effects":                              all,
		"select count(*) from effects e join inbox i on i.message_key = e.key": all,
		"select count(*) from inbox_parked":                                    0,
	} {
		if got := count(o.T, o.pool, query); got != want {
			o.Errorf("%s = %d, want %d", query, got, want)
		}
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for i, a := range o.attempts {
		if i < 10 {
			o.Error(a)
		}
	}
	o.broker.check()
	if o.Failed() {
		o.Logf("%s", o.log.Bytes()[:min(o.log.Len(), 4000)])
	}
}

func (o *outage) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return string(o.log.Bytes()[max(0, o.log.Len()-4000):])
}
