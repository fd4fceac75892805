package brokertest_test

import (
	"context"
	"testing"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/brokertest"
	"github.com/ackafter/ackafter/broker/memory"
)

// The test of an adapter, here of the in-process broker. It has no output of
// its own: go test shows the rules as subtests.
func ExampleRun() {
	TestSource := func(t *testing.T) {
		brokertest.Run(t, brokertest.Harness{
			Setup: func(testing.TB) brokertest.Queue {
				q := memory.New("orders", nil)
				return brokertest.Queue{
					Open: func(context.Context) (broker.Source, error) { return q.Source(), nil },
					Publish: func(_ context.Context, messages ...*broker.Message) error {
						q.Publish(messages...)
						return nil
					},
				}
			},
			Without: []brokertest.Feature{brokertest.Lose, brokertest.Recall, brokertest.Crash, brokertest.Cut, brokertest.Committed},
		})
	}
	_ = TestSource
}
