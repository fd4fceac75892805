package servers

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// databaseTimeout bounds the making and the dropping of a database.
const databaseTimeout = 30 * time.Second

// freshDatabase makes a database for this test and returns its URL.
func freshDatabase(t tb, s *server) string {
	t.Helper()
	base, err := parseBase(s.variable, find(t, s))
	if err != nil {
		t.Fatalf("servers: %v", err)
		return ""
	}
	name := uniqueName(t.Name())
	ctx, cancel := context.WithTimeout(t.Context(), databaseTimeout)
	defer cancel()
	if err := execute(ctx, base, "create database "+name); err != nil {
		t.Fatalf("servers: %s: %v", s.variable, err)
		return ""
	}
	t.Cleanup(func() {
		// The test's own context has ended by now.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), databaseTimeout)
		defer cancel()
		// It fails when the test left a prepared transaction or a replication
		// slot behind, which would trouble the tests after it.
		if err := execute(ctx, base, "drop database if exists "+name+" with (force)"); err != nil {
			t.Errorf("servers: %s: %v", s.variable, err)
		}
	})
	fresh := *base
	fresh.Path = "/" + name
	return fresh.String()
}

// parseBase checks the address of a PostgreSQL server.
func parseBase(variable, address string) (*url.URL, error) {
	base, err := url.Parse(address)
	if err != nil || (base.Scheme != "postgres" && base.Scheme != "postgresql") || base.Host == "" {
		// The address may hold a password: it is not shown.
		return nil, fmt.Errorf("%s: must be a URL postgres://user:password@host:port/database", variable)
	}
	return base, nil
}

// execute runs one statement on a connection of its own, in the simple protocol,
// which works through any pooler.
func execute(ctx context.Context, base *url.URL, statement string) error {
	config, err := pgx.ParseConfig(base.String())
	if err != nil {
		return fmt.Errorf("parse the URL: %w", err)
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
	config.StatementCacheCapacity = 0
	config.DescriptionCacheCapacity = 0
	connection, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = connection.Close(context.WithoutCancel(ctx)) }()
	if _, err := connection.Exec(ctx, statement); err != nil {
		return fmt.Errorf("%s: %w", statement, err)
	}
	return nil
}

var notInName = regexp.MustCompile(`[^a-z0-9]+`)

// uniqueName makes a name from the test's, so that a database or a topic which
// survived a killed test binary tells whose it was.
func uniqueName(test string) string {
	const longest = 40
	name := strings.Trim(notInName.ReplaceAllString(strings.ToLower(test), "_"), "_")
	if len(name) > longest {
		name = name[:longest]
	}
	var random [6]byte
	_, _ = rand.Read(random[:]) // never fails since Go 1.24
	return "t_" + name + "_" + hex.EncodeToString(random[:])
}
