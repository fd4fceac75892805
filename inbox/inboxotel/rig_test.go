package inboxotel_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	_ "modernc.org/sqlite"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/inboxotel"
	"github.com/ackafter/ackafter/inbox/inboxsql"
	"github.com/ackafter/ackafter/migrations"
)

// rig is a Telemetry whose exports stay in memory.
type rig struct {
	*inboxotel.Telemetry
	reader *sdkmetric.ManualReader
	spans  *tracetest.InMemoryExporter
	tracer *sdktrace.TracerProvider
}

func newRig(t testing.TB, cfg inboxotel.Config) *rig {
	t.Helper()
	r := &rig{reader: sdkmetric.NewManualReader(), spans: tracetest.NewInMemoryExporter()}
	r.tracer = sdktrace.NewTracerProvider(sdktrace.WithSyncer(r.spans))
	cfg.MeterProvider, cfg.TracerProvider = sdkmetric.NewMeterProvider(sdkmetric.WithReader(r.reader)), r.tracer
	var err error
	if r.Telemetry, err = inboxotel.New(&cfg); err != nil {
		t.Fatal(err)
	}
	return r
}

// collect returns every series as "name{labels}" with its value: the sum, the last
// value, or the count of a histogram.
func (r *rig) collect(t testing.TB) (series map[string]float64, units map[string]string) {
	t.Helper()
	var data metricdata.ResourceMetrics
	if err := r.reader.Collect(t.Context(), &data); err != nil {
		t.Fatal(err)
	}
	series, units = map[string]float64{}, map[string]string{}
	for _, s := range data.ScopeMetrics {
		for _, m := range s.Metrics {
			units[m.Name] = m.Unit
			add := func(set attribute.Set, v float64) { series[m.Name+"{"+labelText(set)+"}"] = v }
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				for _, p := range d.DataPoints {
					add(p.Attributes, float64(p.Value))
				}
			case metricdata.Sum[float64]:
				for _, p := range d.DataPoints {
					add(p.Attributes, p.Value)
				}
			case metricdata.Gauge[int64]:
				for _, p := range d.DataPoints {
					add(p.Attributes, float64(p.Value))
				}
			case metricdata.Gauge[float64]:
				for _, p := range d.DataPoints {
					add(p.Attributes, p.Value)
				}
			case metricdata.Histogram[int64]:
				for _, p := range d.DataPoints {
					add(p.Attributes, float64(p.Count))
				}
			case metricdata.Histogram[float64]:
				for _, p := range d.DataPoints {
					add(p.Attributes, float64(p.Count))
				}
			default:
				t.Errorf("%s is a %T", m.Name, m.Data)
			}
		}
	}
	return series, units
}

func labelText(set attribute.Set) string {
	var parts []string
	for _, kv := range set.ToSlice() {
		name := strings.TrimPrefix(strings.TrimPrefix(string(kv.Key), "ackafter."), "messaging.")
		parts = append(parts, name+"="+kv.Value.String())
	}
	slices.Sort(parts)
	return strings.Join(parts, ",")
}

// want checks series by name; the others of these names must not be there.
func (r *rig) want(t testing.TB, name string, want map[string]float64) {
	t.Helper()
	got, _ := r.collect(t)
	have := map[string]float64{}
	for s, v := range got {
		if labels, ok := strings.CutPrefix(s, name+"{"); ok {
			have[strings.TrimSuffix(labels, "}")] = v
		}
	}
	for labels, v := range want {
		if got, ok := have[labels]; !ok || got != v {
			t.Errorf("%s{%s} is %v (there: %v), want %v", name, labels, got, ok, v)
		}
		delete(have, labels)
	}
	for labels, v := range have {
		t.Errorf("%s{%s} is %v, want no such series", name, labels, v)
	}
}

// attributes returns attributes as text, sorted.
func attributes(attrs []attribute.KeyValue) string { return labelText(attribute.NewSet(attrs...)) }

// openStore opens an SQLite inbox.
func openStore(dir string) (*sql.DB, *inboxsql.Store, error) {
	db, err := sql.Open("sqlite", inboxsql.SQLiteDSN(filepath.Join(dir, "inbox.db")))
	if err != nil {
		return nil, nil, err
	}
	files, err := fs.Glob(migrations.SQLite(), "*.up.sql")
	if err != nil {
		return nil, nil, err
	}
	for _, file := range files {
		tables, err := fs.ReadFile(migrations.SQLite(), file)
		if err != nil {
			return nil, nil, err
		}
		if _, err := db.ExecContext(context.Background(), string(tables)); err != nil {
			return nil, nil, fmt.Errorf("%s: %w", file, err)
		}
	}
	store, err := inboxsql.New(db)
	return db, store, err
}

// fixed is a consumer of which the health is known.
type fixed inbox.Health

func (f fixed) Health() inbox.Health { return inbox.Health(f) }
