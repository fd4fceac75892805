package memory

// indexed is an element that remembers where it is in its heap, or was in the
// last one; which of the two, the heap finds out by looking there.
type indexed interface {
	comparable
	setIndex(int)
	getIndex() int
}

// heap is a binary heap from which any element can be removed.
type heap[E indexed] struct {
	less     func(a, b E) bool
	elements []E
}

func newHeap[E indexed](less func(a, b E) bool) heap[E] { return heap[E]{less: less} }

func (h *heap[E]) len() int { return len(h.elements) }

// top returns the least element; the heap must not be empty.
func (h *heap[E]) top() E { return h.elements[0] }

func (h *heap[E]) push(e E) {
	h.elements = append(h.elements, e)
	h.up(h.set(len(h.elements)-1, e))
}

// remove takes e out, and does nothing when e is not in this heap.
func (h *heap[E]) remove(e E) {
	i := e.getIndex()
	if i >= len(h.elements) || h.elements[i] != e {
		return
	}
	last := len(h.elements) - 1
	moved := h.elements[last]
	var none E
	h.elements[last] = none
	h.elements = h.elements[:last]
	if i == last {
		return
	}
	h.set(i, moved)
	h.down(h.up(i))
}

func (h *heap[E]) clear() {
	clear(h.elements)
	h.elements = h.elements[:0]
}

func (h *heap[E]) set(i int, e E) int {
	h.elements[i] = e
	e.setIndex(i)
	return i
}

func (h *heap[E]) swap(i, j int) {
	a, b := h.elements[i], h.elements[j]
	h.set(i, b)
	h.set(j, a)
}

func (h *heap[E]) up(i int) int {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(h.elements[i], h.elements[parent]) {
			break
		}
		h.swap(i, parent)
		i = parent
	}
	return i
}

func (h *heap[E]) down(i int) {
	for {
		least := i
		for child := 2*i + 1; child <= 2*i+2 && child < len(h.elements); child++ {
			if h.less(h.elements[child], h.elements[least]) {
				least = child
			}
		}
		if least == i {
			return
		}
		h.swap(i, least)
		i = least
	}
}
