package sqs

import (
	"context"
	"log/slog"
	"time"
)

// remindEvery is how often trouble that lasts is logged again.
const remindEvery = 30 * time.Second

// trouble is something that fails again and again, and is logged when it begins,
// every now and then, and when it is over. It belongs to one goroutine.
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
		t.log.WarnContext(ctx, "sqs: failed, trying again", args...)
	}
	return t.tries
}

// over notes a success.
func (t *trouble) over(ctx context.Context) {
	if t.tries == 0 {
		return
	}
	t.log.InfoContext(ctx, "sqs: works again", "what", t.what, "attempts", t.tries, "after", time.Since(t.since).Round(time.Millisecond))
	t.tries = 0
}
