package ackafter_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
)

const module = "github.com/ackafter/ackafter"

// A boundary says what some packages of this module may reach, directly or
// through others. Packages are given below the module: "inbox", or "inbox/..."
// for it and all below.
type boundary struct {
	of   []string // whom it binds
	only []string // the packages of this module that they may reach, besides each other
	why  string
}

// boundaries hold the rule broker <- keyfunc <- inbox <- stores, and
// broker <- adapters. cmd and examples are bound by none: they are where
// everything meets.
var boundaries = []boundary{
	{
		of: []string{"broker/..."}, only: nil,
		why: "the seam: what it needs, every adapter and every user needs",
	},
	{
		of: []string{"keyfunc/..."}, only: []string{"broker"},
		why: "a key is made of a message and of nothing else",
	},
	{
		of:   testHarnesses,
		only: []string{"broker/...", "keyfunc", "inbox/...", "migrations"},
		why:  "what only tests import still knows no broker's client",
	},
	{
		of: []string{"inbox", "inbox/internal/..."}, only: []string{"broker", "keyfunc"},
		why: "the loop drives any source into any store and knows none of them",
	},
	{
		of: []string{"inbox/inboxtest/..."}, only: []string{"broker/...", "keyfunc", "inbox", "inbox/internal/..."},
		why: "who tests a store or a handler chooses the database",
	},
	{
		of: []string{"inbox/inboxpgx/..."}, only: []string{"broker", "keyfunc", "inbox", "inbox/internal/...", "migrations"},
		why: "one store does not bring another one, nor a broker",
	},
	{
		of: []string{"inbox/inboxsql/..."}, only: []string{"broker", "keyfunc", "inbox", "inbox/internal/...", "migrations"},
		why: "one store does not bring another one, nor a broker",
	},
	{
		of: []string{"inbox/inboxotel/..."}, only: []string{"broker", "keyfunc", "inbox", "inbox/internal/..."},
		why: "what reports about any consumer knows no store and no broker's client",
	},
	{
		of: []string{"migrations/..."}, only: nil,
		why: "plain SQL for any tool",
	},
	{
		of: []string{"internal/..."}, only: nil,
		why: "what adapters have in common knows no broker",
	},
	{
		of: []string{"kafka/..."}, only: []string{"broker", "internal/..."},
		why: "adapters and inbox meet only in the user's main, and adapters never",
	},
	{
		of: []string{"rabbitmq/..."}, only: []string{"broker", "internal/..."},
		why: "adapters and inbox meet only in the user's main, and adapters never",
	},
	{
		of: []string{"sqs/..."}, only: []string{"broker", "internal/..."},
		why: "adapters and inbox meet only in the user's main, and adapters never",
	},
}

// A license says which packages of this module may link packages of others. A
// package of another module that none names may be linked by nobody but cmd and
// examples.
type license struct {
	foreign []string // path prefixes
	to      []string
	why     string
}

var licenses = []license{
	{
		foreign: []string{"github.com/segmentio/kafka-go", "github.com/klauspost/compress", "github.com/pierrec/lz4", "github.com/xdg-go"},
		to:      []string{"kafka/..."},
		why:     "the Kafka client and what it needs",
	},
	{
		foreign: []string{"github.com/rabbitmq/amqp091-go"},
		to:      []string{"rabbitmq/..."},
		why:     "the RabbitMQ client",
	},
	{
		foreign: []string{"github.com/aws/aws-sdk-go-v2", "github.com/aws/smithy-go"},
		to:      []string{"sqs/..."},
		why:     "the SQS client and what it needs",
	},
	{
		foreign: []string{"github.com/jackc/"},
		to:      append([]string{"inbox/inboxpgx/..."}, testHarnesses...),
		why:     "the PostgreSQL driver and what it needs; inboxsql leaves the driver to the user",
	},
	{
		foreign: []string{"go.opentelemetry.io/otel/sdk", "go.opentelemetry.io/otel/exporters"},
		to:      unbound,
		why:     "what becomes of metrics and spans is the program's choice",
	},
	{
		foreign: []string{"go.opentelemetry.io/", "github.com/go-logr/", "github.com/cespare/xxhash"},
		to:      []string{"inbox/inboxotel/..."},
		why:     "the API of OpenTelemetry and what it needs; who does not use it links none of it",
	},
	{
		foreign: []string{"golang.org/x/text", "golang.org/x/sync"},
		to:      append([]string{"kafka/...", "inbox/inboxpgx/..."}, testHarnesses...),
		why:     "needed by both clients",
	},
}

// unbound packages may link everything.
var unbound = []string{"cmd/...", "examples/..."}

// testKits are made for tests and may link package testing; a program that
// links it carries its flags.
var testKits = append([]string{"broker/brokertest/...", "inbox/inboxtest/..."}, testHarnesses...)

// testHarnesses are packages that only tests of this module import.
var testHarnesses = []string{"inbox/internal/cutproxy", "inbox/internal/parkrace", "inbox/internal/pgtest", "inbox/internal/pgxharness"}

// mustExist are packages without which the boundaries above guard nothing.
var mustExist = []string{"broker", "broker/memory", "broker/brokertest", "keyfunc", "inbox", "inbox/inboxpgx", "inbox/inboxsql", "inbox/inboxtest", "inbox/inboxotel", "kafka", "rabbitmq", "sqs", "internal/retry", "internal/lanename", "migrations"}

// dependencies maps every package to all that it links, itself excluded.
type dependencies map[string][]string

func TestDependencyRule(t *testing.T) {
	t.Parallel()
	graph := listDependencies(t)
	for _, name := range mustExist {
		if _, ok := graph[module+"/"+name]; !ok {
			t.Errorf("package %s does not exist: its boundary guards nothing", name)
		}
	}
	for _, violation := range violations(graph) {
		t.Error(violation)
	}
}

// The check itself: one graph that is fine, and one broken link for each rule.
func TestDependencyRuleNoticesViolations(t *testing.T) {
	t.Parallel()
	fine := dependencies{
		"broker":               {"context", "fmt"},
		"broker/memory":        {module + "/broker", "sync"},
		"broker/brokertest":    {module + "/broker", "testing"},
		"keyfunc":              {module + "/broker", "encoding/json"},
		"inbox/internal/lanes": {module + "/broker"},
		"inbox":                {module + "/broker", module + "/keyfunc", module + "/inbox/internal/lanes"},
		"inbox/inboxtest":      {module + "/broker/memory", module + "/inbox", "testing"},
		"inbox/inboxpgx":       {module + "/inbox", "github.com/jackc/pgx/v5", "golang.org/x/sync/semaphore"},
		"inbox/inboxsql":       {module + "/inbox", module + "/migrations", "database/sql"},
		"kafka":                {module + "/broker", module + "/kafka/internal/wire", "github.com/segmentio/kafka-go/protocol"},
		"rabbitmq":             {module + "/broker", "github.com/rabbitmq/amqp091-go"},
		"sqs":                  {module + "/broker", "github.com/aws/aws-sdk-go-v2/service/sqs", "github.com/aws/smithy-go"},
		"inbox/inboxotel":      {module + "/inbox", "go.opentelemetry.io/otel/metric", "go.opentelemetry.io/auto/sdk", "github.com/go-logr/logr"},
		"migrations":           {"embed"},
		"cmd/ackafter":         {module + "/kafka", module + "/inbox/inboxpgx", "github.com/spf13/cobra"},
		"examples/quickstart":  {module + "/inbox", module + "/broker/memory", "modernc.org/sqlite"},
	}
	for name := range maps.Clone(fine) {
		fine[module+"/"+name] = fine[name]
		delete(fine, name)
	}
	if got := violations(fine); len(got) > 0 {
		t.Errorf("violations in a graph without one: %q", got)
	}
	for _, row := range []struct{ from, to, reason string }{
		{"broker", module + "/inbox", "the seam"},
		{"broker/memory", "github.com/segmentio/kafka-go", "the Kafka client"},
		{"broker", "testing", "its flags"},
		{"keyfunc", module + "/inbox", "made of a message"},
		{"keyfunc", module + "/broker/memory", "made of a message"},
		{"inbox", module + "/kafka", "knows none of them"},
		{"inbox", module + "/inbox/inboxpgx", "knows none of them"},
		{"inbox", "github.com/jackc/pgx/v5", "the PostgreSQL driver"},
		{"inbox", "golang.org/x/sync/errgroup", "needed by both clients"},
		{"inbox/internal/lanes", "github.com/sourcegraph/conc", "no license"},
		{"inbox", "go.opentelemetry.io/otel/trace", "links none of it"},
		{"inbox/inboxpgx", module + "/inbox/inboxotel", "one store"},
		{"inbox/inboxotel", "go.opentelemetry.io/otel/sdk/metric", "the program's choice"},
		{"inbox/inboxotel", module + "/inbox/inboxpgx", "knows no store"},
		{"inbox/inboxotel", module + "/kafka", "knows no store and no broker's client"},
		{"kafka", "go.opentelemetry.io/otel", "links none of it"},
		{"inbox/inboxtest", module + "/inbox/inboxsql", "chooses the database"},
		{"inbox/inboxpgx", module + "/inbox/inboxsql", "one store"},
		{"inbox/inboxsql", "github.com/jackc/pgx/v5/pgconn", "leaves the driver"},
		{"inbox/inboxsql", "modernc.org/sqlite", "no license"},
		{"inbox/inboxpgx", module + "/inbox/internal/pgtest", "made for tests"},
		{"kafka", module + "/inbox", "never"},
		{"kafka", module + "/rabbitmq", "never"},
		{"kafka", "github.com/rabbitmq/amqp091-go", "the RabbitMQ client"},
		{"rabbitmq", "github.com/segmentio/kafka-go", "the Kafka client"},
		{"sqs", module + "/kafka", "never"},
		{"kafka", "github.com/aws/aws-sdk-go-v2/aws", "the SQS client"},
		{"migrations", "github.com/pressly/goose/v3", "no license"},
		{"webhook", module + "/inbox", "no boundary"},
	} {
		broken := maps.Clone(fine)
		from := module + "/" + row.from
		broken[from] = append(slices.Clone(broken[from]), row.to)
		got := violations(broken)
		if len(got) != 1 || !strings.Contains(got[0], row.from) || !strings.Contains(got[0], row.to) || !strings.Contains(got[0], row.reason) {
			t.Errorf("%s -> %s: violations %q, want one that names both and %q", row.from, row.to, got, row.reason)
		}
	}
}

// violations returns every link that breaks a boundary, a license or the rule
// on test kits, with the reason, in order.
func violations(graph dependencies) []string {
	var found []string
	for from, links := range graph {
		name, ours := strings.CutPrefix(from, module+"/")
		if !ours || within(name, unbound) {
			continue
		}
		i := slices.IndexFunc(boundaries, func(b boundary) bool { return within(name, b.of) })
		if i < 0 {
			found = append(found, fmt.Sprintf("%s -> %s: no boundary names %s: give it one", name, strings.Join(links, ", "), name))
			continue
		}
		for _, to := range links {
			if why := forbidden(name, to, boundaries[i]); why != "" {
				found = append(found, fmt.Sprintf("%s -> %s: %s", name, to, why))
			}
		}
	}
	slices.Sort(found)
	return found
}

// forbidden returns why the package called name must not link to, or "".
func forbidden(name, to string, bound boundary) string {
	if target, ours := strings.CutPrefix(to, module+"/"); ours {
		if within(target, testHarnesses) && !within(name, testHarnesses) {
			return "made for tests, only they may import it"
		}
		if within(target, bound.of) || within(target, bound.only) {
			return ""
		}
		return bound.why
	}
	if to == "testing" && !within(name, testKits) {
		return "package testing brings its flags into the user's program"
	}
	if first, _, _ := strings.Cut(to, "/"); !strings.Contains(first, ".") {
		return "" // the standard library
	}
	for _, l := range licenses {
		if slices.ContainsFunc(l.foreign, func(prefix string) bool { return strings.HasPrefix(to, prefix) }) {
			if within(name, l.to) {
				return ""
			}
			return fmt.Sprintf("only for %s: %s", strings.Join(l.to, ", "), l.why)
		}
	}
	return "no license names this dependency"
}

// within says whether one of the patterns matches the name.
func within(name string, patterns []string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		root, below := strings.CutSuffix(pattern, "/...")
		return name == root || below && strings.HasPrefix(name, root+"/")
	})
}

// listDependencies asks the go command, which knows build constraints, what
// every package of this module links; tests are left out.
func listDependencies(t *testing.T) dependencies {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "go", "list", "-json=ImportPath,Deps", "./...")
	var messages strings.Builder
	command.Stderr = &messages
	out, err := command.Output()
	if err != nil {
		t.Fatalf("go list: %v: %s", err, messages.String())
	}
	graph := dependencies{}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var listed struct {
			ImportPath string
			Deps       []string
		}
		if err := decoder.Decode(&listed); errors.Is(err, io.EOF) {
			return graph
		} else if err != nil {
			t.Fatalf("go list: %v", err)
		}
		graph[listed.ImportPath] = slices.DeleteFunc(listed.Deps, vendored)
	}
}

// vendored tells the copies that the standard library keeps of other packages.
func vendored(path string) bool { return strings.HasPrefix(path, "vendor/") }
