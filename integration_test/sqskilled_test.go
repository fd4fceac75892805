package integration_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os/exec"
	"strconv"
	"testing"
	"time"

	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/integration_test/servers"
)

// The main job: two processes of examples/sqs-orders, each killed with -9 five times
// at random moments. The events are sent by boto3. From a FIFO queue they are booked
// in the order of their groups.
func TestSQSOrdersKilled(t *testing.T) {
	t.Parallel()
	for name, fifo := range sqsKinds {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seed := uint64(time.Now().UnixNano())
			stream, err := orders.Generate(orders.Config{Events: sized(3_000, 50_000), Repeats: 0.2, Seed: seed})
			if err != nil {
				t.Fatal(err)
			}
			t.Logf("seed %d, %d events, %d distinct keys", seed, len(stream.Lines), stream.Distinct)
			database := servers.PostgresDurable(t)
			pool := openPool(t, database)
			q := newSQSQueue(t, fifo, nil)
			b := newBookers(t, pool, stream.Distinct, "examples/sqs-orders",
				"-database", database, "-endpoint", q.address, "-queue", q.name, "-consumer", q.name, "-batch", "10", "-visibility", "2s")
			start := time.Now()
			sent := q.boto3(stream)
			b.start()
			kills := 5
			if fifo {
				kills = sized(2, 5) // After each, groups wait for the end of a lease.
			}
			b.kill(rand.New(rand.NewPCG(seed, 0)), kills, nil)
			if err := <-sent; err != nil {
				t.Fatal(err)
			}
			eventually(t, 3*time.Minute, "the queue is empty after the kills", func() bool { return b.booked() >= stream.Distinct && q.drained() })
			t.Logf("consumed by two processes with %d kills in %v", kills*len(b.procs), time.Since(start))
			b.stop()
			checkBookings(t, pool, stream.Distinct)
			q.empty()
			if fifo {
				checkGroupOrder(t, b, stream)
			}
		})
	}
}

// sqsGroup is the message group of an order.
func sqsGroup(orderID string) string {
	return fmt.Sprintf("g%d", crc32.ChecksumIEEE([]byte(orderID))%sqsGroups)
}

// sqsBacklog is how many messages wait in a queue at most: of a FIFO queue with tens of
// thousands this server gives out some ten messages a second, because it sorts them
// all again and again.
const sqsBacklog = 300

// boto3 sends the lines with a client that is not ours, in the background. The channel
// says how that ended.
func (q *sqsQueue) boto3(s orders.Stream) <-chan error {
	q.Helper()
	const python = "/usr/bin/python3" // for which the service's script installs it
	if err := exec.CommandContext(q.Context(), python, "-c", "import boto3").Run(); err != nil {
		missing(q.T, "boto3 is not installed for "+python)
	}
	var in, said bytes.Buffer
	for _, l := range s.Lines {
		fmt.Fprintf(&in, "%s\t%s\n", sqsGroup(l.Key), l.Body)
	}
	cmd := exec.CommandContext(q.Context(), python, "testdata/sqssend.py", q.address, q.url, strconv.Itoa(sqsBacklog))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = &in, &said, &said
	if err := cmd.Start(); err != nil {
		q.Fatal(err)
	}
	sent := make(chan error, 1)
	go func() {
		if err := cmd.Wait(); err != nil {
			sent <- fmt.Errorf("boto3: %w\n%s", err, said.Bytes())
		}
		close(sent)
	}()
	return sent
}

// checkGroupOrder checks that of each group the events were booked in the order in
// which they were sent first.
func checkGroupOrder(t *testing.T, b *bookers, s orders.Stream) {
	t.Helper()
	rows, err := b.pool.Query(t.Context(), "select order_id, event_type from bookings order by id")
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	place := make(map[string]int) // where a key is first
	for i, l := range s.Lines {
		var e orders.Event
		if err := json.Unmarshal(l.Body, &e); err != nil {
			t.Fatal(err)
		}
		if key := e.OrderID + "|" + e.EventType; place[key] == 0 {
			place[key] = i + 1
		}
	}
	last := make(map[string]int) // by group
	wrong := 0
	for rows.Next() {
		var orderID, eventType string
		if err := rows.Scan(&orderID, &eventType); err != nil {
			t.Fatal(err)
		}
		group, at := sqsGroup(orderID), place[orderID+"|"+eventType]
		if before, ok := last[group]; ok && at < before {
			wrong++
		}
		last[group] = at
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	if wrong > 0 || len(last) == 0 {
		t.Errorf("%d bookings in %d groups came before an earlier one", wrong, len(last))
	}
}
