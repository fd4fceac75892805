package kafka

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"

	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// cluster finds brokers. It keeps what it was told last, and one connection to
// whichever broker answered last. Its methods may be called concurrently.
type cluster struct {
	dialer *wire.Dialer
	seeds  []string
	topics []string
	// permissions tells to ask what may be done with the topics, too.
	permissions bool

	turn chan struct{} // holds one token: who has it uses conn
	conn *wire.Conn

	mu    sync.Mutex
	known *wire.Metadata
	asked time.Time // when known was asked for
}

func newCluster(dialer *wire.Dialer, seeds, topics []string) *cluster {
	c := &cluster{dialer: dialer, seeds: seeds, topics: topics, turn: make(chan struct{}, 1)}
	c.turn <- struct{}{}
	return c
}

// metadata returns what a broker has said since the given time. Many callers
// at once make one request.
func (c *cluster) metadata(ctx context.Context, since time.Time) (*wire.Metadata, error) {
	var m *wire.Metadata
	err := c.exclusive(ctx, func() error {
		c.mu.Lock()
		known, asked := c.known, c.asked
		c.mu.Unlock()
		if known != nil && !asked.Before(since) {
			m = known
			return nil
		}
		now := time.Now()
		err := c.ask(ctx, func(conn *wire.Conn) (err error) {
			if c.permissions {
				m, err = conn.Permissions(ctx, c.topics)
			} else {
				m, err = conn.Metadata(ctx, c.topics)
			}
			return err
		})
		if err == nil {
			c.mu.Lock()
			c.known, c.asked = m, now
			c.mu.Unlock()
		}
		return err
	})
	return m, err
}

// request sends a request that any broker can answer.
func (c *cluster) request(ctx context.Context, req protocol.Message) (res protocol.Message, err error) {
	err = c.exclusive(ctx, func() error {
		return c.ask(ctx, func(conn *wire.Conn) (err error) {
			res, err = conn.RoundTrip(ctx, req)
			return err
		})
	})
	return res, err
}

// leader returns the address of the broker to fetch a partition from, as known
// since the given time.
func (c *cluster) leader(ctx context.Context, tp topicPartition, since time.Time) (string, error) {
	m, err := c.metadata(ctx, since)
	if err != nil {
		return "", err
	}
	topic, ok := m.Topics[tp.topic]
	if !ok {
		return "", fmt.Errorf("topic %q: %w", tp.topic, kafkago.UnknownTopicOrPartition)
	}
	if topic.Err != nil {
		return "", fmt.Errorf("topic %q: %w", tp.topic, topic.Err)
	}
	id, ok := topic.Leaders[tp.id]
	if !ok {
		return "", fmt.Errorf("partition %s: %w", tp, kafkago.UnknownTopicOrPartition)
	}
	address, ok := m.Brokers[id]
	if !ok {
		return "", fmt.Errorf("partition %s: %w", tp, kafkago.LeaderNotAvailable)
	}
	return address, nil
}

// exclusive runs f alone.
func (c *cluster) exclusive(ctx context.Context, f func() error) error {
	select {
	case <-c.turn:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { c.turn <- struct{}{} }()
	return f()
}

// ask lets f talk to a broker: the one of last time, else any that can be
// reached. It is called by exclusive.
func (c *cluster) ask(ctx context.Context, f func(*wire.Conn) error) error {
	if c.conn != nil {
		err := f(c.conn)
		if err == nil || ctx.Err() != nil {
			return err
		}
		c.conn.Close()
		c.conn = nil
	}
	var errs []error
	for _, address := range c.candidates() {
		conn, err := c.dialer.Connect(ctx, address)
		if err == nil {
			if err = f(conn); err == nil {
				c.conn = conn
				return nil
			}
			conn.Close()
		}
		if ctx.Err() != nil {
			return err
		}
		errs = append(errs, err)
	}
	return fmt.Errorf("no broker can be used: %w", errors.Join(errs...))
}

// candidates are the brokers to try, in random order: those that are known,
// then those that were configured.
func (c *cluster) candidates() []string {
	var addresses []string
	c.mu.Lock()
	if c.known != nil {
		for _, a := range c.known.Brokers {
			addresses = append(addresses, a)
		}
	}
	c.mu.Unlock()
	shuffle(addresses)
	seeds := slices.Clone(c.seeds)
	shuffle(seeds)
	for _, s := range seeds {
		if !slices.Contains(addresses, s) {
			addresses = append(addresses, s)
		}
	}
	return addresses
}

func shuffle(s []string) {
	rand.Shuffle(len(s), func(i, j int) { s[i], s[j] = s[j], s[i] })
}
