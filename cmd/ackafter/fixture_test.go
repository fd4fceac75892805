package main

import (
	"database/sql"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// keyRow is a row of table inbox for tests; what is left out gets a default.
type keyRow struct {
	tenant, consumer, key, status string
	fingerprint                   []byte
	messageID, source             string
	position                      sql.NullInt64
	worker, traceID               string
	attempts                      int
	result                        []byte
	eventTime, processed, expires time.Time
}

// parkedRow is a row of table inbox_parked for tests.
type parkedRow struct {
	id                       int64
	tenant, consumer, key    string
	fingerprint              []byte
	lane, state, reason, err string
	attempts, duplicates     int
	messageID, source        string
	position                 sql.NullInt64
	brokerKey, headers, body []byte
	messageTime, eventTime   time.Time
	worker, failure          string
	parked, updated          time.Time
	next, lease              time.Time
}

func at(offset int64) sql.NullInt64 { return sql.NullInt64{Int64: offset, Valid: true} }

// ago is a time before the pinned one.
func ago(d time.Duration) time.Time { return pinned.Add(-d) }

// moment returns t as the database of the terminal stores it.
func (term *terminal) moment(t time.Time) any {
	switch {
	case t.IsZero():
		return nil
	case term.schema == "":
		return t.UnixMicro()
	}
	return t
}

func (term *terminal) insert(table string, columns []string, values ...any) {
	term.t.Helper()
	db := term.open()
	defer func() { _ = db.Close() }()
	marks := make([]string, len(columns))
	for i := range columns {
		marks[i] = fmt.Sprintf("$%d", i+1)
	}
	query := fmt.Sprintf("insert into %s (%s) values (%s)", table, strings.Join(columns, ", "), strings.Join(marks, ", "))
	if table == "inbox_parked" && term.schema != "" {
		query = strings.Replace(query, "values", "overriding system value values", 1)
	}
	if _, err := db.ExecContext(term.t.Context(), query, values...); err != nil {
		term.t.Fatalf("%s: %v", query, err)
	}
}

func (term *terminal) insertKey(r keyRow) {
	term.t.Helper()
	if r.status == "" {
		r.status = "done"
	}
	if r.processed.IsZero() {
		r.processed = pinned
	}
	term.insert("inbox", []string{
		"tenant", "consumer", "message_key", "status", "fingerprint", "message_id", "source", "position", "event_time",
		"worker", "trace_id", "attempts", "result", "processed_at", "expires_at",
	}, r.tenant, r.consumer, r.key, r.status, r.fingerprint, r.messageID, r.source, r.position, term.moment(r.eventTime),
		r.worker, r.traceID, max(r.attempts, 1), r.result, term.moment(r.processed), term.moment(r.expires))
}

func (term *terminal) insertParked(r parkedRow) {
	term.t.Helper()
	if r.parked.IsZero() {
		r.parked = pinned
	}
	if r.updated.IsZero() {
		r.updated = r.parked
	}
	if r.fingerprint == nil {
		r.fingerprint = []byte{}
	}
	var died time.Time
	if r.state == "dead" || r.state == "discarded" {
		died = r.updated
	}
	term.insert("inbox_parked", []string{
		"id", "tenant", "consumer", "message_key", "fingerprint", "lane", "state", "reason", "error", "attempts", "duplicates",
		"message_id", "source", "position", "broker_key", "headers", "body", "message_time", "event_time", "worker", "parked_at", "updated_at",
		"failure", "dead_at", "next_attempt_at", "lease_until",
	}, r.id, r.tenant, r.consumer, r.key, r.fingerprint, []byte(r.lane), r.state, r.reason, r.err, r.attempts, r.duplicates,
		r.messageID, r.source, r.position, r.brokerKey, r.headers, r.body, term.moment(r.messageTime), term.moment(r.eventTime),
		r.worker, term.moment(r.parked), term.moment(r.updated),
		r.failure, term.moment(died), term.moment(r.next), term.moment(r.lease))
}

func (term *terminal) insertConsumer(name, definition string) {
	term.t.Helper()
	columns := []string{"consumer", "key_definition"}
	if term.schema != "" {
		term.insert("inbox_consumers", columns, name, definition)
		return
	}
	term.insert("inbox_consumers", append(columns, "first_seen_at", "last_seen_at"), name, definition, pinned.UnixMicro(), pinned.UnixMicro())
}

// silentServer accepts connections and never answers. It signals the first one.
func silentServer(t *testing.T) (address string, accepted <-chan struct{}) {
	t.Helper()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	first, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := 0; ; n++ {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			defer func() { _ = conn.Close() }()
			if n == 0 {
				close(first)
			}
		}
	}()
	t.Cleanup(func() {
		_ = listener.Close()
		<-done
	})
	return listener.Addr().String(), first
}
