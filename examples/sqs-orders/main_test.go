package main

import (
	"context"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/migrations"
)

// server returns the address of a server from the environment; without it the test is
// skipped, or fails if ACKAFTER_TEST_REQUIRE is 1.
func server(t testing.TB, variable string) string {
	t.Helper()
	address := os.Getenv(variable)
	if address == "" {
		if os.Getenv("ACKAFTER_TEST_REQUIRE") == "1" {
			t.Fatalf("%s is not set", variable)
		}
		t.Skipf("%s is not set", variable)
	}
	return address
}

// shop is a database of its own for one test, and two queues: orders, and where SQS
// moves what was received twice and not acked.
type shop struct {
	*testing.T
	db                 *pgx.Conn
	database           string
	client             *awssqs.Client
	endpoint           string
	orders, dead       string // URLs
	deadARN, ordersARN string
}

func open(t *testing.T) *shop {
	t.Helper()
	s := &shop{T: t, endpoint: server(t, "ACKAFTER_TEST_SQS")}
	s.database = newDatabase(t, server(t, "ACKAFTER_TEST_POSTGRES"))
	s.db = connect(t, s.database)
	t.Setenv("AWS_ACCESS_KEY_ID", "key")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "secret")
	t.Setenv("AWS_REGION", "us-east-1")
	s.client = awssqs.New(awssqs.Options{
		Region: "us-east-1", BaseEndpoint: aws.String(s.endpoint), Credentials: credentials.NewStaticCredentialsProvider("key", "secret", ""),
	})
	s.dead, s.deadARN = s.queue("dead", nil)
	s.orders, s.ordersARN = s.queue("orders", map[string]string{"VisibilityTimeout": "0", "RedrivePolicy": fmt.Sprintf(`{"deadLetterTargetArn":%q,"maxReceiveCount":2}`, s.deadARN)})
	return s
}

func (s *shop) within() context.Context {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.Context()), time.Minute)
	s.Cleanup(cancel)
	return ctx
}

func (s *shop) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// queue makes a queue and returns its URL and its ARN.
func (s *shop) queue(name string, attributes map[string]string) (url, arn string) {
	s.Helper()
	name = fmt.Sprintf("%s-%d", name, time.Now().UnixNano())
	made, err := s.client.CreateQueue(s.within(), &awssqs.CreateQueueInput{QueueName: &name, Attributes: attributes})
	s.must(err)
	s.Cleanup(func() { _, _ = s.client.DeleteQueue(s.within(), &awssqs.DeleteQueueInput{QueueUrl: made.QueueUrl}) })
	return *made.QueueUrl, "arn:aws:sqs:us-east-1:000000000000:" + name
}

func (s *shop) send(order string) {
	s.Helper()
	_, err := s.client.SendMessage(s.within(), &awssqs.SendMessageInput{QueueUrl: &s.orders, MessageBody: aws.String(`{"orderId":"` + order + `","eventType":"paid","amount":1999}`)})
	s.must(err)
}

// left tells how many messages are in a queue and in flight.
func (s *shop) left(url string) string {
	s.Helper()
	answer, err := s.client.GetQueueAttributes(s.within(), &awssqs.GetQueueAttributesInput{QueueUrl: &url, AttributeNames: []types.QueueAttributeName{"All"}})
	s.must(err)
	return answer.Attributes["ApproximateNumberOfMessages"] + " " + answer.Attributes["ApproximateNumberOfMessagesNotVisible"]
}

// until waits for something that happens in other processes.
func (s *shop) until(what string, done func() bool) {
	s.Helper()
	limit := time.After(2 * time.Minute)
	for !done() {
		select {
		case <-limit:
			s.Fatalf("%s: not within two minutes", what)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// booked lists the orders of all rows.
func (s *shop) booked() string {
	s.Helper()
	rows, err := s.db.Query(s.within(), "select order_id from bookings order by order_id")
	s.must(err)
	orders, err := pgx.CollectRows(rows, pgx.RowTo[string])
	s.must(err)
	return strings.Join(orders, " ")
}

// consume runs the command while during runs, and stops it.
func (s *shop) consume(during func()) {
	s.Helper()
	ctx, cancel := context.WithCancel(s.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, []string{"-database", s.database, "-endpoint", s.endpoint, "-queue", s.orders[strings.LastIndexByte(s.orders, '/')+1:]})
	}()
	during()
	cancel()
	s.must(<-ended)
}

// toTheDeadLetters receives what is in the queue until SQS has moved n messages, as a
// consumer does that dies again and again. The queue's own visibility timeout is 0.
func (s *shop) toTheDeadLetters(n int) {
	s.Helper()
	s.until("the messages are dead letters", func() bool {
		_, err := s.client.ReceiveMessage(s.within(), &awssqs.ReceiveMessageInput{QueueUrl: &s.orders, MaxNumberOfMessages: 10})
		s.must(err)
		return s.left(s.dead) == fmt.Sprint(n, " 0")
	})
}

// A message that SQS has moved to the dead letter queue and that comes back from
// there is another one to SQS, with another id. It is the same by its business key:
// what was booked before is not booked again, and what was not is booked once.
//
//nolint:paralleltest // it sets the environment
func TestRedrivenMessages(t *testing.T) {
	s := open(t)
	s.send("A1")
	s.consume(func() {
		s.until("A1 is booked and acked", func() bool { return s.left(s.orders) == "0 0" && s.booked() == "A1" })
	})

	s.send("A1") // As if the ack of the first one had never arrived.
	s.send("A2")
	s.toTheDeadLetters(2)

	if _, err := s.client.StartMessageMoveTask(s.within(), &awssqs.StartMessageMoveTaskInput{SourceArn: &s.deadARN, DestinationArn: &s.ordersARN}); err != nil {
		t.Fatalf("redrive: %v", err)
	}
	s.consume(func() {
		s.until("all is handled", func() bool { return s.left(s.dead) == "0 0" && s.left(s.orders) == "0 0" && s.booked() != "A1" })
	})
	if got := s.booked(); got != "A1 A2" {
		t.Errorf("booked are %q, want A1 and A2 once each", got)
	}

	var first, dead int
	s.must(s.db.QueryRow(s.within(), "select (select count(*) from inbox where status = 'done'), (select count(*) from inbox_parked)").Scan(&first, &dead))
	if first != 2 || dead != 0 {
		t.Errorf("the inbox has %d keys and %d parked messages, want 2 and none", first, dead)
	}
}

// newDatabase makes a database with the inbox's tables, as "ackafter migrate up" does.
func newDatabase(t *testing.T, server string) string {
	t.Helper()
	name := fmt.Sprintf("orders_%d", time.Now().UnixNano())
	admin := connect(t, server)
	if _, err := admin.Exec(t.Context(), "create database "+name); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
		defer cancel()
		if _, err := admin.Exec(ctx, "drop database "+name+" with (force)"); err != nil {
			t.Error(err)
		}
	})
	u, err := url.Parse(server)
	if err != nil {
		t.Fatal(err)
	}
	u.Path = "/" + name
	db := connect(t, u.String())
	files, err := fs.Glob(migrations.Postgres(), "*.up.sql")
	if err != nil || len(files) == 0 {
		t.Fatalf("migrations: %v, %v", files, err)
	}
	for _, f := range files {
		text, err := fs.ReadFile(migrations.Postgres(), f)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := db.Exec(t.Context(), string(text)); err != nil {
			t.Fatalf("%s: %v", f, err)
		}
	}
	return u.String()
}

// connect opens a connection that is closed after the test.
func connect(t *testing.T, address string) *pgx.Conn {
	t.Helper()
	db, err := pgx.Connect(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		_ = db.Close(ctx)
	})
	return db
}
