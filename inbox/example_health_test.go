package inbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// One handler answers both probes of an orchestrator, by the path.
func ExampleHealthHandler() {
	_, store, remove := openShop()
	defer remove()
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(context.Context, *sql.Tx, *inbox.Message) error { return nil }, quiet)
	if err != nil {
		fmt.Println(err)
		return
	}
	probes := http.NewServeMux()
	probes.Handle("/livez", inbox.HealthHandler(nil, consumer))
	probes.Handle("/readyz", inbox.HealthHandler(nil, consumer))
	ask := func(target string) {
		w := httptest.NewRecorder()
		probes.ServeHTTP(w, httptest.NewRequestWithContext(context.Background(), http.MethodGet, target, nil))
		var answer struct{ Problems []string }
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
			fmt.Println(err)
		}
		fmt.Println(target, w.Code, answer.Problems)
	}

	ask("/livez")
	ask("/readyz")

	queue := memory.New("orders", nil)
	queue.Publish(&broker.Message{Body: []byte(`{"orderId":"A1"}`)})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- consumer.Run(ctx, queue.Source()) }()
	if err := queue.Drained(ctx); err != nil {
		fmt.Println(err)
	}
	ask("/readyz")

	stop()
	<-done
	ask("/livez")
	ask("/readyz")
	// Output:
	// /livez 200 [billing: it is idle]
	// /readyz 503 [billing: it is idle]
	// /readyz 200 []
	// /livez 200 [billing: it is stopped]
	// /readyz 503 [billing: it is stopped]
}

func ExampleConsumer_Health() {
	_, store, remove := openShop()
	defer remove()
	var consumer *inbox.Consumer[*sql.Tx]
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(context.Context, *sql.Tx, *inbox.Message) error {
			for _, r := range consumer.Health().Handlers { // A look from inside, for this example.
				fmt.Println("running:", r.MessageKey, "attempt", r.Attempt, "stuck:", r.Stuck)
			}
			return nil
		}, quiet)
	if err != nil {
		fmt.Println(err)
		return
	}
	if _, err := consumer.Process(context.Background(), &broker.Message{Body: []byte(`{"orderId":"A1"}`)}); err != nil {
		fmt.Println(err)
	}
	h := consumer.Health()
	fmt.Println("running now:", len(h.Handlers), "- a success:", !h.LastSuccess.IsZero(), "- an error:", !h.LastError.IsZero())
	// Output:
	// running: A1 attempt 1 stuck: false
	// running now: 0 - a success: true - an error: false
}
