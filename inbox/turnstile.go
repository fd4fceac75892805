package inbox

import (
	"slices"
	"sync"
)

// turnstile lets one through at a time, in the order in which they came. The zero
// value is ready.
type turnstile struct {
	mu    sync.Mutex
	busy  bool
	queue []chan struct{} // closed for the one whose turn it is
}

// enter waits for its turn, and reports whether it came before one of the two ends.
func (t *turnstile) enter(end, otherEnd <-chan struct{}) bool {
	t.mu.Lock()
	if !t.busy {
		t.busy = true
		t.mu.Unlock()
		return true
	}
	turn := make(chan struct{})
	t.queue = append(t.queue, turn)
	t.mu.Unlock()
	select {
	case <-turn:
		return true
	case <-end:
	case <-otherEnd:
	}
	t.mu.Lock()
	i := slices.Index(t.queue, turn)
	if i >= 0 {
		t.queue = slices.Delete(t.queue, i, i+1)
	}
	t.mu.Unlock()
	if i < 0 {
		t.leave() // The turn came all the same.
	}
	return false
}

// leave lets the next one through.
func (t *turnstile) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.queue) == 0 {
		t.busy = false
		return
	}
	close(t.queue[0])
	t.queue = slices.Delete(t.queue, 0, 1)
}
