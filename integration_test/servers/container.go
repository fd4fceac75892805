package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
	"github.com/testcontainers/testcontainers-go/wait"
)

// containerTimeout bounds the start of a container, the pull of its image
// included.
const containerTimeout = 5 * time.Minute

// kafkaImage is the version that the native script runs too.
const kafkaImage = "apache/kafka:4.4.0"

var (
	runningMu sync.Mutex
	// running are the containers that this process started.
	running []testcontainers.Container
)

// daemonHost asks once whether a Docker daemon answers, and returns the host
// that its published ports are on.
var daemonHost = sync.OnceValues(func() (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	provider, err := testcontainers.NewDockerProvider()
	if err != nil {
		return "", fmt.Errorf("%w: no Docker daemon answers: %w", ErrUnavailable, err)
	}
	host, err := provider.DaemonHost(ctx)
	if err == nil {
		err = provider.Health(ctx) // closes the provider
	}
	if err != nil {
		return "", fmt.Errorf("%w: no Docker daemon answers: %w", ErrUnavailable, err)
	}
	return host, nil
})

// startPostgres starts PostgreSQL with the settings of the native script.
func startPostgres(image string, durable bool) starter {
	return func() (string, error) {
		if _, err := daemonHost(); err != nil {
			return "", err
		}
		safety := "off"
		if durable {
			safety = "on"
		}
		ctx, cancel := context.WithTimeout(context.Background(), containerTimeout)
		defer cancel()
		started, err := postgres.Run(ctx, image, postgres.BasicWaitStrategies(),
			testcontainers.WithCmd("postgres",
				"-c", "fsync="+safety, "-c", "synchronous_commit="+safety, "-c", "full_page_writes="+safety,
				"-c", "wal_level=logical", "-c", "max_connections=300", "-c", "max_prepared_transactions=50"))
		if started != nil {
			keep(started)
		}
		if err != nil {
			return "", fmt.Errorf("start %s: %w", image, err)
		}
		return started.ConnectionString(ctx, "sslmode=disable")
	}
}

// startKafka starts one broker. A broker tells its clients the address to use,
// so the published port must be known before the start: a free one is chosen
// here.
func startKafka() (string, error) {
	host, err := daemonHost()
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), containerTimeout)
	defer cancel()
	port, err := freePort(ctx)
	if err != nil {
		return "", err
	}
	address := net.JoinHostPort(host, port)
	started, err := testcontainers.Run(ctx, kafkaImage,
		testcontainers.WithExposedPorts("9092/tcp"),
		testcontainers.WithHostConfigModifier(func(config *container.HostConfig) {
			config.PortBindings = network.PortMap{
				network.MustParsePort("9092/tcp"): {{HostPort: port}},
			}
		}),
		testcontainers.WithEnv(kafkaSettings(address)),
		testcontainers.WithWaitStrategy(wait.ForLog("Kafka Server started").WithStartupTimeout(containerTimeout)))
	if started != nil {
		keep(started)
	}
	if err != nil {
		return "", fmt.Errorf("start %s: %w", kafkaImage, err)
	}
	return address, nil
}

// kafkaSettings are those of the native script. Once one of them is given, the
// image takes none of its defaults.
func kafkaSettings(address string) map[string]string {
	return map[string]string{
		"KAFKA_NODE_ID":                                          "1",
		"KAFKA_PROCESS_ROLES":                                    "broker,controller",
		"KAFKA_CONTROLLER_QUORUM_VOTERS":                         "1@localhost:9093",
		"KAFKA_LISTENERS":                                        "PLAINTEXT://:9092,CONTROLLER://:9093",
		"KAFKA_ADVERTISED_LISTENERS":                             "PLAINTEXT://" + address,
		"KAFKA_CONTROLLER_LISTENER_NAMES":                        "CONTROLLER",
		"KAFKA_INTER_BROKER_LISTENER_NAME":                       "PLAINTEXT",
		"KAFKA_LISTENER_SECURITY_PROTOCOL_MAP":                   "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
		"KAFKA_NUM_PARTITIONS":                                   "3",
		"KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR":                 "1",
		"KAFKA_OFFSETS_TOPIC_NUM_PARTITIONS":                     "1",
		"KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR":         "1",
		"KAFKA_TRANSACTION_STATE_LOG_MIN_ISR":                    "1",
		"KAFKA_TRANSACTION_STATE_LOG_NUM_PARTITIONS":             "1",
		"KAFKA_SHARE_COORDINATOR_STATE_TOPIC_REPLICATION_FACTOR": "1",
		"KAFKA_SHARE_COORDINATOR_STATE_TOPIC_MIN_ISR":            "1",
		"KAFKA_SHARE_COORDINATOR_STATE_TOPIC_NUM_PARTITIONS":     "1",
		"KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS":                 "0",
		"KAFKA_GROUP_MIN_SESSION_TIMEOUT_MS":                     "500",
		"KAFKA_LOG_INITIAL_TASK_DELAY_MS":                        "1000",
		"KAFKA_LOG_RETENTION_CHECK_INTERVAL_MS":                  "1000",
		"KAFKA_LOG_CLEANER_BACKOFF_MS":                           "500",
	}
}

// freePort returns a port that was free a moment ago.
func freePort(ctx context.Context) (string, error) {
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	_, port, err := net.SplitHostPort(listener.Addr().String())
	if err := errors.Join(err, listener.Close()); err != nil {
		return "", fmt.Errorf("find a free port: %w", err)
	}
	return port, nil
}

func keep(started testcontainers.Container) {
	runningMu.Lock()
	defer runningMu.Unlock()
	running = append(running, started)
}

// Containers starts every server that has a container and whose environment
// variable is not set, and returns the variables as "NAME=address". It is for a
// program that runs tests which read the variables by themselves. [Stop] ends
// the containers, after an error too.
func Containers() ([]string, error) {
	var environment []string
	for _, s := range all {
		if s.container == nil || os.Getenv(s.variable) != "" {
			continue
		}
		address, err := s.container()
		if err != nil {
			return nil, fmt.Errorf("servers: %s: %w", s.name, err)
		}
		environment = append(environment, s.variable+"="+address)
	}
	return environment, nil
}

// Stop ends the containers that this process started; TestMain calls it after
// the tests. Without it testcontainers' reaper does so some seconds after the
// end of the process, unless it is turned off. Servers from the scripts of
// integration_test/services go on.
func Stop() error {
	runningMu.Lock()
	defer runningMu.Unlock()
	var problems []error
	for _, started := range running {
		if err := testcontainers.TerminateContainer(started); err != nil {
			problems = append(problems, fmt.Errorf("servers: stop a container: %w", err))
		}
	}
	running = nil
	return errors.Join(problems...)
}
