package main

import (
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

func TestParseAddress(t *testing.T) {
	t.Parallel()
	for url, label := range map[string]string{
		"postgres://app:pw@db.internal:6543/shop":           `PostgreSQL database "shop" at db.internal:6543`,
		"postgresql://app@db.internal/shop?sslmode=disable": `PostgreSQL database "shop" at db.internal:5432`,
		"POSTGRES://app@db.internal/shop":                   `PostgreSQL database "shop" at db.internal:5432`,
		"postgres://app:p%40w%2F1@a:1,b:2/shop":             `PostgreSQL database "shop" at a:1`,
		"postgres:///shop?host=/run/postgresql":             `PostgreSQL database "shop" at /run/postgresql:5432`,
		"sqlite:orders.db":                                  "sqlite:orders.db",
		"sqlite:/var/lib/orders.db":                         "sqlite:/var/lib/orders.db",
		"sqlite:///var/lib/orders.db":                       "sqlite:/var/lib/orders.db",
		"sqlite://orders.db":                                "sqlite:orders.db",
		"sqlite:odd?name#1.db":                              "sqlite:odd?name#1.db",
		"file:orders.db?mode=ro":                            "sqlite:orders.db",
		"file:///var/lib/a%20b.db":                          "sqlite:/var/lib/a b.db",
		"file:a%20b.db":                                     "sqlite:a b.db",
	} {
		a, err := parseAddress(url, "")
		if err != nil {
			t.Errorf("%s: %v", url, err)
			continue
		}
		if a.label != label {
			t.Errorf("%s: label %q, want %q", url, a.label, label)
		}
	}
}

func TestParseAddressSchema(t *testing.T) {
	t.Parallel()
	a, err := parseAddress("postgres://app@db/shop?search_path=other", `in"box`)
	if err != nil {
		t.Fatal(err)
	}
	if got := a.postgres.ConnConfig.RuntimeParams["search_path"]; got != "other" {
		t.Errorf("search_path is %s, want that of the URL where names are qualified", got)
	}
	if got, want := a.forMigrations().postgres.ConnConfig.RuntimeParams["search_path"], `"in""box"`; got != want {
		t.Errorf("search_path is %s, want %s", got, want)
	}
	if !strings.Contains(a.label, `schema "in\"box"`) {
		t.Errorf("the label lacks the schema: %s", a.label)
	}
	if a, err = parseAddress("postgres://app@db/shop?search_path=other", ""); err != nil {
		t.Fatal(err)
	}
	if got := a.forMigrations().postgres.ConnConfig.RuntimeParams["search_path"]; got != "other" {
		t.Errorf("search_path is %s, want that of the URL", got)
	}
}

// Behind a pooler nothing is prepared, unless the URL asks for it.
func TestParseAddressQueryMode(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]pgx.QueryExecMode{
		"postgres://app@db/shop": pgx.QueryExecModeExec,
		"postgres://app@db/shop?default_query_exec_mode=simple_protocol": pgx.QueryExecModeSimpleProtocol,
	} {
		a, err := parseAddress(url, "")
		if err != nil {
			t.Fatal(err)
		}
		if got := a.postgres.ConnConfig.DefaultQueryExecMode; got != want {
			t.Errorf("%s: mode %v, want %v", url, got, want)
		}
	}
}

// A wrong URL is a usage error that says what is wrong and shows no part of a
// password, however the URL is broken.
func TestParseAddressErrors(t *testing.T) {
	t.Parallel()
	for url, want := range map[string]string{
		"mysql://app:hunter2@db/shop":                              "must begin with postgres://, sqlite: or file:",
		"hunter2":                                                  "must begin with postgres://, sqlite: or file:",
		"host=db password=hunter2":                                 "must begin with postgres://, sqlite: or file:",
		"app:hunter2@db/shop":                                      "must begin with postgres://, sqlite: or file:",
		"postgres:hunter2":                                         "must begin with postgres://, sqlite: or file:",
		"postgres://app:hunter2@db:99999/shop":                     "invalid port",
		"postgres://app:hunter2@db/shop?sslmode=bogus":             "sslmode is invalid",
		"postgres://app:hunter2@db/shop?pool_max_conns=x":          "pool_max_conns",
		"postgres://app:hunter2@db/shop?default_query_exec_mode=x": "default_query_exec_mode",
		"postgres://app:hun ter2@db/shop":                          "percent-encoded",
		"postgres://app:hunter2%zz@db/shop":                        "percent-encoded",
		"postgres://app:9/hunter2@db/shop":                         "percent-encoded",
		"postgres://app:9?hunter2@db/shop":                         "percent-encoded",
		"postgres://app:x@y/hunter2@db/shop":                       "percent-encoded",
		"postgres://app:hunter2/x@db/shop":                         "percent-encoded",
		"postgres://db:hunter2/shop?password=hunter2":              "invalid port",
		"sqlite:":            "names no file",
		"file:":              "names no file",
		"sqlite::memory:":    "only inside one process",
		"file:x?mode=memory": "only inside one process",
		"file:%zz":           "not a valid file: URI",
	} {
		_, err := parseAddress(url, "")
		var usage *usageError
		if !errors.As(err, &usage) {
			t.Errorf("%s: %v, want a usage error", url, err)
			continue
		}
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want it to say %q", url, err, want)
		}
		for _, secret := range []string{"hunter2", "hunter", "hun", "ter2"} {
			if strings.Contains(err.Error(), secret) {
				t.Errorf("%s: the error shows %q: %v", url, secret, err)
			}
		}
	}
	if _, err := parseAddress("sqlite:x.db", "inbox"); err == nil || !strings.Contains(err.Error(), "--schema is for PostgreSQL only") {
		t.Errorf("--schema with SQLite: %v", err)
	}
	if _, err := parseAddress("postgres://db/shop", "a\x00b"); err == nil || !strings.Contains(err.Error(), "--schema must not contain a NUL") {
		t.Errorf("--schema with NUL: %v", err)
	}
}
