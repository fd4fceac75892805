package integration_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/rabbitmq"
)

// A stream is read again, from an offset and from a time: what was handled before is
// a replay, and nothing is missing. A consumer that stops goes on where it was.
func TestRabbitStreamReplay(t *testing.T) {
	t.Parallel()
	half := sized(250, 5000)
	all := 2 * half
	r := newRabbitLine(t, "stream")
	r.publish(0, half)
	// The protocol has whole seconds only.
	second := time.Now().Truncate(time.Second).Add(2 * time.Second)
	<-time.After(time.Until(second))
	r.publish(half, half)

	// read runs a consumer until it is at an offset or beyond.
	read := func(from rabbitmq.Stream, to int) (c *rabbitRun, position int) {
		c = r.start(effect, nil, &rabbitmq.Config{Stream: &from})
		eventually(t, 2*time.Minute, fmt.Sprintf("it is at %d", to), func() bool { return c.source.Stats().Position >= int64(to) })
		c.stop(t)
		if c.attempts() != 0 || c.source.Stats().Epochs != 1 {
			t.Errorf("%d failed attempts; %+v", c.attempts(), c.source.Stats())
		}
		offset, known := c.source.Position()
		if !known {
			t.Error("the position is not known")
		}
		return c, int(offset)
	}
	c, position := read(rabbitmq.Stream{}, half/2)
	first := c.count(inbox.FirstAttempt)
	if n := c.count(inbox.Replay); n != 0 || position > first || r.effects() != first {
		t.Errorf("%d effects, %d first attempts and %d replays up to %d", r.effects(), first, n, position)
	}
	c, end := read(rabbitmq.Stream{Start: rabbitmq.StreamOffset, Offset: int64(position)}, all)
	// What was done beyond the position comes again.
	if rest, again := c.count(inbox.FirstAttempt), c.count(inbox.Replay); rest != all-first || again != first-position || end != all {
		t.Errorf("%d first attempts and %d replays from %d to %d, after %d", rest, again, position, end, first)
	}
	onceEach(t, r.pool, all)
	if n := count(t, r.pool, "select count(*) from inbox where source = $1 and message_key = 'm-' || position", "rabbitmq:"+r.queue); n != all {
		t.Errorf("%d rows tell the offset, want %d", n, all)
	}

	c, _ = read(rabbitmq.Stream{Start: rabbitmq.StreamOffset, Offset: int64(half) + 7}, all)
	if first, replays := c.count(inbox.FirstAttempt), c.count(inbox.Replay); first != 0 || replays != half-7 {
		t.Errorf("from an offset: %d first attempts and %d replays, want 0 and %d", first, replays, half-7)
	}
	c, _ = read(rabbitmq.Stream{Start: rabbitmq.StreamTimestamp, Time: second}, all)
	if first, replays := c.count(inbox.FirstAttempt), c.count(inbox.Replay); first != 0 || replays < half || replays >= all {
		t.Errorf("from a time: %d first attempts and %d replays, want 0 and at least %d", first, replays, half)
	}
	onceEach(t, r.pool, all)
}
