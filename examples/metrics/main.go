// Command metrics is a consumer with everything that an operator looks at: metrics
// for Prometheus, and probes for an orchestrator. It needs no server: the orders
// come from a queue in memory, some of them twice and some that cannot be handled,
// and the inbox is an SQLite file that is removed at the end.
//
//	cd examples/metrics && go run .
//	curl localhost:2112/metrics | grep ackafter_
//	curl localhost:2112/readyz
//
// The names are listed in docs/telemetry.md; Prometheus sees underscores where
// OpenTelemetry has dots, and the unit at the end.
package main

import (
	"context"
	"database/sql"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	otelprometheus "go.opentelemetry.io/otel/exporters/prometheus"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/broker/memory"
	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxotel"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/keyfunc"
	"github.com/ackafter/ackafter/migrations"
)

// order is the body of a message.
type order struct {
	OrderID string `json:"orderId"`
	Amount  int    `json:"amount"`
}

// charge is the work.
func charge(ctx context.Context, tx *sql.Tx, _ *inbox.Message, o order) error {
	if o.Amount < 0 {
		return inbox.Permanent(errors.New("the amount is negative"))
	}
	_, err := tx.ExecContext(ctx, "insert into charges (order_id, amount) values (?, ?)", o.OrderID, o.Amount)
	return err
}

func main() {
	listen := flag.String("listen", "localhost:2112", "address for /metrics, /livez and /readyz")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *listen); err != nil {
		slog.Error("metrics ended", slog.Any("error", err)) //nolint:sloglint // It is the program's logger.
		os.Exit(1)
	}
}

func run(ctx context.Context, listen string) error {
	dir, err := os.MkdirTemp("", "ackafter-metrics-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	s, err := newShop(ctx, filepath.Join(dir, "shop.db"))
	if err != nil {
		return err
	}
	defer s.close(ctx)

	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: s.endpoints, ReadHeaderTimeout: 5 * time.Second}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	fmt.Printf("metrics on http://%s/metrics, probes on /livez and /readyz\n", listener.Addr())

	var producer sync.WaitGroup
	selling, stop := context.WithCancel(ctx)
	defer stop()
	producer.Go(func() { s.sell(selling) })
	err = s.consumer.Run(ctx, s.queue.Source())
	stop()
	producer.Wait()

	// The probes answer until here, so that the stop can be seen.
	down, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	err = errors.Join(err, server.Shutdown(down))
	if e := <-served; !errors.Is(e, http.ErrServerClosed) {
		err = errors.Join(err, e)
	}
	return err
}

// shop is the program.
type shop struct {
	db        *sql.DB
	queue     *memory.Queue
	consumer  *inbox.Consumer[*sql.Tx]
	endpoints http.Handler
	provider  *sdkmetric.MeterProvider
}

func newShop(ctx context.Context, file string) (*shop, error) {
	s := &shop{queue: memory.New("orders", nil)}
	var err error
	if s.db, err = sql.Open("sqlite", inboxsql.SQLiteDSN(file)); err != nil {
		return nil, err
	}
	if err := s.start(ctx); err != nil {
		s.close(ctx)
		return nil, err
	}
	return s, nil
}

func (s *shop) start(ctx context.Context) error {
	if err := makeTables(ctx, s.db); err != nil {
		return err
	}
	// A registry of its own: the global one would do as well.
	registry := prometheus.NewRegistry()
	exporter, err := otelprometheus.New(otelprometheus.WithRegisterer(registry))
	if err != nil {
		return err
	}
	s.provider = sdkmetric.NewMeterProvider(sdkmetric.WithReader(exporter))
	telemetry, err := inboxotel.New(&inboxotel.Config{MeterProvider: s.provider})
	if err != nil {
		return err
	}

	store, err := inboxsql.New(s.db) //nolint:contextcheck // It asks the driver, not the database.
	if err != nil {
		return err
	}
	s.consumer, err = inbox.New(store, "billing", keyfunc.JSON("orderId"), inbox.JSON(charge), &inbox.Config{
		Hooks:  []inbox.Hook{telemetry},
		Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn})),
	})
	if err != nil {
		return err
	}
	// They end with the provider.
	if _, err := telemetry.Watch(s.consumer); err != nil {
		return err
	}
	if _, err := telemetry.WatchParked("billing", inboxotel.CountParked(store, "billing")); err != nil {
		return err
	}

	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{Timeout: 10 * time.Second}))
	mux.Handle("/livez", s.consumer.HealthHandler())
	mux.Handle("/readyz", s.consumer.HealthHandler())
	s.endpoints = mux
	return nil
}

func (s *shop) close(ctx context.Context) {
	if s.provider != nil {
		_ = s.provider.Shutdown(context.WithoutCancel(ctx)) // There is nothing to send.
	}
	_ = s.db.Close()
}

// sell publishes ten orders a second: every third is delivered twice, every
// twentieth cannot be handled.
func (s *shop) sell(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for n := 1; ; n++ {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		s.publish(n)
		if n%3 == 0 {
			s.publish(n)
		}
	}
}

func (s *shop) publish(n int) {
	amount := 100 * n
	if n%20 == 0 {
		amount = -amount
	}
	id := fmt.Sprintf("order-%d", n)
	s.queue.Publish(&broker.Message{Key: []byte(id), Body: fmt.Appendf(nil, `{"orderId":%q,"amount":%d}`, id, amount)})
}

// makeTables makes the inbox's tables and the shop's own.
func makeTables(ctx context.Context, db *sql.DB) error {
	files, err := fs.Glob(migrations.SQLite(), "*.up.sql")
	if err != nil {
		return err
	}
	for _, file := range files {
		statements, err := fs.ReadFile(migrations.SQLite(), file)
		if err != nil {
			return err
		}
		if _, err := db.ExecContext(ctx, string(statements)); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	_, err = db.ExecContext(ctx, "create table charges (order_id text not null, amount integer not null)")
	return err
}
