package retry

import (
	"context"
	"log/slog"
	"time"
)

// RemindEvery is how often trouble that lasts is logged again.
const RemindEvery = 30 * time.Second

// Trouble is something that fails again and again, and is logged when it begins,
// every now and then, and when it is over. It belongs to one goroutine.
type Trouble struct {
	Log     *slog.Logger
	Adapter string // begins the lines: "kafka"
	What    string // what fails
	// Usual tells of an error that it is no reason to worry if it comes once: that
	// is logged as information. Nil: none is.
	Usual func(error) bool

	tries int
	since time.Time
	last  time.Time // logged
}

// Note takes one more failure and returns how many there were in a row.
func (t *Trouble) Note(ctx context.Context, err error, args ...any) int {
	now := time.Now()
	if t.tries == 0 {
		t.since = now
	}
	t.tries++
	if t.tries == 1 || now.Sub(t.last) >= RemindEvery {
		t.last = now
		args = append(args, "what", t.What, "error", err, "attempt", t.tries, "for", now.Sub(t.since).Round(time.Millisecond))
		level := slog.LevelWarn
		if t.tries == 1 && t.Usual != nil && t.Usual(err) {
			level = slog.LevelInfo
		}
		t.Log.Log(ctx, level, t.Adapter+": failed, trying again", args...) //nolint:sloglint // It begins with who says it.
	}
	return t.tries
}

// Tries is how often it has failed in a row.
func (t *Trouble) Tries() int { return t.tries }

// Lasts is for how long it has failed in a row.
func (t *Trouble) Lasts() time.Duration {
	if t.tries == 0 {
		return 0
	}
	return time.Since(t.since)
}

// Over notes a success.
func (t *Trouble) Over(ctx context.Context) {
	if t.tries == 0 {
		return
	}
	//nolint:sloglint // It begins with who says it.
	t.Log.InfoContext(ctx, t.Adapter+": works again", "what", t.What, "attempts", t.tries, "after", t.Lasts().Round(time.Millisecond))
	t.tries = 0
}
