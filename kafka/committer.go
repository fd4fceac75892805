package kafka

import (
	"context"
	"errors"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/internal/retry"
)

// committer commits the offsets of one generation: by time, when it is kicked,
// and when it is flushed. One request is under way at a time, so that offsets
// arrive in order.
type committer struct {
	ledger   *ledger
	interval time.Duration // 0: only when kicked
	backoff  retry.Backoff
	kicked   chan struct{} // holds a token when kicked

	// send commits the offsets and notes the answer in each item.
	send func(ctx context.Context, items []commitItem) error
	// failed is told of every failure and how many there were in a row.
	failed func(attempt int, err error)
	// done is told of every success.
	done func()
}

// kick asks for a commit without waiting for the time. It does not block.
func (c *committer) kick() {
	select {
	case c.kicked <- struct{}{}:
	default:
	}
}

// run commits until stop ends, or the generation turns out to be over; then the
// error says how. A request that is under way is only cut off by hard: offsets
// that arrive late could arrive after newer ones.
func (c *committer) run(stop, hard context.Context) error {
	var tick <-chan time.Time
	if c.interval > 0 {
		t := time.NewTicker(c.interval)
		defer t.Stop()
		tick = t.C
	}
	for {
		select {
		case <-stop.Done():
			return nil
		case <-tick:
		case <-c.kicked:
		}
		if err := c.flush(stop, hard); isOver(err) {
			return err
		}
	}
}

// flush commits what there is, and tries again until it is taken, one of the
// contexts ends, or the generation is over.
func (c *committer) flush(stop, hard context.Context) error {
	for {
		items := c.ledger.uncommitted()
		if len(items) == 0 {
			return nil
		}
		err := c.send(hard, items)
		c.ledger.wasCommitted(items)
		if err == nil {
			c.backoff.Reset()
			c.done()
			continue
		}
		c.failed(c.backoff.Tries()+1, err)
		if isOver(err) || hard.Err() != nil || !c.backoff.Sleep(stop) {
			return err
		}
	}
}

// isOver tells whether an answer says that the member's generation is over.
func isOver(err error) bool {
	return errors.Is(err, kafkago.IllegalGeneration) ||
		errors.Is(err, kafkago.UnknownMemberId) ||
		errors.Is(err, kafkago.FencedInstanceID)
}
