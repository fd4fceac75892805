package inboxotel_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	semconv "go.opentelemetry.io/otel/semconv/v1.43.0"
	"go.opentelemetry.io/otel/semconv/v1.43.0/messagingconv"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxotel"
)

func from(source string) *broker.Message { return &broker.Message{Source: source} }

func TestOutcomes(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	for _, e := range []inbox.OutcomeEvent{
		{Outcome: inbox.FirstAttempt, Message: from("kafka:orders/3")},
		{Outcome: inbox.FirstAttempt, Message: from("kafka:orders/4")},
		{Outcome: inbox.Replay, Message: from("kafka:eu/orders/4")},
		{Outcome: inbox.Conflict, Reason: inbox.ReasonConflict, Message: from("rabbitmq:billing")},
		{Outcome: inbox.Conflict, Message: from("rabbitmq:billing")}, // Skipped by policy.
		{Outcome: inbox.Dead, Reason: inbox.ReasonAttempts, Message: from("sqs:orders")},
		{Outcome: inbox.Dead, Message: from("sqs:orders")}, // A duplicate of one.
		{Outcome: inbox.WasParked, Reason: inbox.ReasonAttempts, Message: from("")},
		{Outcome: inbox.Replay, Message: from("partner")},
	} {
		e.Consumer, e.Duration, e.MessageKey, e.Tenant = "billing", time.Second, "key", "tenant"
		r.OnOutcome(t.Context(), e)
	}
	r.want(t, "ackafter.inbox.outcomes", map[string]float64{
		"consumer=billing,destination.name=orders,outcome=first_attempt,system=kafka": 2,
		"consumer=billing,destination.name=eu/orders,outcome=replay,system=kafka":     1,
		"consumer=billing,destination.name=billing,outcome=conflict,system=rabbitmq":  2,
		"consumer=billing,destination.name=orders,outcome=dead,system=aws_sqs":        2,
		"consumer=billing,outcome=parked,system=unknown":                              1,
		"consumer=billing,destination.name=partner,outcome=replay,system=unknown":     1,
	})
	r.want(t, "messaging.client.consumed.messages", map[string]float64{
		"consumer=billing,destination.name=orders,operation.name=process,system=kafka":     2,
		"consumer=billing,destination.name=eu/orders,operation.name=process,system=kafka":  1,
		"consumer=billing,destination.name=billing,operation.name=process,system=rabbitmq": 2,
		"consumer=billing,destination.name=orders,operation.name=process,system=aws_sqs":   2,
		"consumer=billing,operation.name=process,system=unknown":                           1,
		"consumer=billing,destination.name=partner,operation.name=process,system=unknown":  1,
	})
	r.want(t, "ackafter.inbox.dead_letters", map[string]float64{
		"consumer=billing,destination.name=billing,reason=conflict,system=rabbitmq":         1,
		"consumer=billing,destination.name=orders,reason=attempts exhausted,system=aws_sqs": 1,
	})
	r.want(t, "ackafter.inbox.message.duration", map[string]float64{
		"consumer=billing,outcome=first_attempt": 2, "consumer=billing,outcome=replay": 2, "consumer=billing,outcome=conflict": 2,
		"consumer=billing,outcome=dead": 2, "consumer=billing,outcome=parked": 1,
	})
}

func TestOtherEvents(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	ctx, m := t.Context(), from("memory:orders")
	r.OnRetry(ctx, inbox.RetryEvent{Consumer: "billing", Message: m, Counted: true, Err: errors.New("no")})
	r.OnRetry(ctx, inbox.RetryEvent{Consumer: "billing", Message: m, Err: fmt.Errorf("begin: %w", inbox.ErrInFlight)})
	r.OnStaleAck(ctx, inbox.StaleAckEvent{Consumer: "billing", Message: m})
	r.OnPause(ctx, inbox.PauseEvent{Consumer: "billing", Paused: true, Err: sqlState("57P01")})
	r.OnPause(ctx, inbox.PauseEvent{Consumer: "billing", For: 90 * time.Second})
	r.OnBatch(ctx, inbox.BatchEvent{Consumer: "billing", Size: 7, Claimed: 3, Claim: time.Millisecond, Handlers: time.Second, Commit: time.Millisecond})
	r.OnBatch(ctx, inbox.BatchEvent{Consumer: "billing", Size: 1, Claim: time.Millisecond, Err: sqlState("40001")})
	r.want(t, "ackafter.inbox.retries", map[string]float64{
		"consumer=billing,counted=true,destination.name=orders,error.type=_OTHER,system=memory":     1,
		"consumer=billing,counted=false,destination.name=orders,error.type=in_flight,system=memory": 1,
	})
	r.want(t, "ackafter.inbox.stale_acks", map[string]float64{"consumer=billing,destination.name=orders,system=memory": 1})
	r.want(t, "ackafter.inbox.pauses", map[string]float64{"consumer=billing,error.type=57P01": 1})
	r.want(t, "ackafter.inbox.pause.time", map[string]float64{"consumer=billing": 90})
	r.want(t, "ackafter.inbox.transaction.messages", map[string]float64{"consumer=billing": 1, "consumer=billing,error.type=40001": 1})
	r.want(t, "ackafter.inbox.transaction.duration", map[string]float64{
		"consumer=billing,phase=claim": 1, "consumer=billing,phase=handlers": 1, "consumer=billing,phase=commit": 1,
		"consumer=billing,error.type=40001,phase=claim": 1,
	})
}

// sqlState is an error of a database.
type sqlState string

func (s sqlState) Error() string    { return "database" }
func (s sqlState) SQLState() string { return string(s) }

// The type of an error is one of few words, whatever its text and class.
func TestErrorTypes(t *testing.T) {
	t.Parallel()
	for _, row := range []struct {
		err  error
		want string
	}{
		{errors.New("anna@example.org"), "_OTHER"},
		{sqlState("23505"), "23505"},
		{inbox.Permanent(fmt.Errorf("insert: %w", sqlState("23505"))), "23505"},
		{sqlState("anna@example.org"), "_OTHER"},
		{sqlState("anna!"), "_OTHER"},
		{inbox.Permanent(errors.New("no")), "permanent"},
		{inbox.RetryAfter(errors.New("no"), time.Second), "_OTHER"},
		{&inbox.PanicError{Value: "anna@example.org"}, "panic"},
		{fmt.Errorf("%w: %w", inbox.ErrHandlerTimeout, context.DeadlineExceeded), "timeout"},
		{fmt.Errorf("%w: %w", inbox.ErrSwallowed, sqlState("22012")), "22012"},
		{inbox.ErrSwallowed, "swallowed"},
		{inbox.ErrTxEnded, "transaction_ended"},
		{inbox.ErrRefused, "transaction_ended"},
		{inbox.ErrConflict, "conflict"},
		{inbox.ErrInFlight, "in_flight"},
		{inbox.ErrCommitUnknown, "commit_unknown"},
		{inbox.ErrNotCommitted, "not_committed"},
		{context.Canceled, "canceled"},
		{context.DeadlineExceeded, "deadline_exceeded"},
	} {
		r := newRig(t, inboxotel.Config{})
		r.OnPause(t.Context(), inbox.PauseEvent{Consumer: "c", Paused: true, Err: row.err})
		r.want(t, "ackafter.inbox.pauses", map[string]float64{"consumer=c,error.type=" + row.want: 1})
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	hour := time.Now().Add(-time.Hour)
	stop, err := r.Watch(
		fixed{Consumer: "billing", State: inbox.StateRunning, Runs: 2, InFlight: 7, InFlightBytes: 700, OldestInFlight: hour,
			Handlers: []inbox.RunningHandler{{MessageKey: "anna", Stuck: true}, {MessageKey: "anna"}, {LeftBehind: true}}},
		fixed{Consumer: "mail", State: inbox.StateRunning, Runs: 1, Paused: true},
	)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][2]float64{
		"runs": {2, 1}, "ready": {1, 0}, "paused": {0, 1}, "in_flight.messages": {7, 0}, "in_flight.size": {700, 0},
		"handlers.running": {3, 0}, "handlers.stuck": {2, 0},
	} {
		r.want(t, "ackafter.inbox."+name, map[string]float64{"consumer=billing": want[0], "consumer=mail": want[1]})
	}
	series, _ := r.collect(t)
	if age := series["ackafter.inbox.in_flight.oldest{consumer=billing}"]; age < 3600 || age > 3660 {
		t.Errorf("the oldest is %v s old, want an hour", age)
	}
	for range 2 {
		if err := stop(); err != nil {
			t.Error(err)
		}
	}
	if series, _ := r.collect(t); len(series) > 0 {
		t.Errorf("after stop: %v", series)
	}
}

func TestWatchParked(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	stop, err := r.WatchParked("billing", func(context.Context) (inboxotel.Parked, error) {
		return inboxotel.Parked{Retry: 3, Waiting: 20, Dead: 1}, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	r.want(t, "ackafter.inbox.parked.messages", map[string]float64{"consumer=billing,state=retry": 3, "consumer=billing,state=waiting": 20, "consumer=billing,state=dead": 1})
	r.want(t, "ackafter.inbox.parked.oldest", map[string]float64{"consumer=billing": 0})
	if err := stop(); err != nil {
		t.Error(err)
	}
	down := errors.New("database down")
	if _, err = r.WatchParked("billing", func(context.Context) (inboxotel.Parked, error) { return inboxotel.Parked{}, down }); err != nil {
		t.Fatal(err)
	}
	if err := r.reader.Collect(t.Context(), &metricdata.ResourceMetrics{}); !errors.Is(err, down) || !strings.Contains(err.Error(), `"billing"`) {
		t.Errorf("the collection ended with %v, want %v", err, down)
	}
}

// undertaker is a store that has counted its parked messages.
type undertaker struct {
	inbox.Undertaker
	groups []inbox.ParkedGroup
	err    error
}

func (u undertaker) GroupParked(_ context.Context, f inbox.ParkedFilter) ([]inbox.ParkedGroup, error) {
	if f.Consumer != "billing" {
		return nil, errors.New("of another consumer")
	}
	return u.groups, u.err
}

func TestCountParked(t *testing.T) {
	t.Parallel()
	now := time.Now()
	got, err := inboxotel.CountParked(undertaker{groups: []inbox.ParkedGroup{
		{State: inbox.ParkedDead, Count: 5, First: now.Add(-time.Hour)},
		{State: inbox.ParkedRetry, Count: 2, First: now.Add(-time.Minute)},
		{State: inbox.ParkedRetry, Count: 1, First: now.Add(-time.Second)},
		{State: inbox.ParkedWaiting, Count: 7, First: now.Add(-2 * time.Minute)},
		{State: inbox.ParkedDiscarded, Count: 100, First: now.Add(-time.Hour)},
	}}, "billing")(t.Context())
	if want := (inboxotel.Parked{Retry: 3, Waiting: 7, Dead: 5, Oldest: now.Add(-2 * time.Minute)}); err != nil || got != want {
		t.Errorf("counted %+v, %v; want %+v", got, err, want)
	}
	down := errors.New("database down")
	if _, err := inboxotel.CountParked(undertaker{err: down}, "billing")(t.Context()); !errors.Is(err, down) {
		t.Errorf("got the error %v, want %v", err, down)
	}
}

func TestWatchLag(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{MaxDestinations: 2})
	_, err := r.WatchLag("billing", func() []inboxotel.Lag {
		return []inboxotel.Lag{{Source: "kafka:orders/0", Messages: 12}, {Source: "kafka:orders/1", Messages: -1}, {Source: "rabbitmq:billing"}, {Source: "kafka:late/7"}}
	})
	if err != nil {
		t.Fatal(err)
	}
	r.want(t, "ackafter.source.lag", map[string]float64{
		"consumer=billing,destination.name=orders,destination.partition.id=0,system=kafka": 12,
		"consumer=billing,destination.name=billing,system=rabbitmq":                        0,
		"consumer=billing,destination.name=_OTHER,system=_OTHER":                           0,
	})
}

// However many keys, tenants, ids and sources there are, the series are few.
func TestCardinalityIsBounded(t *testing.T) {
	t.Parallel()
	for _, row := range []struct{ maximum, want int }{{0, 101}, {7, 8}, {-1, 300}} {
		r := newRig(t, inboxotel.Config{MaxDestinations: row.maximum})
		for i := range 300 {
			id := fmt.Sprint(i)
			m := &broker.Message{ID: id, Key: []byte(id), Source: "kafka:topic-" + id + "/" + id, Position: broker.At(int64(i)), Headers: broker.Headers{{Name: id, Value: []byte(id)}}}
			r.OnOutcome(t.Context(), inbox.OutcomeEvent{Consumer: "billing", Tenant: id, MessageKey: id, Message: m, Outcome: inbox.FirstAttempt, Attempt: i, TraceID: id})
			r.OnRetry(t.Context(), inbox.RetryEvent{Consumer: "billing", Tenant: id, MessageKey: id, Message: m, Attempt: i, Err: errors.New(id)})
			r.OnStaleAck(t.Context(), inbox.StaleAckEvent{Consumer: "billing", Message: m})
			r.OnBatch(t.Context(), inbox.BatchEvent{Consumer: "billing", Size: i, Claimed: i, Claim: time.Duration(i), Err: errors.New(id)})
			_, end := r.OnHandle(t.Context(), inbox.HandleEvent{Consumer: "billing", Messages: []*inbox.Message{{Message: *m, Tenant: id, MessageKey: id, Attempt: i}}})
			end(errors.New(id))
		}
		series, _ := r.collect(t)
		count := map[string]int{}
		for s := range series {
			name, _, _ := strings.Cut(s, "{")
			count[name]++
		}
		for name, n := range count {
			if n > row.want {
				t.Errorf("bound %d: %s has %d series, want at most %d", row.maximum, name, n, row.want)
			}
		}
		if n := count["ackafter.inbox.outcomes"]; n != row.want {
			t.Errorf("bound %d: %d series, want %d", row.maximum, n, row.want)
		}
		names := map[string]bool{}
		for _, s := range r.spans.GetSpans() {
			names[s.Name] = true
		}
		if len(names) != row.want {
			t.Errorf("bound %d: spans have %d names, want %d", row.maximum, len(names), row.want)
		}
	}
}

// The names are those of the conventions where they have one.
func TestConventions(t *testing.T) {
	t.Parallel()
	r := newRig(t, inboxotel.Config{})
	everything(t, r)
	_, units := r.collect(t)
	for name, unit := range map[string]string{
		messagingconv.ProcessDuration{}.Name():        messagingconv.ProcessDuration{}.Unit(),
		messagingconv.ClientConsumedMessages{}.Name(): messagingconv.ClientConsumedMessages{}.Unit(),
	} {
		if got, ok := units[name]; !ok || got != unit {
			t.Errorf("%s has the unit %q (there: %v), want %q", name, got, ok, unit)
		}
	}
	known := map[string]bool{}
	for _, key := range []string{
		string(semconv.MessagingSystemKey), string(semconv.MessagingOperationNameKey), string(semconv.MessagingOperationTypeKey),
		string(semconv.MessagingDestinationNameKey), string(semconv.MessagingDestinationPartitionIDKey), string(semconv.MessagingMessageIDKey),
		string(semconv.MessagingBatchMessageCountKey), string(semconv.MessagingKafkaOffsetKey), string(semconv.ErrorTypeKey),
	} {
		known[key] = true
	}
	for _, s := range r.spans.GetSpans() {
		for _, a := range s.Attributes {
			if key := string(a.Key); !known[key] && !strings.HasPrefix(key, "ackafter.") {
				t.Errorf("the attribute %s is of no convention", key)
			}
		}
	}
}

// Every metric, label and attribute is in the documentation, with its unit, and
// nothing else is.
func TestDocumentation(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("../../docs/telemetry.md")
	if err != nil {
		t.Fatal(err)
	}
	r := newRig(t, inboxotel.Config{MessageKeys: true})
	everything(t, r)
	_, units := r.collect(t)
	documented := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `((?:messaging|ackafter)\\.[a-z_.]+)` \\| [a-z]+ \\| `([^`]+)` \\|").FindAllStringSubmatch(string(text), -1) {
		documented[row[1]] = row[2]
	}
	for name, unit := range units {
		if documented[name] != unit {
			t.Errorf("%s has the unit %q, documented is %q", name, unit, documented[name])
		}
	}
	for name := range documented {
		if _, ok := units[name]; !ok {
			t.Errorf("%s is documented and does not exist", name)
		}
	}
	for _, s := range r.spans.GetSpans() {
		for _, a := range s.Attributes {
			if !strings.Contains(string(text), "`"+string(a.Key)+"`") {
				t.Errorf("the attribute %s is not documented", a.Key)
			}
		}
	}
}

// everything lets each instrument and kind of span appear.
func everything(t *testing.T, r *rig) {
	t.Helper()
	ctx, m := t.Context(), from("kafka:orders/1")
	m.ID, m.Position = "orders/1/7", broker.At(7)
	r.OnOutcome(ctx, inbox.OutcomeEvent{Consumer: "c", Message: m, Outcome: inbox.Dead, Reason: inbox.ReasonPermanent})
	r.OnRetry(ctx, inbox.RetryEvent{Consumer: "c", Message: m, Err: errors.New("no")})
	r.OnStaleAck(ctx, inbox.StaleAckEvent{Consumer: "c", Message: m})
	r.OnPause(ctx, inbox.PauseEvent{Consumer: "c", Paused: true, Err: errors.New("no")})
	r.OnPause(ctx, inbox.PauseEvent{Consumer: "c", For: time.Second})
	r.OnBatch(ctx, inbox.BatchEvent{Consumer: "c", Size: 1, Claim: 1, Handlers: 1, Commit: 1})
	one := &inbox.Message{Message: *m, MessageKey: "k", Tenant: "t"}
	for _, ms := range [][]*inbox.Message{{one}, {one, one}} {
		_, end := r.OnHandle(ctx, inbox.HandleEvent{Consumer: "c", Messages: ms})
		end(errors.New("no"))
	}
	for _, err := range []error{
		second(r.Watch(fixed{Consumer: "c"})),
		second(r.WatchParked("c", func(context.Context) (inboxotel.Parked, error) { return inboxotel.Parked{}, nil })),
		second(r.WatchLag("c", func() []inboxotel.Lag { return []inboxotel.Lag{{Source: m.Source}} })),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

func second(_ func() error, err error) error { return err }

// Without providers everything goes to the global ones, which do nothing yet.
func TestDefaults(t *testing.T) {
	t.Parallel()
	tel, err := inboxotel.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, end := tel.OnHandle(t.Context(), inbox.HandleEvent{Consumer: "c", Messages: []*inbox.Message{{}}})
	if ctx == nil {
		t.Error("no context")
	}
	end(nil)
	if stop, err := tel.Watch(); err != nil || stop() != nil {
		t.Error(err)
	}
}
