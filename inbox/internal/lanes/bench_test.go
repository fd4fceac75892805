package lanes_test

import (
	"fmt"
	"testing"

	"github.com/ackafter/ackafter/inbox/internal/lanes"
)

// The cost of a message must not grow with the length of its lane.
func BenchmarkLongLane(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 40_000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				q := lanes.New(1, lanes.Limits{}, never)
				for range n {
					q.Put("a", "x", 1)
				}
				for k := 0; k < n; {
					items := q.Take(b.Context(), 1)
					k += len(items)
					q.Finish(items)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/message")
		})
	}
}
