package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// record is a row of the inbox as JSON.
type record struct {
	Consumer    string          `json:"consumer"`
	Tenant      string          `json:"tenant,omitempty"`
	MessageKey  string          `json:"message_key"`
	Status      inbox.Status    `json:"status"`
	ProcessedAt *time.Time      `json:"processed_at"`
	Worker      string          `json:"worker"`
	Source      string          `json:"source"`
	Position    *int64          `json:"position"`
	MessageID   string          `json:"message_id"`
	EventTime   *time.Time      `json:"event_time"`
	Attempts    int             `json:"attempts"`
	ExpiresAt   *time.Time      `json:"expires_at"`
	Expired     bool            `json:"expired"`
	TraceID     string          `json:"trace_id"`
	Fingerprint string          `json:"fingerprint"`
	Result      json.RawMessage `json:"result"`
	// ResultBase64 stands in for a result that is not JSON.
	ResultBase64 []byte `json:"result_base64,omitempty"`
}

func newRecord(r *inbox.Record, now time.Time) record {
	j := record{
		Consumer: r.Consumer, Tenant: r.Tenant, MessageKey: r.MessageKey, Status: r.Status,
		ProcessedAt: jsonTime(r.ProcessedAt), Worker: r.Worker, Source: r.Source, MessageID: r.MessageID,
		EventTime: jsonTime(r.EventTime), Attempts: r.Attempts, ExpiresAt: jsonTime(r.ExpiresAt), Expired: expired(r, now),
		TraceID: r.TraceID, Fingerprint: hex.EncodeToString(r.Fingerprint),
	}
	if r.Position.Known {
		j.Position = &r.Position.Offset
	}
	switch {
	case r.Result == nil:
	case json.Valid(r.Result):
		j.Result = r.Result
	default:
		j.ResultBase64 = r.Result
	}
	return j
}

// expired tells that the key's window is over.
func expired(r *inbox.Record, now time.Time) bool {
	return !r.ExpiresAt.IsZero() && !r.ExpiresAt.After(now)
}

// writeRecord writes a row for people, result in one line or, with full, whole.
func writeRecord(w io.Writer, r *inbox.Record, now time.Time, full bool) {
	_, _ = fmt.Fprintln(w, printable(owner(r.Key)))
	t := newTable(w)
	line := func(name, value string) {
		if value != "" {
			t.row("  "+name, value)
		}
	}
	if r.Status == inbox.StatusProcessing {
		line("claimed", moment(r.ProcessedAt, now))
		line("status", "processing: the work has not been finished")
	} else {
		line("handled", moment(r.ProcessedAt, now))
	}
	line("by worker", r.Worker)
	line("from", place(r.Source, r.Position.String()))
	line("message id", r.MessageID)
	line("event time", moment(r.EventTime, now))
	line("attempts", fmt.Sprint(r.Attempts))
	line("expires", expiry(r, now))
	line("trace id", r.TraceID)
	line("fingerprint", fingerprint(r.Fingerprint))
	if !full || r.Result == nil {
		line("result", resultLine(r.Result))
		t.flush()
		return
	}
	line("result", grouped(int64(len(r.Result)))+" bytes:")
	t.flush()
	_, _ = fmt.Fprintln(w, indented(block(prettyJSON(r.Result)), "    "))
}

func expiry(r *inbox.Record, now time.Time) string {
	switch {
	case r.ExpiresAt.IsZero():
		return "never"
	case expired(r, now):
		return moment(r.ExpiresAt, now) + ": expired, the key counts as new"
	}
	return moment(r.ExpiresAt, now)
}

// owner names whose key it is.
func owner(k inbox.Key) string {
	if k.Tenant == "" {
		return "consumer " + k.Consumer
	}
	return "consumer " + k.Consumer + ", tenant " + k.Tenant
}

// place joins a source and a position in it.
func place(source, position string) string {
	switch {
	case position == "":
		return source
	case source == "":
		return "position " + position
	}
	return source + " at position " + position
}

func indented(text, by string) string {
	return by + strings.ReplaceAll(text, "\n", "\n"+by)
}

// prettyJSON returns b indented when it is JSON, else as it is.
func prettyJSON(b []byte) []byte {
	var out bytes.Buffer
	if json.Indent(&out, b, "", "  ") != nil {
		return b
	}
	return out.Bytes()
}

func compactJSON(b []byte) string {
	var out bytes.Buffer
	if json.Compact(&out, b) != nil {
		return string(b)
	}
	return out.String()
}
