package kafka

import (
	"errors"
	"log/slog"
	"sync"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/internal/retry"
)

// newTrouble is for something that may fail again and again.
func newTrouble(log *slog.Logger, what string) retry.Trouble {
	return retry.Trouble{
		Log: log, Adapter: "kafka", What: what,
		// Another member joins or leaves.
		Usual: func(err error) bool { return errors.Is(err, kafkago.RebalanceInProgress) },
	}
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
	if !l.last.IsZero() && now.Sub(l.last) < retry.RemindEvery {
		return 0
	}
	n := l.count
	l.count, l.last = 0, now
	return n
}
