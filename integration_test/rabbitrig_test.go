package integration_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/rabbitmq"
)

// rabbitLine is RabbitMQ -> inbox -> PostgreSQL, with a queue of its own and a
// client that is not ours.
type rabbitLine struct {
	*testing.T
	server *servers.RabbitMQServer
	queue  string
	pool   *pgxpool.Pool
	ch     *amqp.Channel // with confirms
}

// newRabbitLine makes a queue of a type on the shared server.
func newRabbitLine(t *testing.T, kind string) *rabbitLine {
	t.Helper()
	return newRabbitLineOn(t, servers.RabbitMQ(t), kind)
}

func newRabbitLineOn(t *testing.T, server *servers.RabbitMQServer, kind string) *rabbitLine {
	t.Helper()
	return newRabbitLineTo(t, servers.Postgres(t), server, kind, nil)
}

// newRabbitLineTo works on a database of its own.
func newRabbitLineTo(t *testing.T, database string, server *servers.RabbitMQServer, kind string, arguments amqp.Table) *rabbitLine {
	t.Helper()
	u, err := url.Parse(database)
	if err != nil {
		t.Fatal(err)
	}
	query := u.Query()
	query.Set("pool_max_conns", "20") // enough for any number of workers here
	u.RawQuery = query.Encode()
	pool := openPool(t, u.String())
	if _, err := pool.Exec(t.Context(), "create table effects (key text not null)"); err != nil {
		t.Fatal(err)
	}
	return newRabbitQueue(t, server, kind, arguments, pool)
}

// newRabbitQueue makes a queue, for a database that is there; pool may be nil.
func newRabbitQueue(t *testing.T, server *servers.RabbitMQServer, kind string, arguments amqp.Table, pool *pgxpool.Pool) *rabbitLine {
	t.Helper()
	r := &rabbitLine{T: t, server: server, queue: servers.Name(t), pool: pool}
	r.ch = r.channel()
	r.declare(kind, arguments)
	t.Cleanup(func() {
		if _, err := r.channel().QueueDelete(r.queue, false, false, false); err != nil {
			t.Log(err)
		}
	})
	return r
}

// in is the same for a part of the test, over a connection of its own.
func (r *rabbitLine) in(t *testing.T) *rabbitLine {
	t.Helper()
	part := *r
	part.T = t
	part.ch = part.channel()
	return &part
}

// channel opens one with confirms, on a connection of its own.
func (r *rabbitLine) channel() *amqp.Channel {
	r.Helper()
	conn, err := amqp.DialConfig(r.server.URL, amqp.Config{Dial: amqp.DefaultDial(20 * time.Second)})
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() { _ = conn.CloseDeadline(time.Now().Add(10 * time.Second)) })
	ch, err := conn.Channel()
	if err == nil {
		err = ch.Confirm(false)
	}
	if err != nil {
		r.Fatal(err)
	}
	return ch
}

func (r *rabbitLine) declare(kind string, arguments amqp.Table) {
	r.Helper()
	all := amqp.Table{"x-queue-type": kind}
	for name, value := range arguments {
		all[name] = value
	}
	if _, err := r.ch.QueueDeclare(r.queue, true, false, false, false, all); err != nil {
		r.Fatal(err)
	}
}

// publish sends n messages with the ids from m-FROM on, and waits for the broker
// to have them.
func (r *rabbitLine) publish(from, n int) {
	r.Helper()
	bodies := make([]string, n)
	for i := range bodies {
		bodies[i] = fmt.Sprintf(`{"id":"m-%d"}`, from+i)
	}
	r.publishBodies(bodies...)
}

func (r *rabbitLine) publishBodies(bodies ...string) {
	r.Helper()
	publishTo(r.T, r.ch, "", r.queue, bodies...)
}

// publishTo publishes to an exchange, and waits for the broker to have it all.
func publishTo(t *testing.T, ch *amqp.Channel, exchange, key string, bodies ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	confirms := make([]*amqp.DeferredConfirmation, len(bodies))
	for i, body := range bodies {
		c, err := ch.PublishWithDeferredConfirmWithContext(ctx, exchange, key, true, false,
			amqp.Publishing{Body: []byte(body), DeliveryMode: amqp.Persistent})
		if err != nil {
			t.Fatal(err)
		}
		confirms[i] = c
	}
	for _, c := range confirms {
		if ok, err := c.WaitContext(ctx); !ok {
			t.Fatalf("not confirmed: %v", err)
		}
	}
}

func (r *rabbitLine) effects() int { return count(r.T, r.pool, "select count(*) from effects") }

// empty checks that no message is left, for a consumer that has stopped. What it
// had not settled comes back a moment after its channel's end, so another consumer
// looks for a while.
func (r *rabbitLine) empty() {
	r.Helper()
	ch := r.channel()
	defer ch.Close()
	if err := ch.Qos(1, 0, false); err != nil {
		r.Fatal(err)
	}
	left, err := ch.Consume(r.queue, "", false, false, false, false, nil)
	if err != nil {
		r.Fatal(err)
	}
	select {
	case d := <-left:
		r.Errorf("a message is left: %s", d.Body)
	case <-time.After(500 * time.Millisecond):
	}
}

// api calls the management API. answer may be nil.
func (r *rabbitLine) api(method, path string, body, answer any) {
	r.Helper()
	if err := r.tryAPI(method, path, body, answer); err != nil {
		r.Fatal(err)
	}
}

func (r *rabbitLine) tryAPI(method, path string, body, answer any) error {
	r.Helper()
	if r.server.Management == "" {
		missing(r.T, servers.EnvRabbitMQManagement+" is not set")
	}
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), time.Minute)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, method, r.server.Management+"/api/"+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	request.Close = true
	request.Header.Set("Content-Type", "application/json")
	response, err := (&http.Client{Timeout: time.Minute}).Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	content, err := io.ReadAll(response.Body)
	if err != nil {
		return err
	}
	if response.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, response.Status, content)
	}
	if answer == nil {
		return nil
	}
	return json.Unmarshal(content, answer)
}

// rabbitCounts is what the broker counted of a queue. It is a few seconds old.
type rabbitCounts struct {
	Messages       int `json:"messages"`
	Unacknowledged int `json:"messages_unacknowledged"`
	Stats          struct {
		Deliver   int `json:"deliver"`
		Redeliver int `json:"redeliver"`
		Ack       int `json:"ack"`
	} `json:"message_stats"`
}

func (r *rabbitLine) counts() (c rabbitCounts) {
	r.Helper()
	r.api(http.MethodGet, "queues/%2F/"+url.PathEscape(r.queue), nil, &c)
	return c
}

// totals are the messages of the queue and those of them that are out, as the broker
// knew it a moment ago: other than the counts, they are not sampled every 5 s.
func (r *rabbitLine) totals() (messages, unacked int) {
	r.Helper()
	var queues []struct {
		rabbitCounts
		Name string `json:"name"`
	}
	r.api(http.MethodGet, "queues/%2F?disable_stats=true&enable_queue_totals=true", nil, &queues)
	for _, q := range queues {
		if q.Name == r.queue {
			return q.Messages, q.Unacknowledged
		}
	}
	return -1, -1
}

// settledCounts are the counts when the broker has counted a number of acks. What a
// channel did just before its end is not always counted.
func (r *rabbitLine) settledCounts(acks int) (c rabbitCounts) {
	r.Helper()
	eventually(r.T, time.Minute, fmt.Sprintf("%d acks are counted", acks), func() bool {
		c = r.counts()
		return c.Stats.Ack >= acks
	})
	return c
}

// closeConnections lets the broker close the connections of a client.
func (r *rabbitLine) closeConnections(clientID string) {
	r.Helper()
	closed := 0
	eventually(r.T, time.Minute, "the connection is listed", func() bool {
		var connections []struct {
			Name       string `json:"name"`
			Properties struct {
				Name string `json:"connection_name"`
			} `json:"client_properties"`
		}
		r.api(http.MethodGet, "connections", nil, &connections)
		for _, c := range connections {
			if c.Properties.Name == clientID {
				r.api(http.MethodDelete, "connections/"+url.PathEscape(c.Name), nil, nil)
				closed++
			}
		}
		return closed > 0
	})
}

// consumer makes a consumer of the inbox that is not running.
func (r *rabbitLine) consumer(h inbox.Handler[pgx.Tx], cfg *inbox.Config) *inbox.Consumer[pgx.Tx] {
	r.Helper()
	store, err := inboxpgx.New(r.pool)
	if err != nil {
		r.Fatal(err)
	}
	if cfg == nil {
		cfg = &inbox.Config{}
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	c, err := inbox.New(store, r.queue, keyfunc.JSON("id"), h, cfg)
	if err != nil {
		r.Fatal(err)
	}
	return c
}

// open opens a source, and closes it at the end.
func (r *rabbitLine) open(cfg *rabbitmq.Config) *rabbitmq.Source {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), time.Minute)
	defer cancel()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	s, err := rabbitmq.Open(ctx, []string{r.server.URL}, r.queue, cfg)
	if err != nil {
		r.Fatal(err)
	}
	r.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), 30*time.Second)
		defer cancel()
		_ = s.Close(ctx)
	})
	return s
}

// rabbitRun is a consumer that runs, and what it tells.
type rabbitRun struct {
	rabbitEvents
	inboxEvents
	source *rabbitmq.Source
	cancel context.CancelFunc
	done   chan error
}

// start runs a consumer; either configuration may be nil.
func (r *rabbitLine) start(h inbox.Handler[pgx.Tx], cfg *inbox.Config, source *rabbitmq.Config) *rabbitRun {
	r.Helper()
	run := &rabbitRun{done: make(chan error, 1)}
	if cfg == nil {
		cfg = &inbox.Config{}
	}
	if source == nil {
		source = &rabbitmq.Config{}
	}
	cfg.Hooks = append(cfg.Hooks, inbox.Hook(&run.inboxEvents))
	source.Hooks = append(source.Hooks, rabbitmq.Hook(&run.rabbitEvents))
	cfg.Logger = slog.New(slog.NewTextHandler(&run.rabbitEvents, nil))
	source.Logger = cfg.Logger
	in := r.consumer(h, cfg)
	labelled(r.T, r.queue, func() { run.source = r.open(source) })
	ctx, cancel := context.WithCancel(r.Context())
	run.cancel = cancel
	go func() { run.done <- in.Run(ctx, run.source) }()
	r.Cleanup(func() {
		if r.Failed() {
			r.Logf("log:\n%s", run.tail())
		}
	})
	return run
}

// stop stops the consumer in order.
func (c *rabbitRun) stop(t *testing.T) {
	t.Helper()
	c.cancel()
	if err := <-c.done; err != nil {
		t.Errorf("Run = %v", err)
	}
}

// ended waits until Run ends by itself, and returns its error.
func (c *rabbitRun) ended(t *testing.T, limit time.Duration) error {
	t.Helper()
	defer c.cancel()
	select {
	case err := <-c.done:
		return err
	case <-time.After(limit):
		t.Fatalf("Run did not end within %v; health: %v", limit, c.source.Health())
		return nil
	}
}

// rabbitEvents keeps the events and the log of a source.
type rabbitEvents struct {
	mu        sync.Mutex
	consuming []time.Time
	ends      []rabbitmq.EndedEvent
	stale     []rabbitmq.StaleAckEvent
	deleted   []rabbitmq.QueueDeletedEvent
	blocked   []rabbitmq.BlockedEvent
	pauses    []rabbitmq.PauseEvent
	recalls   []rabbitmq.RecallEvent
	failures  []rabbitmq.ReconnectEvent
	log       bytes.Buffer
	lines     int
}

// Write takes the lines of the log.
func (w *rabbitEvents) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.lines++
	return w.log.Write(b)
}

func (w *rabbitEvents) tail() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.log.Bytes()[max(0, w.log.Len()-6000):])
}

// note appends to a list of events.
func note[E any](w *rabbitEvents, list *[]E, e E) {
	w.mu.Lock()
	defer w.mu.Unlock()
	*list = append(*list, e)
}

// noted is a copy of a list of events.
func noted[E any](w *rabbitEvents, list *[]E) []E {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]E(nil), *list...)
}

func (w *rabbitEvents) OnConsuming(context.Context, rabbitmq.ConsumingEvent) {
	note(w, &w.consuming, time.Now())
}
func (w *rabbitEvents) OnEnded(_ context.Context, e rabbitmq.EndedEvent) {
	note(w, &w.ends, e)
}
func (w *rabbitEvents) OnStaleAck(_ context.Context, e rabbitmq.StaleAckEvent) {
	note(w, &w.stale, e)
}
func (w *rabbitEvents) OnQueueDeleted(_ context.Context, e rabbitmq.QueueDeletedEvent) {
	note(w, &w.deleted, e)
}
func (w *rabbitEvents) OnBlocked(_ context.Context, e rabbitmq.BlockedEvent) {
	note(w, &w.blocked, e)
}
func (w *rabbitEvents) OnPause(_ context.Context, e rabbitmq.PauseEvent) {
	note(w, &w.pauses, e)
}
func (w *rabbitEvents) OnRecall(_ context.Context, e rabbitmq.RecallEvent) {
	note(w, &w.recalls, e)
}
func (w *rabbitEvents) OnReconnect(_ context.Context, e rabbitmq.ReconnectEvent) {
	note(w, &w.failures, e)
}

// inboxEvents keeps the events of a consumer.
type inboxEvents struct {
	events   sync.Mutex
	outcomes []inbox.OutcomeEvent
	at       []time.Time // of the outcomes
	retries  []inbox.RetryEvent
	late     int // acks that were dropped
}

func (w *inboxEvents) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	w.events.Lock()
	defer w.events.Unlock()
	w.outcomes, w.at = append(w.outcomes, e), append(w.at, time.Now())
}

func (w *inboxEvents) OnStaleAck(context.Context, inbox.StaleAckEvent) {
	w.events.Lock()
	defer w.events.Unlock()
	w.late++
}

func (w *inboxEvents) OnRetry(_ context.Context, e inbox.RetryEvent) {
	w.events.Lock()
	defer w.events.Unlock()
	w.retries = append(w.retries, e)
}

// delay returns the time that was to pass after failed attempt n, from 0.
func (w *inboxEvents) delay(n int) time.Duration {
	w.events.Lock()
	defer w.events.Unlock()
	return w.retries[n].Delay
}

// count returns how many messages had the outcome.
func (w *inboxEvents) count(o inbox.Outcome) int {
	w.events.Lock()
	defer w.events.Unlock()
	n := 0
	for _, e := range w.outcomes {
		if e.Outcome == o {
			n++
		}
	}
	return n
}

// attempts returns how many failed attempts were counted.
func (w *inboxEvents) attempts() int {
	w.events.Lock()
	defer w.events.Unlock()
	n := 0
	for _, e := range w.retries {
		if e.Counted {
			n++
		}
	}
	return n
}

// receive takes exactly n deliveries, as a loop of a user's own.
func receive(t *testing.T, s broker.Source, n int) []*broker.Delivery {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var got []*broker.Delivery
	for len(got) < n {
		ds, err := s.Receive(ctx, n-len(got))
		if err != nil {
			t.Fatalf("receive: %v; got only %d of %d", err, len(got), n)
		}
		got = append(got, ds...)
	}
	return got
}
