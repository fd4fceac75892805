package rabbitmq

import (
	"sync"
	"time"
)

// window is how many messages are asked for at a time: Config.Prefetch, and less
// for a while after messages grew old here.
type window struct {
	most int

	mu      sync.Mutex
	now     int
	changed time.Time
}

func newWindow(most int) *window { return &window{most: most, now: most} }

func (w *window) size() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.now
}

// shrink halves it; it tells whether that changed anything.
func (w *window) shrink(now time.Time) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.changed = now
	before := w.now
	w.now = max(w.now/2, 1)
	return w.now != before
}

// grow doubles it when it has not changed for a while; it tells whether it did.
func (w *window) grow(now time.Time, after time.Duration) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.now == w.most || now.Sub(w.changed) < after {
		return false
	}
	w.changed = now
	w.now = min(w.now*2, w.most)
	return true
}
