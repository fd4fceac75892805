package brokertest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
)

// sabotage is a broken adapter and the rules that must catch it, by number.
type sabotage struct {
	name    string
	catches []string
	says    string // a regular expression for what each of them reports
	fault   func() fault
}

func always(f fault) func() fault { return func() fault { return f } }

var receiveSabotages = []sabotage{
	{"ignores the limit", []string{"01"}, `Receive\(limit 3\) returned 4 deliveries`, always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			return s.next(ctx, limit+1)
		},
	})},
	{"returns nothing instead of waiting", []string{"02", "10"}, "returned 0 deliveries", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			short, cancel := context.WithTimeout(ctx, time.Millisecond)
			defer cancel()
			deliveries, err := s.next(short, limit)
			if err != nil && ctx.Err() == nil && short.Err() != nil {
				return nil, nil
			}
			return deliveries, err
		},
	})},
	{"looks once and then sleeps", []string{"02"}, "while Receive was waiting", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			if s.Stats().Ready == 0 {
				<-ctx.Done()
			}
			return s.next(ctx, limit)
		},
	})},
	{"waits until the limit is full", []string{"03"}, "with one message there", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			var all []*broker.Delivery
			for len(all) < limit {
				deliveries, err := s.next(ctx, limit-len(all))
				if err != nil {
					return nil, err
				}
				all = append(all, deliveries...)
			}
			return all, nil
		},
	})},
	{"ignores the ctx of Receive", []string{"04", "10"}, "whose ctx has ended, has not returned", func() fault {
		return fault{receive: func(_ context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			go func() {
				select {
				case <-s.end:
					cancel()
				case <-ctx.Done():
				}
			}()
			return s.next(ctx, limit)
		}}
	}},
	{"returns an error of its own when ctx ends", []string{"04"}, "want context canceled", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			if ctx.Err() != nil {
				return nil, errBroken
			}
			return deliveries, err
		},
	})},
	{"drops what came while ctx ended", []string{"05"}, "were lost by a Receive", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			pause(context.WithoutCancel(ctx), 150*time.Microsecond)
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
			return deliveries, err
		},
	})},
	{"returns deliveries together with an error", []string{"05"}, "together with the error", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			pause(context.WithoutCancel(ctx), 150*time.Microsecond)
			if err == nil {
				err = ctx.Err()
			}
			return deliveries, err
		},
	})},
	{"delivers twice", []string{"06"}, `received \[m0\], want nothing`, always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			if out := s.out(); len(out) > 3 {
				return []*broker.Delivery{s.wrap(out[0])}, nil
			}
			return s.next(ctx, limit)
		},
	})},
	{"starts at the end", []string{"07"}, `got only \[\]`, always(fault{
		opened: func(q *faultyQueue) {
			s := q.Source()
			defer func() { _ = s.Close(context.Background()) }() // never fails
			for q.Stats().Ready > 0 {
				deliveries, _ := s.Receive(context.Background(), 100) // cannot fail: there is something
				for _, d := range deliveries {
					_ = d.Ack(context.Background()) // as above
				}
			}
		},
	})},
	{"returns nil deliveries", []string{"01"}, "a delivery that is nil", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			if err == nil {
				deliveries[0] = nil
			}
			return deliveries, err
		},
	})},
	{"hands over settled deliveries", []string{"01"}, "settled already", always(fault{
		deliver: func(d *broker.Delivery) { _ = d.Nack(context.Background(), time.Hour) }, // cannot fail: it is new
	})},
}

var settleSabotages = []sabotage{
	{"forgets acks", []string{"10", "19", "34"}, `received .* want`, always(fault{
		ack: func(context.Context, *faultySource, *broker.Delivery) error { return nil },
	})},
	{"delivers acked messages again", []string{"10", "20"}, `want nothing: all messages are acked`, always(fault{
		ack: func(ctx context.Context, _ *faultySource, inner *broker.Delivery) error { return inner.Nack(ctx, 0) },
	})},
	{"loses nacked messages", []string{"11", "41"}, "never came|got only", always(fault{
		nack: func(ctx context.Context, s *faultySource, inner *broker.Delivery, _ time.Duration) error {
			return s.rightAck(ctx, inner)
		},
	})},
	{"ignores the delay of a nack", []string{"12", "44"}, `not before`, always(fault{
		nack: func(ctx context.Context, _ *faultySource, inner *broker.Delivery, _ time.Duration) error {
			return inner.Nack(ctx, 0)
		},
	})},
	{"sleeps in Receive until a delay is over", []string{"12"}, `want the order \[m1 m0\]`, func() fault {
		var until atomic.Int64
		return fault{
			nack: func(ctx context.Context, _ *faultySource, inner *broker.Delivery, delay time.Duration) error {
				until.Store(time.Now().Add(delay).UnixNano())
				return inner.Nack(ctx, delay)
			},
			receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
				pause(ctx, time.Until(time.Unix(0, until.Load())))
				return s.next(ctx, limit)
			},
		}
	}},
	{"a second ack hits another message", []string{"13"}, `already settled`, always(fault{
		refused: func(s *faultySource, err error) {
			if errors.Is(err, broker.ErrSettled) {
				s.ackAll()
			}
		},
	})},
	{"ends the context with the ack", []string{"14"}, "want it to go on", func() fault {
		var mu sync.Mutex
		var cancels []context.CancelFunc
		return fault{
			context: func(ctx context.Context) context.Context {
				mu.Lock()
				defer mu.Unlock()
				ctx, cancel := context.WithCancel(ctx)
				cancels = append(cancels, cancel)
				return ctx
			},
			ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
				mu.Lock()
				defer mu.Unlock()
				for _, cancel := range cancels {
					cancel()
				}
				return s.rightAck(ctx, inner)
			},
		}
	}},
	{"acks all up to the message", []string{"15", "16"}, "never came", always(fault{
		ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
			for _, d := range s.out() {
				if d.Message.Position.Offset < inner.Message.Position.Offset {
					_ = s.rightAck(ctx, d) // cannot fail: it is out
				}
			}
			if inner.Settled() {
				return nil
			}
			return s.rightAck(ctx, inner)
		},
	})},
	{"holds acks back until the earlier ones are there", []string{"17"}, `want exactly \[m0 m1 m3\]`, always(fault{
		ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
			s.mu.Lock()
			s.buffered = append(s.buffered, inner)
			buffered := slices.Clone(s.buffered)
			s.mu.Unlock()
			for {
				out := s.out()
				i := slices.IndexFunc(buffered, func(d *broker.Delivery) bool { return len(out) > 0 && d == out[0] })
				if i < 0 {
					return nil
				}
				if err := s.rightAck(ctx, buffered[i]); err != nil && !errors.Is(err, broker.ErrSettled) {
					return err // another goroutine may have acked it just now
				}
			}
		},
	})},
	{"commits the highest offset", []string{"18"}, "want at most", always(fault{
		committed: func(q *faultyQueue) int64 {
			highest := int64(0)
			for offset := range q.acked {
				highest = max(highest, offset+1)
			}
			return highest
		},
	})},
	{"commits in the order of the acks", []string{"18"}, "went back", func() fault {
		var last atomic.Int64
		return fault{
			ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
				last.Store(inner.Message.Position.Offset + 1)
				return s.rightAck(ctx, inner)
			},
			committed: func(*faultyQueue) int64 { return last.Load() },
		}
	}},
	{"does not commit the last ones", []string{"18"}, "all is acked and the source is closed", always(fault{
		committed: func(q *faultyQueue) int64 { return min(q.contiguous(), 3) },
	})},
	{"fails when two ack at once", []string{"19"}, "multiple Read calls", func() fault {
		var busy sync.Mutex
		return fault{ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
			if !busy.TryLock() {
				return io.ErrNoProgress
			}
			defer busy.Unlock()
			pause(ctx, time.Millisecond)
			return s.rightAck(ctx, inner)
		}}
	}},
	{"fails every ack", []string{"10", "60", "62"}, "connection refused", always(fault{
		ack: func(context.Context, *faultySource, *broker.Delivery) error { return errBroken },
	})},
	{"hangs in Ack", []string{"10"}, "Ack, whose ctx has ended, has not returned", always(fault{
		ack: func(_ context.Context, s *faultySource, _ *broker.Delivery) error {
			<-s.end
			return nil
		},
	})},
}

var loseSabotages = []sabotage{
	{"lost messages do not come again", []string{"20", "43"}, "got only", always(fault{
		lose: func(s *faultySource) { s.ackAll(); s.inner.Revoke() },
		context: func(context.Context) context.Context {
			ctx, cancel := context.WithCancel(context.Background())
			cancel()
			return ctx
		},
	})},
	{"contexts of lost deliveries go on", []string{"20", "21"}, "its context did not end", always(fault{
		context: context.WithoutCancel,
	})},
	{"a late ack removes another message", []string{"21"}, "never came", always(fault{
		refused: func(s *faultySource, err error) {
			if errors.Is(err, broker.ErrLost) {
				s.ackAll()
			}
		},
	})},
	{"a late ack takes the deliveries away again", []string{"21"}, "touched by the late ack", always(fault{
		refused: func(s *faultySource, err error) {
			if errors.Is(err, broker.ErrLost) {
				s.inner.Revoke()
			}
		},
	})},
	{"never asks for a delivery", []string{"25"}, "Recall is nil", always(fault{
		deliver: func(d *broker.Delivery) { d.Recall = nil },
	})},
	{"asks for every delivery at once", []string{"25"}, "Recall is nil or closed", always(fault{
		deliver: func(d *broker.Delivery) {
			recall := make(chan struct{})
			close(recall)
			d.Recall = recall
		},
	})},
	{"says nothing when it wants deliveries back", []string{"25"}, "was not closed within", always(fault{
		recall: func(*faultySource) {},
	})},
	{"takes deliveries away before it asks", []string{"25"}, "want it closed before", always(fault{
		recall: func(s *faultySource) { s.inner.Recall(); s.inner.Revoke() },
	})},
	{"forgets what was given back to it", []string{"25"}, "never came", always(fault{
		nack: func(ctx context.Context, s *faultySource, inner *broker.Delivery, _ time.Duration) error {
			return inner.Ack(ctx)
		},
	})},
	{"acks on receipt", []string{"22", "35"}, `got only \[\]`, always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			s.ackAll()
			return deliveries, err
		},
		ack: func(context.Context, *faultySource, *broker.Delivery) error { return nil },
	})},
	{"loses what it has when nobody calls it", []string{"23"}, "was lost", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			time.AfterFunc(2*time.Second, func() { s.inner.Revoke() })
			return deliveries, err
		},
	})},
	{"gives up when the broker cannot be reached", []string{"24"}, "connection refused", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			if s.isDown() != nil {
				return nil, errBroken
			}
			return s.next(ctx, limit)
		},
	})},
	{"loses what it has when the broker cannot be reached", []string{"24", "37"}, "never came", always(fault{
		cut: func(q *faultyQueue) {
			for _, s := range q.sources {
				s.ackAll()
			}
		},
	})},
}

var closeSabotages = []sabotage{
	{"returns an error of its own after Close", []string{"30", "31"}, "want source is closed", always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			if err != nil && ctx.Err() == nil {
				return nil, io.EOF
			}
			return deliveries, err
		},
	})},
	{"leaves a running Receive waiting", []string{"31"}, "has not returned", always(fault{
		close: func(_ context.Context, s *faultySource) error { s.inner.Revoke(); return nil },
	})},
	{"fails at the second Close", []string{"32"}, "connection refused", always(fault{
		close: func(ctx context.Context, s *faultySource) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			if s.closed {
				return errBroken
			}
			s.closed = true
			return s.inner.Close(ctx)
		},
	})},
	{"waits in Close for the unsettled", []string{"33", "35", "37"}, "Close, whose ctx has ended, has not returned", always(fault{
		close: func(ctx context.Context, s *faultySource) error {
			for len(s.out()) > 0 {
				select {
				case <-s.end:
					return nil
				case <-time.After(100 * time.Millisecond):
				}
			}
			return s.inner.Close(ctx)
		},
	})},
	{"forgets buffered acks in Close", []string{"34"}, `want exactly \[m7 m8 m9\]`, always(fault{
		ack: func(ctx context.Context, s *faultySource, inner *broker.Delivery) error {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.buffered = append(s.buffered, inner)
			if len(s.buffered) < 3 {
				return nil
			}
			for _, d := range s.buffered {
				if err := s.rightAck(ctx, d); err != nil {
					return err
				}
			}
			s.buffered = nil
			return nil
		},
	})},
	{"keeps the unsettled in Close", []string{"35", "62"}, `the delivery's context goes on|never came`, always(fault{
		close: func(context.Context, *faultySource) error { return nil },
	})},
	{"acks the unsettled in Close", []string{"35", "42", "62"}, "got only|never came", always(fault{
		close: func(ctx context.Context, s *faultySource) error { s.ackAll(); return s.inner.Close(ctx) },
	})},
	{"leaves a goroutine behind", []string{"36"}, "leaveBehind", always(fault{
		close: func(ctx context.Context, s *faultySource) error { go leaveBehind(s.end); return s.inner.Close(ctx) },
	})},
	{"complains while it works", []string{"38"}, "of a source that works", always(fault{
		health: func(err error) error { return errors.Join(errBroken, err) },
	})},
	{"is well after Close", []string{"38"}, "Health after Close", always(fault{
		health: func(error) error { return nil },
	})},
}

func leaveBehind(end <-chan struct{}) { <-end }

// shuffle acks what is out and publishes it again in the reverse order.
func shuffle(s *faultySource) {
	out := s.out()
	slices.Reverse(out)
	for _, d := range out {
		_ = d.Ack(context.Background()) // cannot fail: it is out
		s.Publish(d.Message)
	}
}

var laneSabotages = []sabotage{
	{"returns a lane backwards", []string{"40", "42"}, `came as|want the order`, always(fault{
		receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			slices.Reverse(deliveries)
			return deliveries, err
		},
	})},
	{"has no lanes", []string{"40"}, "has no lane", always(fault{config: &memory.Config{Lane: memory.Unordered}})},
	{"gives every delivery its own lane", []string{"40"}, "want one", always(fault{
		deliver: func(d *broker.Delivery) { d.Lane = d.Message.ID },
	})},
	{"puts nacked messages at the end", []string{"41"}, "want the order", always(fault{
		nack: func(ctx context.Context, s *faultySource, inner *broker.Delivery, _ time.Duration) error {
			err := inner.Ack(ctx)
			s.Publish(inner.Message)
			return err
		},
	})},
	{"gives back in the wrong order in Close", []string{"42"}, "want the order", always(fault{
		close: func(ctx context.Context, s *faultySource) error { shuffle(s); return s.inner.Close(ctx) },
	})},
	{"gives lost messages back in the wrong order", []string{"43"}, "want the order", always(fault{
		lose: func(s *faultySource) {
			out := s.out()
			s.inner.Revoke()
			again, _ := s.inner.Receive(context.Background(), len(out)) // cannot fail: they are there
			slices.Reverse(again)
			for _, d := range again {
				_ = d.Ack(context.Background()) // cannot fail: it is out
				s.Publish(d.Message)
			}
		},
	})},
	{"goes on behind recalled messages", []string{"45"}, `received \[m2\], want nothing`, always(fault{
		config:  &memory.Config{Lane: memory.Unordered},
		deliver: func(d *broker.Delivery) { d.Lane = string(d.Message.Key) },
	})},
	{"goes on behind a delayed message", []string{"44"}, "want the order", always(fault{
		config:  &memory.Config{Lane: memory.Unordered},
		deliver: func(d *broker.Delivery) { d.Lane = string(d.Message.Key) },
	})},
}

// broken changes messages on their way to the consumer.
func broken(change func(m *broker.Message)) func() fault {
	return always(fault{message: func(_ *faultySource, m *broker.Message) { change(m) }})
}

var messageSabotages = []sabotage{
	{"takes a body for text", []string{"50"}, "came as", broken(func(m *broker.Message) {
		if len(m.Body) > 0 {
			m.Body = bytes.ToValidUTF8(m.Body, []byte("?"))
		}
	})},
	{"cuts long bodies", []string{"50"}, "came as", broken(func(m *broker.Message) { m.Body = m.Body[:min(len(m.Body), 1000)] })},
	{"makes a nil body empty", []string{"51"}, "a nil body", broken(func(m *broker.Message) { m.Body = append([]byte{}, m.Body...) })},
	{"makes an empty body nil", []string{"51"}, "an empty body", broken(func(m *broker.Message) { m.Body = append([]byte(nil), m.Body...) })},
	{"takes a key for text", []string{"52"}, "came as", broken(func(m *broker.Message) { m.Key = bytes.ToValidUTF8(m.Key, []byte("?")) })},
	{"makes a nil key empty", []string{"53"}, "a nil key", broken(func(m *broker.Message) { m.Key = append([]byte{}, m.Key...) })},
	{"makes an empty key nil", []string{"53"}, "an empty key", broken(func(m *broker.Message) { m.Key = append([]byte(nil), m.Key...) })},
	{"drops headers", []string{"54"}, "did not come through", broken(func(m *broker.Message) { m.Headers = nil })},
	{"takes headers for text", []string{"54"}, "came as", broken(func(m *broker.Message) {
		headers := slices.Clone(m.Headers)
		for i := range headers {
			headers[i].Value = bytes.ToValidUTF8(headers[i].Value, []byte("?"))
		}
		m.Headers = headers
	})},
	{"keeps one header of a name", []string{"55"}, "repeated header", broken(func(m *broker.Message) {
		seen := make(map[string]bool)
		m.Headers = slices.DeleteFunc(slices.Clone(m.Headers), func(h broker.Header) bool {
			again := seen[h.Name]
			seen[h.Name] = true
			return again
		})
	})},
	{"takes the time of receipt", []string{"56"}, "came as", broken(func(m *broker.Message) { m.Time = time.Now() })},
	{"has no positions", []string{"57"}, "want both", broken(func(m *broker.Message) { m.Position = broker.Position{} })},
	{"has one position for all", []string{"57"}, "growing position", broken(func(m *broker.Message) { m.Position = broker.At(0) })},
	{"has a new position when it comes again", []string{"57"}, "came again at", func() fault {
		var n atomic.Int64
		return fault{message: func(_ *faultySource, m *broker.Message) { m.Position = broker.At(n.Add(1)) }}
	}},
	{"does not count attempts", []string{"58"}, "has the attempt 0", always(fault{deliver: func(d *broker.Delivery) { d.Attempt = 0 }})},
	{"counts from 0", []string{"58"}, "has the attempt 0", always(fault{deliver: func(d *broker.Delivery) { d.Attempt-- }})},
	{"uses its buffers again", []string{"59"}, "changed after it was handed over", always(fault{
		message: func(s *faultySource, m *broker.Message) {
			s.scratch = append(s.scratch[:0], m.Body...)
			m.Body = s.scratch
		},
	})},
}

var competeSabotages = []sabotage{
	{"gives every source all messages", []string{"60"}, "was acked and came again", func() fault {
		return fault{receive: func(ctx context.Context, s *faultySource, limit int) ([]*broker.Delivery, error) {
			deliveries, err := s.next(ctx, limit)
			if err == nil && deliveries[0].Attempt == 1 {
				for _, d := range deliveries {
					s.Publish(&broker.Message{Key: d.Message.Key, Body: d.Message.Body})
				}
			}
			return deliveries, err
		}}
	}},
	{"gives a lane to two sources", []string{"61"}, "is with two sources at once", always(fault{
		config:  &memory.Config{Lane: memory.Unordered},
		deliver: func(d *broker.Delivery) { d.Lane = string(d.Message.Key) },
	})},
}
