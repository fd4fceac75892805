package servers_test

import (
	"context"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	amqp "github.com/rabbitmq/amqp091-go"
	"github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/integration_test/servers"
)

func connect(t *testing.T, dsn string) *pgx.Conn {
	t.Helper()
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeExec // works through a pooler too
	connection, err := pgx.ConnectConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Second)
		defer cancel()
		_ = connection.Close(ctx) // may have been ended by the server
	})
	return connection
}

func ask(t *testing.T, connection *pgx.Conn, query string) string {
	t.Helper()
	var answer string
	if err := connection.QueryRow(t.Context(), query).Scan(&answer); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return answer
}

func TestPostgresServers(t *testing.T) {
	t.Parallel()
	const settings = `select concat_ws(' ', current_setting('fsync'), current_setting('synchronous_commit'),
		current_setting('full_page_writes'), current_setting('wal_level'))`
	for _, row := range []struct {
		name     string
		get      func(testing.TB) string
		version  string
		settings string
	}{
		{"15", servers.Postgres, "15", "off off off logical"},
		{"18", servers.Postgres18, "18", "off off off logical"},
		{"durable", servers.PostgresDurable, "15", "on on on logical"},
		{"pgbouncer", servers.PgBouncer, "15", "off off off logical"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			first := connect(t, row.get(t))
			second := connect(t, row.get(t))
			if got := ask(t, first, "select current_setting('server_version')"); !strings.HasPrefix(got, row.version+".") {
				t.Errorf("version %s, want %s", got, row.version)
			}
			if got := ask(t, first, settings); got != row.settings {
				t.Errorf("settings %q, want %q", got, row.settings)
			}
			one, two := ask(t, first, "select current_database()"), ask(t, second, "select current_database()")
			if one == two || one == "postgres" {
				t.Errorf("databases %s and %s, want two new ones", one, two)
			}
			if got := ask(t, first, "select count(*)::text from pg_stat_user_tables"); got != "0" {
				t.Errorf("%s tables in a new database, want none", got)
			}
		})
	}
}

// A database goes with its test, also while somebody is still connected.
func TestPostgresIsDroppedAfterTheTest(t *testing.T) {
	t.Parallel()
	observer := connect(t, servers.Postgres(t))
	var name string
	t.Run("user", func(t *testing.T) { // must be over before the check below
		config, err := pgx.ParseConfig(servers.Postgres(t))
		if err != nil {
			t.Fatal(err)
		}
		name = config.Database
		if got := ask(t, observer, "select count(*)::text from pg_database where datname = '"+name+"'"); got != "1" {
			t.Errorf("%s databases %s during the test, want 1", got, name)
		}
		connect(t, config.ConnString())
	})
	if got := ask(t, observer, "select count(*)::text from pg_database where datname = '"+name+"'"); got != "0" {
		t.Errorf("%s databases %s after the test, want none", got, name)
	}
}

// In transaction mode the server's session belongs to nobody in particular: two
// clients that take turns meet the same one.
func TestPgBouncerSharesSessions(t *testing.T) {
	t.Parallel()
	dsn := servers.PgBouncer(t)
	first, second := connect(t, dsn), connect(t, dsn)
	one := ask(t, first, "select pg_backend_pid()::text")
	two := ask(t, second, "select pg_backend_pid()::text")
	if one != two {
		t.Errorf("two idle clients use the sessions %s and %s, want one", one, two)
	}
}

func TestKafkaTakesAndGives(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	brokers := servers.Kafka(t)
	client := &kafka.Client{Addr: kafka.TCP(brokers...)}
	topic := servers.Name(t)
	created, err := client.CreateTopics(ctx, &kafka.CreateTopicsRequest{
		Topics: []kafka.TopicConfig{{Topic: topic, NumPartitions: 1, ReplicationFactor: 1}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := created.Errors[topic]; err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 10*time.Second)
		defer cancel()
		if _, err := client.DeleteTopics(ctx, &kafka.DeleteTopicsRequest{Topics: []string{topic}}); err != nil {
			t.Errorf("delete the topic: %v", err)
		}
	})
	writer := &kafka.Writer{Addr: kafka.TCP(brokers...), Topic: topic, BatchSize: 1, RequiredAcks: kafka.RequireAll}
	defer func() { _ = writer.Close() }()
	if err := writer.WriteMessages(ctx, kafka.Message{Value: []byte("hello")}); err != nil {
		t.Fatal(err)
	}
	reader := kafka.NewReader(kafka.ReaderConfig{Brokers: brokers, Topic: topic, MaxWait: 100 * time.Millisecond})
	defer func() { _ = reader.Close() }()
	message, err := reader.ReadMessage(ctx)
	if err != nil || string(message.Value) != "hello" {
		t.Errorf("read %q, %v", message.Value, err)
	}
}

func TestRabbitMQTakesAndGives(t *testing.T) {
	t.Parallel()
	server := servers.RabbitMQ(t)
	connection, err := amqp.DialConfig(server.URL, amqp.Config{Dial: amqp.DefaultDial(10 * time.Second)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = connection.Close() }()
	channel, err := connection.Channel()
	if err != nil {
		t.Fatal(err)
	}
	queue, err := channel.QueueDeclare(servers.Name(t), false, true, true, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := channel.PublishWithContext(t.Context(), "", queue.Name, false, false, amqp.Publishing{Body: []byte("hello")}); err != nil {
		t.Fatal(err)
	}
	messages, err := channel.Consume(queue.Name, "", true, true, false, false, nil)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case message := <-messages:
		if string(message.Body) != "hello" {
			t.Errorf("received %q", message.Body)
		}
	case <-time.After(time.Minute):
		t.Error("nothing was received")
	}
	if server.Management == "" {
		t.Errorf("no management API: set %s", servers.EnvRabbitMQManagement)
		return
	}
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.Management+"/api/overview", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: time.Minute}
	answer, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("management API: %s", answer.Status)
	}
}

func TestSQSAnswers(t *testing.T) {
	t.Parallel()
	address := servers.SQS(t)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, address+"/?Action=ListQueues", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: time.Minute}
	answer, err := client.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusOK {
		t.Errorf("ListQueues: %s", answer.Status)
	}
}
