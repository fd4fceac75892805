package memory_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/brokertest"
	"github.com/ackafter/ackafter/broker/memory"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	brokertest.Run(t, brokertest.Harness{
		Setup: func(testing.TB) brokertest.Queue {
			q := memory.New("orders", nil)
			return brokertest.Queue{
				Open: func(context.Context) (broker.Source, error) { return q.Source(), nil },
				Publish: func(_ context.Context, messages ...*broker.Message) error {
					q.Publish(messages...)
					return nil
				},
				Lose: func(_ context.Context, source broker.Source) error {
					s, ok := source.(*memory.Source)
					if !ok {
						return fmt.Errorf("got a %T, want what Open returned", source)
					}
					s.Revoke()
					return nil
				},
				Recall: func(_ context.Context, source broker.Source) error {
					s, ok := source.(*memory.Source)
					if !ok {
						return fmt.Errorf("got a %T, want what Open returned", source)
					}
					s.Recall()
					return nil
				},
				Crash: func(ctx context.Context, source broker.Source) error { return source.Close(ctx) },
			}
		},
		Without: []brokertest.Feature{
			brokertest.Cut,       // there is no network
			brokertest.Committed, // a queue commits no offsets
		},
		Timing: brokertest.Timing{
			Wait: 10 * time.Second, Quiet: 20 * time.Millisecond, Delay: 50 * time.Millisecond, Idle: 20 * time.Millisecond,
		},
	})
}
