package servers

import (
	"strings"
	"testing"
)

// The environment variables that name a server.
const (
	// EnvPostgres is the URL of a PostgreSQL 15 server that need not survive a
	// crash: "postgres://user:password@host:port/database". The user must be
	// allowed to create databases.
	EnvPostgres = "ACKAFTER_TEST_POSTGRES"
	// EnvPostgres18 is the same for PostgreSQL 18.
	EnvPostgres18 = "ACKAFTER_TEST_POSTGRES18"
	// EnvPostgresDurable is the same for a PostgreSQL 15 server with fsync,
	// synchronous_commit and full_page_writes on.
	EnvPostgresDurable = "ACKAFTER_TEST_POSTGRES_DURABLE"
	// EnvPgBouncer is the URL of a PgBouncer in transaction mode that reaches
	// every database of its PostgreSQL server.
	EnvPgBouncer = "ACKAFTER_TEST_PGBOUNCER"
	// EnvKafka is a list of Kafka brokers, "host:port,host:port".
	EnvKafka = "ACKAFTER_TEST_KAFKA"
	// EnvKafkaSecure is the URL of a Kafka broker with TLS, SASL and permissions:
	// "kafka://user:password@host:port?ca=FILE". The user must be a super user that
	// logs in by PLAIN; FILE holds the certificate of the authority.
	EnvKafkaSecure = "ACKAFTER_TEST_KAFKA_SECURE"
	// EnvRequire, set to 1, turns the skipping of a test into its failure.
	EnvRequire = "ACKAFTER_TEST_REQUIRE"
)

// server is one server that tests ask for. The start functions run at most once
// in a process.
type server struct {
	// name is that of its script in integration_test/services.
	name string
	// variable is the environment variable with its address.
	variable string
	// container starts it in a container; nil when there is no image for it.
	container starter
	// native starts it through its script.
	native starter
}

var (
	postgres15      = newServer("pg15", EnvPostgres, startPostgres("postgres:15", false))
	postgres18      = newServer("pg18", EnvPostgres18, startPostgres("postgres:18", false))
	postgresDurable = newServer("pgdurable", EnvPostgresDurable, startPostgres("postgres:15", true))
	postgresStandby = newServer("pgstandby", "ACKAFTER_TEST_POSTGRES_STANDBY", nil)
	pgBouncer       = newServer("pgbouncer", EnvPgBouncer, nil)
	kafka           = newServer("kafka", EnvKafka, startKafka)
	kafkaSecure     = newServer("kafkasecure", EnvKafkaSecure, nil)

	all = []*server{postgres15, postgres18, postgresDurable, pgBouncer, kafka, kafkaSecure}
)

func newServer(name, variable string, container starter) *server {
	s := &server{name: name, variable: variable, native: once(startNative(name, variable))}
	if container != nil {
		s.container = once(container)
	}
	return s
}

// Postgres returns the URL of a new, empty database on PostgreSQL 15, dropped at
// the end of the test with whoever is still connected. The server is fast rather
// than safe: a crash of it may lose what was committed.
func Postgres(t testing.TB) string {
	t.Helper()
	return freshDatabase(t, postgres15)
}

// Postgres18 is [Postgres] on PostgreSQL 18.
func Postgres18(t testing.TB) string {
	t.Helper()
	return freshDatabase(t, postgres18)
}

// PostgresDurable is [Postgres] on a server with fsync, synchronous_commit and
// full_page_writes on: for crash tests and for measuring.
func PostgresDurable(t testing.TB) string {
	t.Helper()
	return freshDatabase(t, postgresDurable)
}

// PgBouncer is [Postgres] through a PgBouncer in transaction mode: no state of a
// session, prepared statements included, survives a transaction. It is up to the
// test to choose a query mode that works there, such as
// default_query_exec_mode=exec.
func PgBouncer(t testing.TB) string {
	t.Helper()
	return freshDatabase(t, pgBouncer)
}

// Kafka returns the addresses of the brokers of a Kafka cluster that other tests
// use too: topics and groups need names of their own, see [Name]. Unknown topics
// are made on first use, with three partitions.
func Kafka(t testing.TB) []string {
	t.Helper()
	brokers := strings.Split(find(t, kafka), ",")
	for i, address := range brokers {
		brokers[i] = strings.TrimSpace(address)
		checkReachable(t, EnvKafka, brokers[i])
	}
	return brokers
}

// Name returns a name for a topic, a group or a schema that no other test and no
// other run uses: letters, digits and underscores, at most 63 bytes, the test's
// own name in it. Every call returns another one.
func Name(t testing.TB) string { return uniqueName(t.Name()) }
