package pgadvice_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/pgadvice"
)

// server answers in the place of one that is not to be had: another version, another
// clock, a pooler in another mode. What real ones say is tested with the stores.
type server struct {
	version int
	ahead   time.Duration
	refuse  error // of a transaction
	pids    []int // of one query after the other
	fail    error
}

func (s *server) Scan(_ context.Context, _ string, _ []any, dest ...any) error {
	switch d := dest[0].(type) {
	case *string:
		*d = fmt.Sprintf(`{"version": %d, "now": %d, "fsync": "on", "full_page_writes": "on", "role_limit": -1, "database_limit": -1}`,
			s.version, time.Now().Add(s.ahead).UnixMicro())
	case *int:
		*d, s.pids = s.pids[0], s.pids[1:]
	}
	return s.fail
}

func (s *server) Within(_ context.Context, do func() error) error {
	if s.refuse != nil {
		return s.refuse
	}
	return do()
}

func TestVersionAndClock(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		server   server
		code     string
		severity inbox.Severity
	}{
		"oldest":   {server: server{version: 150000}},
		"newest":   {server: server{version: 189999}},
		"too old":  {server: server{version: 149999}, code: "server_version", severity: inbox.SeverityError},
		"too new":  {server: server{version: 190000}, code: "server_version", severity: inbox.SeverityInfo},
		"ahead":    {server: server{version: 150000, ahead: 10 * time.Second}, code: "clock", severity: inbox.SeverityInfo},
		"behind":   {server: server{version: 150000, ahead: -10 * time.Second}, code: "clock", severity: inbox.SeverityInfo},
		"a second": {server: server{version: 150000, ahead: time.Second}},
	} {
		found, err := pgadvice.Advise(t.Context(), &c.server, pgadvice.Store{}, inbox.AdviceRequest{}, pgadvice.Pooler{})
		switch {
		case err != nil:
			t.Errorf("%s: %v", name, err)
		case c.code == "" && len(found) == 0:
		case len(found) != 1 || found[0].Code != c.code || found[0].Severity != c.severity:
			t.Errorf("%s: %+v, want %s %s", name, found, c.severity, c.code)
		}
	}
	if _, err := pgadvice.Advise(t.Context(), &server{fail: errGone}, pgadvice.Store{}, inbox.AdviceRequest{}, pgadvice.Pooler{}); !errors.Is(err, errGone) {
		t.Errorf("Advise = %v", err)
	}
}

var errGone = errors.New("gone")

type stateError string

func (e stateError) Error() string    { return string(e) }
func (e stateError) SQLState() string { return string(e) }

func TestFindPooler(t *testing.T) {
	t.Parallel()
	shared := pgadvice.Pooler{Present: true, Shares: true}
	mixed, refused := shared, shared
	mixed.Mixes, refused.Refuses = true, true
	for name, c := range map[string]struct {
		a, b server
		want pgadvice.Pooler
		err  error
	}{
		"none":                      {a: server{pids: []int{1, 1}}, b: server{pids: []int{2}}},
		"shares":                    {a: server{pids: []int{1, 2}}, b: server{pids: []int{1}}, want: shared},
		"shares, busy":              {a: server{pids: []int{1, 3}}, b: server{pids: []int{2}}, want: shared},
		"refuses":                   {a: server{pids: []int{1}}, b: server{refuse: stateError("08P01")}, want: refused},
		"loses prepared statements": {a: server{pids: []int{1}, fail: stateError("26000")}, want: mixed},
		"mixes prepared statements": {a: server{pids: []int{1}}, b: server{pids: []int{1}, fail: stateError("42P05")}, want: mixed},
		"is gone":                   {a: server{pids: []int{1}, fail: errGone}, err: errGone},
	} {
		got, err := pgadvice.FindPooler(t.Context(), &c.a, &c.b)
		if got != c.want || !errors.Is(err, c.err) {
			t.Errorf("%s: %+v, %v; want %+v, %v", name, got, err, c.want, c.err)
		}
	}
}

func TestPoolerRefuses(t *testing.T) {
	t.Parallel()
	found, err := pgadvice.Advise(t.Context(), &server{version: 150000}, pgadvice.Store{}, inbox.AdviceRequest{},
		pgadvice.Pooler{Present: true, Shares: true, Refuses: true})
	if err != nil || !slices.ContainsFunc(found, func(f inbox.Finding) bool { return f.Code == "pooler_statement" && f.Severity == inbox.SeverityError }) {
		t.Errorf("found %+v, %v", found, err)
	}
}
