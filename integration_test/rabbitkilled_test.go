package integration_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/integration_test/servers"
)

// The main job: two processes of examples/rabbitmq-orders, each killed with -9 five
// times at random moments. Meanwhile the broker closes all connections twice, and
// is killed with -9 itself. The events are published by amqp-publish.
func TestRabbitOrdersKilled(t *testing.T) {
	t.Parallel()
	own, server := servers.OwnRabbitMQ(t)
	k := newRabbitKilled(t, server, "quorum", sized(6_000, 100_000))
	k.run(5, func(kills int) {
		switch kills {
		case 3, 8:
			k.line.closeConnectionsOf(k.user)
		case 6:
			own.Crash(t)
			own.Start(t)
		}
	})
}

// The same in short for a classic queue. A crash of the broker is not for it: it
// loses what was published without confirms.
func TestRabbitOrdersKilledClassic(t *testing.T) {
	t.Parallel()
	k := newRabbitKilled(t, servers.RabbitMQ(t), "classic", sized(2_000, 20_000))
	k.run(2, func(kills int) {
		if kills == 2 {
			k.line.closeConnectionsOf(k.user)
		}
	})
}

// rabbitKilled is two processes that book what is in a queue.
type rabbitKilled struct {
	*testing.T
	line    *rabbitLine
	user    string // of the processes
	stream  orders.Stream
	random  *rand.Rand
	bookers *bookers
}

func newRabbitKilled(t *testing.T, server *servers.RabbitMQServer, kind string, events int) *rabbitKilled {
	t.Helper()
	k := &rabbitKilled{T: t}
	seed := uint64(time.Now().UnixNano())
	k.random = rand.New(rand.NewPCG(seed, 0))
	var err error
	if k.stream, err = orders.Generate(orders.Config{Events: events, Repeats: 0.2, Seed: seed}); err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d, %d events, %d distinct keys", seed, events, k.stream.Distinct)
	database := servers.PostgresDurable(t)
	k.line = newRabbitQueue(t, server, kind, nil, openPool(t, database))
	var address string
	k.user, address = k.line.login()
	k.bookers = newBookers(t, k.line.pool, k.stream.Distinct, "examples/rabbitmq-orders",
		"-database", database, "-url", address, "-queue", k.line.queue, "-consumer", k.line.queue, "-batch", "10")
	return k
}

// run kills each process some times; after is called after each kill.
func (k *rabbitKilled) run(times int, after func(kills int)) {
	k.Helper()
	start := time.Now()
	k.line.amqpPublish(k.stream)
	k.Logf("published in %v", time.Since(start))
	k.bookers.start()
	start = time.Now()
	k.bookers.kill(k.random, times, after)
	eventually(k.T, 3*time.Minute, "the queue is empty after the kills", func() bool {
		messages, unacked := k.line.depth()
		return k.bookers.booked() >= k.stream.Distinct && messages == 0 && unacked == 0
	})
	k.Logf("consumed by two processes with %d kills in %v", times*len(k.bookers.procs), time.Since(start))
	k.bookers.stop()
	checkBookings(k.T, k.line.pool, k.stream.Distinct)
	// With no consumer there is nothing that could be unacked.
	q, err := k.line.channel().QueueDeclarePassive(k.line.queue, true, false, false, false, nil)
	if err != nil || q.Messages != 0 || q.Consumers != 0 {
		k.Errorf("the queue at the end: %+v, %v", q, err)
	}
}

// login makes a user who may do everything. The address is the server's with that
// login.
func (r *rabbitLine) login() (user, address string) {
	r.Helper()
	const password = "p@ss/word"
	user = servers.Name(r.T)
	r.api(http.MethodPut, "users/"+user, map[string]string{"password": password, "tags": ""}, nil)
	r.Cleanup(func() { r.api(http.MethodDelete, "users/"+user, nil, nil) })
	r.api(http.MethodPut, "permissions/%2F/"+user, map[string]string{"configure": ".*", "write": ".*", "read": ".*"}, nil)
	u, err := url.Parse(r.server.URL)
	if err != nil {
		r.Fatal(err)
	}
	u.User = url.UserPassword(user, password)
	return user, u.String()
}

// closeConnectionsOf lets the broker close all connections of a user, at least one.
// By user they are known at once; a list of all is some seconds old.
func (r *rabbitLine) closeConnectionsOf(user string) {
	r.Helper()
	path := "connections/username/" + user
	eventually(r.T, time.Minute, "there is a connection", func() bool {
		var all []struct{}
		r.api(http.MethodGet, path, nil, &all)
		return len(all) > 0
	})
	r.api(http.MethodDelete, path, nil, nil)
}

// amqpPublish publishes the bodies with a client that is not ours, and waits for the
// broker to have them: the client does not ask for confirms.
func (r *rabbitLine) amqpPublish(s orders.Stream) {
	r.Helper()
	path, err := exec.LookPath("amqp-publish")
	if err != nil {
		missing(r.T, "amqp-publish is not installed")
	}
	var in bytes.Buffer
	for _, l := range s.Lines {
		in.Write(l.Body)
		in.WriteByte('\n')
	}
	// The client takes no slash for the virtual host of that name.
	cmd := exec.CommandContext(r.Context(), path, "--url="+strings.TrimSuffix(r.server.URL, "/"), "-r", r.queue, "-p", "-l")
	cmd.Stdin = &in
	if out, err := cmd.CombinedOutput(); err != nil {
		r.Fatalf("amqp-publish: %v\n%s", err, out)
	}
	eventually(r.T, time.Minute, fmt.Sprintf("the queue has %d messages", len(s.Lines)), func() bool {
		messages, _ := r.depth()
		return messages == len(s.Lines)
	})
}

// depth returns how many messages the queue has, and how many of them are out, as
// the broker knew it a moment ago; -1 while it does not tell. Once there were none
// there never are, if nobody publishes.
func (r *rabbitLine) depth() (messages, unacked int) {
	r.Helper()
	var q struct {
		Messages *int `json:"messages"`
		Unacked  *int `json:"messages_unacknowledged"`
	}
	err := r.tryAPI(http.MethodGet, "queues/%2F/"+url.PathEscape(r.queue), nil, &q)
	if err != nil || q.Messages == nil || q.Unacked == nil {
		return -1, -1
	}
	return *q.Messages, *q.Unacked
}
