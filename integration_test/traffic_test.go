package integration_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
)

const (
	// trafficBeat is the time between two batches of trafficBatch messages.
	trafficBeat  = 25 * time.Millisecond
	trafficBatch = 10
	// trafficKeys is how many record keys, which are lanes, the messages have.
	trafficKeys = 50
)

// traffic is a producer that writes all the time. What is not acknowledged it
// writes again until it is, so that in the end the messages m-0 to m-(n-1) are in
// the log, some of them more than once.
type traffic struct {
	brokers []string
	topic   string
	next    int          // the number of the next message
	failed  atomic.Int64 // writes that were not acknowledged, and were repeated

	writer *kafkago.Writer
	stop   chan struct{} // closed: stop
	ended  chan error
}

// start begins to write, until end is called or ctx ends.
func (p *traffic) start(ctx context.Context) {
	p.writer = &kafkago.Writer{
		Addr: kafkago.TCP(p.brokers...), Topic: p.topic, Balancer: &kafkago.Hash{}, RequiredAcks: kafkago.RequireAll,
		BatchTimeout: 5 * time.Millisecond, WriteTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		Transport: &kafkago.Transport{MetadataTTL: 500 * time.Millisecond},
	}
	p.stop, p.ended = make(chan struct{}), make(chan error, 1)
	go func() {
		err := p.run(ctx)
		_ = p.writer.Close()
		p.writer.Transport.(*kafkago.Transport).CloseIdleConnections()
		p.ended <- err
	}()
}

// end stops writing, waits until everything is acknowledged, and returns how many
// messages there are in all.
func (p *traffic) end(t *testing.T) int {
	t.Helper()
	close(p.stop)
	if err := <-p.ended; err != nil {
		t.Fatalf("produce: %v", err)
	}
	return p.next
}

func (p *traffic) run(ctx context.Context) error {
	beat := time.NewTicker(trafficBeat)
	defer beat.Stop()
	for {
		select {
		case <-beat.C:
		case <-p.stop:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
		batch := make([]kafkago.Message, trafficBatch)
		for i := range batch {
			batch[i] = kafkago.Message{
				Key: fmt.Appendf(nil, "k%d", p.next%trafficKeys), Value: fmt.Appendf(nil, `{"id":"m-%d"}`, p.next), Time: time.Now(),
			}
			p.next++
		}
		if err := p.write(ctx, batch); err != nil {
			return err
		}
	}
}

// write writes until all is acknowledged.
func (p *traffic) write(ctx context.Context, batch []kafkago.Message) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for {
		err := p.writer.WriteMessages(ctx, batch...)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return err
		}
		p.failed.Add(1)
		select {
		case <-time.After(100 * time.Millisecond): // Not in a hot loop.
		case <-ctx.Done():
		}
		var each kafkago.WriteErrors
		if errors.As(err, &each) && len(each) == len(batch) {
			var again []kafkago.Message
			for i, err := range each {
				if err != nil {
					again = append(again, batch[i])
				}
			}
			batch = again
		}
	}
}

// progress is a hook that notes how far consumers are. Make it with newProgress.
type progress struct {
	mu       sync.Mutex
	newest   map[string]time.Time // by partition: when the newest message was made that is done
	outcomes map[inbox.Outcome]int
	last     time.Time     // when a message was done
	stall    time.Duration // the longest time without one
}

func newProgress() *progress {
	return &progress{newest: make(map[string]time.Time), outcomes: make(map[inbox.Outcome]int), last: time.Now()}
}

func (p *progress) OnOutcome(_ context.Context, e inbox.OutcomeEvent) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.outcomes[e.Outcome]++
	now := time.Now()
	p.stall, p.last = max(p.stall, now.Sub(p.last)), now
	if e.Message.Time.After(p.newest[e.Message.Source]) {
		p.newest[e.Message.Source] = e.Message.Time
	}
}

// beyond tells whether of each partition a message is done that was made after a
// time.
func (p *progress) beyond(at time.Time, partitions int) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, newest := range p.newest {
		if newest.After(at) {
			n++
		}
	}
	return n == partitions
}

// longest returns the longest time without a message since the last call.
func (p *progress) longest() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	stall := p.stall
	p.stall, p.last = 0, time.Now()
	return stall
}

// counts returns how many messages ended how.
func (p *progress) counts() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return fmt.Sprint(p.outcomes)
}

// onceEach checks that m-0 to m-(n-1) have one effect and one inbox row each, and
// that nothing else is there.
func onceEach(t *testing.T, pool *pgxpool.Pool, n int) {
	t.Helper()
	for query, want := range map[string]int{
		"select count(*) from effects":            n,
		"select count(distinct key) from effects": n,
		fmt.Sprintf("select count(*) from effects where substr(key, 3)::int between 0 and %d", n-1): n,
		"select count(*) from effects e join inbox i on i.message_key = e.key":                      n,
		"select count(*) from inbox":        n,
		"select count(*) from inbox_parked": 0,
	} {
		if got := count(t, pool, query); got != want {
			t.Errorf("%s = %d, want %d", query, got, want)
		}
	}
}
