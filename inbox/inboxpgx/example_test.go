package inboxpgx_test

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxpgx"
	"github.com/ackafter/ackafter/keyfunc"
)

// A consumer whose handlers get a pgx.Tx: its type follows from the store and
// the handler. Nothing connects before the consumer is used; here the database
// is not there, which is an error that the store does not blame on the message.
func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://shop@127.0.0.1:1/shop?sslmode=disable")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()

	store, err := inboxpgx.New(pool)
	if err != nil {
		fmt.Println(err)
		return
	}
	consumer, err := inbox.New(store, "billing",
		keyfunc.JSON("orderId", "eventType"),
		func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
			_, err := tx.Exec(ctx, `insert into charges (order_key, body) values ($1, $2)`, m.MessageKey, m.Body)
			return err
		}, nil)
	if err != nil {
		fmt.Println(err)
		return
	}

	_, err = consumer.Process(ctx, &broker.Message{Body: []byte(`{"orderId": "A1", "eventType": "order.paid"}`)})
	fmt.Println("unavailable:", store.Classify(err) == inbox.ClassUnavailable)
	// Output: unavailable: true
}

// Tables in a schema of their own, and an isolation level.
func ExampleNewWithConfig() {
	pool, err := pgxpool.New(context.Background(), "postgres://shop@127.0.0.1:1/shop")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()

	_, err = inboxpgx.NewWithConfig(pool, &inboxpgx.Config{Schema: "messaging", Isolation: pgx.Serializable})
	fmt.Println(err)
	_, err = inboxpgx.NewWithConfig(pool, &inboxpgx.Config{Isolation: "snapshot"})
	fmt.Println(err)
	// Output:
	// <nil>
	// inboxpgx: config: Isolation = "snapshot": is none of pgx's isolation levels
}

// Taking a key inside a transaction of one's own: without a loop, without a
// broker. The key is taken if and only if the transaction commits.
func ExampleStore_Claim() {
	charge := func(ctx context.Context, pool *pgxpool.Pool, store *inboxpgx.Store, order string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			claim, err := store.Claim(ctx, tx, "billing", order+"/order.paid")
			if err != nil || !claim.Claimed() {
				return err // Handled before: there is nothing to do.
			}
			_, err = tx.Exec(ctx, `insert into charges (order_id) values ($1)`, order)
			return err
		})
	}

	// A key that cannot be trusted is refused before the database is asked.
	pool, err := pgxpool.New(context.Background(), "postgres://shop@127.0.0.1:1/shop?sslmode=disable")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pool.Close()
	store, err := inboxpgx.New(pool)
	if err != nil {
		fmt.Println(err)
		return
	}
	_, err = store.Claim(context.Background(), pgx.Tx(nil), "billing", " ")
	fmt.Println(err)
	_ = charge
	// Output: inboxpgx: claim: inbox: message key: keyfunc: key: is blank
}
