package memory

import (
	"fmt"
	"testing"

	"github.com/ackafter/ackafter/broker"
)

// The whole life of a message. The cost of one must not depend on how many
// others there are.
func BenchmarkPublishReceiveAck(b *testing.B) {
	for _, lanes := range []int{1, 1000} {
		for _, backlog := range []int{100, 100_000} {
			b.Run(fmt.Sprintf("lanes=%d/backlog=%d", lanes, backlog), func(b *testing.B) {
				q := New("orders", nil)
				keys := make([][]byte, lanes)
				for i := range keys {
					keys[i] = fmt.Appendf(nil, "key-%d", i)
				}
				for i := range backlog {
					q.Publish(&broker.Message{Key: keys[i%lanes]})
				}
				s := q.Source()
				i := 0
				for b.Loop() {
					q.Publish(&broker.Message{Key: keys[i%lanes]})
					i++
					deliveries, err := s.Receive(b.Context(), 1)
					if err != nil {
						b.Fatal(err)
					}
					if err := deliveries[0].Ack(b.Context()); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
