package memory

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// A heap gives its elements in order, whatever was removed from its middle.
func TestHeap(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	h := newHeap(func(a, b *entry) bool { return a.place < b.place })
	var in []*entry
	for step := range 20_000 {
		switch {
		case len(in) == 0 || random.IntN(5) < 3:
			e := &entry{place: random.IntN(1000)}
			h.push(e)
			in = append(in, e)
		case random.IntN(2) == 0:
			i := random.IntN(len(in))
			h.remove(in[i])
			h.remove(in[i]) // does nothing
			in = slices.Delete(in, i, i+1)
		default:
			top := h.top()
			h.remove(top)
			in = slices.DeleteFunc(in, func(e *entry) bool { return e == top })
			if i := slices.IndexFunc(in, func(e *entry) bool { return e.place < top.place }); i >= 0 {
				t.Fatalf("step %d: the top was %d, but %d is in the heap", step, top.place, in[i].place)
			}
		}
		if h.len() != len(in) {
			t.Fatalf("step %d: the heap has %d elements, want %d", step, h.len(), len(in))
		}
		if step == 15_000 {
			h.clear()
			in = nil
		}
	}
}

// model is what must be true of a queue with several sources, checked while
// they do everything that they can, in random order.
type model struct {
	*testing.T
	q       *Queue
	sources []*Source
	out     map[*Source][]*broker.Delivery
	acked   map[int64]bool
	random  *rand.Rand
}

// Any sequence of calls keeps the promises: lanes in order and at one source,
// nothing acked comes again, nothing is lost, the counts add up.
func TestRandomCalls(t *testing.T) {
	t.Parallel()
	for seed := range uint64(40) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m := &model{T: t, q: New("orders", nil), out: make(map[*Source][]*broker.Delivery), acked: make(map[int64]bool)}
				m.random = rand.New(rand.NewPCG(seed, 0))
				for range 3 {
					m.sources = append(m.sources, m.q.Source())
				}
				for range 2000 {
					m.step()
					m.check()
				}
				m.finish()
			})
		})
	}
}

func (m *model) step() {
	i := m.random.IntN(len(m.sources))
	s := m.sources[i]
	switch m.random.IntN(20) {
	case 0, 1, 2, 3:
		m.q.Publish(&broker.Message{Key: []byte([]string{"", "a", "b", "c"}[m.random.IntN(4)])})
	case 4, 5, 6, 7, 8:
		m.receive(s)
	case 9:
		<-time.After(time.Duration(m.random.IntN(5)) * time.Second)
	case 10:
		if m.random.IntN(10) == 0 {
			m.lost(s, s.Revoke())
		}
	case 11:
		if m.random.IntN(10) == 0 {
			n := len(m.out[s])
			_ = s.Close(m.Context()) // never fails
			m.lost(s, n)
			m.sources[i] = m.q.Source()
		}
	case 12:
		if m.random.IntN(50) == 0 {
			m.q.Rewind()
			clear(m.acked)
			for _, s := range m.sources {
				m.lost(s, len(m.out[s]))
			}
		}
	default:
		m.settle(s)
	}
}

func (m *model) receive(s *Source) {
	m.q.mu.Lock()
	deliveries := m.q.take(s, 1+m.random.IntN(5), time.Now())
	m.q.mu.Unlock()
	for _, d := range deliveries {
		offset := d.Message.Position.Offset
		if m.acked[offset] {
			m.Fatalf("%d was acked and came again", offset)
		}
		for other, out := range m.out {
			for _, o := range out {
				switch {
				case o.Message.Position == d.Message.Position:
					m.Fatalf("%d is out twice", offset)
				case o.Lane != d.Lane || d.Lane == "":
				case other != s:
					m.Fatalf("lane %s is with two sources", d.Lane)
				case o.Message.Position.Offset > offset:
					m.Fatalf("%d went out behind %d of its lane", offset, o.Message.Position.Offset)
				}
			}
		}
		m.out[s] = append(m.out[s], d)
	}
}

func (m *model) settle(s *Source) {
	out := m.out[s]
	if len(out) == 0 {
		return
	}
	i := m.random.IntN(len(out))
	d := out[i]
	m.out[s] = slices.Delete(out, i, i+1)
	if m.random.IntN(3) == 0 {
		nack(m.T, time.Duration(m.random.IntN(4))*time.Second, d)
		return
	}
	ack(m.T, d)
	m.acked[d.Message.Position.Offset] = true
}

func (m *model) lost(s *Source, n int) {
	out := m.out[s]
	if n != len(out) {
		m.Fatalf("%d deliveries were lost, want %d", n, len(out))
	}
	delete(m.out, s)
	for _, d := range out {
		if d.Context().Err() == nil {
			m.Fatalf("the context of a lost delivery goes on")
		}
	}
}

func (m *model) check() {
	stats, out := m.q.Stats(), 0
	for _, deliveries := range m.out {
		out += len(deliveries)
		for _, d := range deliveries {
			if d.Context().Err() != nil {
				m.Fatalf("the context of a delivery ended that is out")
			}
		}
	}
	if stats.InFlight != out || stats.Ready != stats.Published-out-len(m.acked) {
		m.Fatalf("stats are %+v, want %d in flight and %d acked in this pass", stats, out, len(m.acked))
	}
}

// finish acks everything; nothing may be stuck.
func (m *model) finish() {
	for _, s := range m.sources {
		m.lost(s, s.Revoke())
	}
	for len(m.acked) < m.q.Stats().Published {
		deliveries := receive(m.T, m.sources[0])
		for _, d := range deliveries {
			m.acked[d.Message.Position.Offset] = true
		}
		ack(m.T, deliveries...)
	}
	if err := m.q.Drained(m.Context()); err != nil {
		m.Error(err)
	}
	if q := m.q; len(q.lanes) > 0 || q.ready.len() > 0 || q.delayed.len() > 0 {
		m.Errorf("a drained queue keeps %d lanes, %d ready, %d delayed", len(q.lanes), q.ready.len(), q.delayed.len())
	}
}

// All methods at once, for the race detector.
func TestConcurrentUse(t *testing.T) {
	t.Parallel()
	const n = 400
	q := New("orders", nil)
	var all sync.WaitGroup
	stop := make(chan struct{})
	for range 3 {
		s := q.Source()
		all.Go(func() {
			for {
				deliveries, err := s.Receive(t.Context(), 7)
				if err != nil {
					is(t, err, broker.ErrClosed)
					return
				}
				for _, d := range deliveries {
					all.Go(func() {
						if d.Message.Position.Offset%5 == 0 && d.Attempt == 1 {
							_ = d.Nack(t.Context(), time.Millisecond) // may be lost
							return
						}
						_ = d.Ack(t.Context()) // may be lost
					})
				}
			}
		})
		all.Go(func() {
			<-stop
			is(t, s.Close(t.Context()), nil)
		})
		all.Go(func() {
			for range 20 {
				s.Revoke()
				q.Stats()
			}
		})
	}
	for i := range n {
		q.Publish(&broker.Message{Key: fmt.Appendf(nil, "%d", i%10)})
		if i == n/2 {
			q.Rewind()
		}
	}
	if err := q.Drained(t.Context()); err != nil {
		t.Error(err)
	}
	close(stop)
	all.Wait()
	if got := q.Stats(); got.Ready != 0 || got.InFlight != 0 || got.Acked < n {
		t.Errorf("stats are %+v, want all of %d acked", got, n)
	}
}
