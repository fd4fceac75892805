package keyfunc

import "sync"

// pool is a sync.Pool of one type. fresh makes an item where there is none.
type pool[T any] struct {
	items sync.Pool
	fresh func() T
}

func (p *pool[T]) get() T {
	if item, ok := p.items.Get().(T); ok {
		return item
	}
	return p.fresh()
}

func (p *pool[T]) put(item T) { p.items.Put(item) }
