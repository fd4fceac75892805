package kafka

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"
)

// remindEvery is how often trouble that lasts is logged again.
const remindEvery = 30 * time.Second

// trouble is something that fails again and again, and is logged when it
// begins, every now and then, and when it is over. It belongs to one
// goroutine.
type trouble struct {
	log   *slog.Logger
	what  string // what fails
	tries int
	since time.Time
	last  time.Time // logged
}

// note takes one more failure and returns how many there were in a row.
func (t *trouble) note(ctx context.Context, err error, args ...any) int {
	now := time.Now()
	if t.tries == 0 {
		t.since = now
	}
	t.tries++
	if t.tries == 1 || now.Sub(t.last) >= remindEvery {
		t.last = now
		args = append(args, "what", t.what, "error", err, "attempt", t.tries, "for", now.Sub(t.since).Round(time.Millisecond))
		level := slog.LevelWarn
		if t.tries == 1 && errors.Is(err, kafkago.RebalanceInProgress) {
			level = slog.LevelInfo // Another member joins or leaves.
		}
		t.log.Log(ctx, level, "kafka: failed, trying again", args...)
	}
	return t.tries
}

// lasts is for how long it has failed in a row.
func (t *trouble) lasts() time.Duration {
	if t.tries == 0 {
		return 0
	}
	return time.Since(t.since)
}

// lateAcks are settlings that came too late. Thousands can come at once, when a
// generation ends; they are logged together. It may be used concurrently.
type lateAcks struct {
	mu    sync.Mutex
	count int       // since they were logged
	last  time.Time // logged
}

// note takes one more and returns how many there are to log now; 0: none.
func (l *lateAcks) note(now time.Time) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.count++
	if !l.last.IsZero() && now.Sub(l.last) < remindEvery {
		return 0
	}
	n := l.count
	l.count, l.last = 0, now
	return n
}

// over notes a success.
func (t *trouble) over(ctx context.Context) {
	if t.tries == 0 {
		return
	}
	t.log.InfoContext(ctx, "kafka: works again", "what", t.what, "attempts", t.tries, "after", t.lasts().Round(time.Millisecond))
	t.tries = 0
}
