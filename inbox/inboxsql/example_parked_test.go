package inboxsql_test

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
)

// Seeing to dead letters: what "ackafter dead list --group", "dead retry" and "dead
// discard" do. Every store of this module can do it, see inbox.Undertaker.
func ExampleStore_RetryParked() {
	ctx := context.Background()
	db, remove := orders()
	defer remove()
	store, err := inboxsql.New(db)
	must(err)

	// A consumer with a bug, and three messages that die of it.
	fixed := false
	done := make(outcomes)
	consumer, err := inbox.New(store, "billing", keyfunc.JSON("orderId"),
		func(ctx context.Context, tx *sql.Tx, m *inbox.Message) error {
			if !fixed {
				return inbox.Permanent(fmt.Errorf("order %q: the currency is missing", m.MessageKey))
			}
			_, err := tx.ExecContext(ctx, "insert into charges values ($1, 995)", m.MessageKey)
			return err
		}, &inbox.Config{Hooks: []inbox.Hook{done}, Logger: slog.New(slog.DiscardHandler)})
	must(err)
	queue := memory.New("orders", nil)
	for _, id := range []string{"A-1", "A-2", "A-3"} {
		queue.Publish(&broker.Message{Body: []byte(`{"orderId":"` + id + `"}`)})
	}
	run(consumer, queue.Source(), done, 3)

	groups, err := store.GroupParked(ctx, inbox.ParkedFilter{Consumer: "billing", State: inbox.ParkedDead})
	must(err)
	for _, g := range groups {
		fmt.Println(g.Count, g.Reason)
	}

	// The bug is fixed. A-3 was a test order, and is given up.
	fixed = true
	rows, err := store.ListParked(ctx, inbox.ParkedFilter{Failure: groups[0].Failure})
	must(err)
	var again []int64
	for _, r := range rows {
		if r.MessageKey != "A-3" {
			again = append(again, r.ID)
			continue
		}
		_, err := store.DiscardParked(ctx, []int64{r.ID}, "jo: a test order")
		must(err)
	}
	n, err := store.RetryParked(ctx, again)
	must(err)
	fmt.Println("retried", n)
	run(consumer, queue.Source(), done, n)

	rows, err = store.ListParked(ctx, inbox.ParkedFilter{})
	must(err)
	for _, r := range rows {
		fmt.Println(r.MessageKey, r.State)
	}
	// Output:
	// 3 permanent error
	// retried 2
	// first_attempt
	// first_attempt
	// A-3 discarded
}

// outcomes is a hook that passes on what became of each message.
type outcomes chan inbox.Outcome

func (o outcomes) OnOutcome(_ context.Context, e inbox.OutcomeEvent) { o <- e.Outcome }

// run runs the consumer until n messages are done with.
func run(consumer *inbox.Consumer[*sql.Tx], source broker.Source, done outcomes, n int) {
	ctx, stop := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- consumer.Run(ctx, source) }()
	for range n {
		if outcome := <-done; outcome != inbox.Dead {
			fmt.Println(outcome)
		}
	}
	stop()
	must(<-ended)
}
