package rabbitmq

import "sync"

// progress is how far a stream is done, over all channels: a stream's broker keeps
// nothing for who reads by AMQP 0.9.1. Its methods may be called concurrently.
type progress struct {
	mu    sync.Mutex
	next  int64 // all below is done; -1: unknown
	epoch int64
	open  tracker // of the epoch, numbers are offsets + 1
}

func newProgress() *progress { return &progress{next: -1} }

// begin starts an epoch: what was read before and is not done comes again. It
// returns where to read from, -1 if that is not known.
func (p *progress) begin(epoch int64) int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.epoch, p.open = epoch, tracker{}
	return p.next
}

// add takes in what was read. It tells whether it is new: a chunk is read from its
// begin, whatever is asked for.
func (p *progress) add(e *entry) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	offset := e.message.Position.Offset
	if e.epoch != p.epoch || !e.message.Position.Known {
		return true
	}
	if p.next < 0 {
		p.next = offset
	}
	return offset >= p.next && p.open.add(uint64(offset)+1, e) //nolint:gosec // offsets are not negative
}

// done marks what was read.
func (p *progress) done(e *entry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if e.epoch != p.epoch || !e.message.Position.Known {
		return
	}
	p.open.done(uint64(e.message.Position.Offset) + 1) //nolint:gosec // as above
	// upTo is the last offset that is done, plus one: the first that is not.
	p.next = max(p.next, int64(p.open.upTo)) //nolint:gosec // as above
}

// position is the first offset that is not done; -1 if nothing is known.
func (p *progress) position() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.next
}
