package main

import (
	"runtime/metrics"
	"sync"
	"sync/atomic"
	"time"
)

// meter measures one pass, from its first commit to its last. A contestant
// calls commit after every COMMIT and done for every message that is acked.
type meter struct {
	want int64
	full chan struct{} // closed when as many messages are done as there are
	seen atomic.Int64

	mu    sync.Mutex
	head  int // messages of the first commit: they are not measured
	txs   int // commits after it
	first sample
	last  time.Time
	end   sample
}

// sample is what the process has used up to a moment.
type sample struct {
	at      time.Time
	cpu     time.Duration
	objects uint64
	bytes   uint64
}

func newMeter(messages int) *meter {
	return &meter{want: int64(messages), full: make(chan struct{})}
}

// commit notes a transaction with n messages that was committed just now.
func (m *meter) commit(n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.last.IsZero() {
		m.first, m.head = takeSample(), n
		m.last = m.first.at
		return
	}
	m.last = time.Now()
	m.txs++
}

// done notes a message that is done with.
func (m *meter) done() {
	if m.seen.Add(1) != m.want {
		return
	}
	m.mu.Lock()
	m.end = takeSample()
	m.mu.Unlock()
	close(m.full)
}

// figures are what one pass was measured at.
type figures struct {
	// PerSecond is the number of messages a second.
	PerSecond float64 `json:"per_second"`
	// Seconds is the time from the first commit to the last.
	Seconds float64 `json:"seconds"`
	// PerTransaction is the number of messages that a transaction had.
	PerTransaction float64 `json:"messages_per_transaction"`
	// CPUMicros is the CPU time of this process for one message, in
	// microseconds; 0 where the system does not say.
	CPUMicros float64 `json:"cpu_us_per_message"`
	// Allocs and AllocBytes are the allocations for one message.
	Allocs     float64 `json:"allocs_per_message"`
	AllocBytes float64 `json:"alloc_bytes_per_message"`
}

// figures returns the result of a full meter, and false when everything was
// done in one moment.
func (m *meter) figures() (figures, bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	elapsed, messages := m.last.Sub(m.first.at).Seconds(), float64(m.want-int64(m.head))
	if elapsed <= 0 || messages <= 0 || m.txs == 0 {
		return figures{}, false
	}
	return figures{
		PerSecond: messages / elapsed, Seconds: elapsed, PerTransaction: messages / float64(m.txs),
		CPUMicros:  float64((m.end.cpu - m.first.cpu).Microseconds()) / messages,
		Allocs:     float64(m.end.objects-m.first.objects) / messages,
		AllocBytes: float64(m.end.bytes-m.first.bytes) / messages,
	}, true
}

// takeSample reads the counters; unlike runtime.ReadMemStats it does not stop
// the world.
func takeSample() sample {
	read := []metrics.Sample{
		{Name: "/gc/heap/allocs:objects"},
		{Name: "/gc/heap/tiny/allocs:objects"},
		{Name: "/gc/heap/allocs:bytes"},
	}
	metrics.Read(read)
	return sample{
		at:      time.Now(),
		cpu:     processCPU(),
		objects: read[0].Value.Uint64() + read[1].Value.Uint64(),
		bytes:   read[2].Value.Uint64(),
	}
}
