package main

import (
	"encoding/hex"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// parkedEntry is a row of the parked table as JSON.
type parkedEntry struct {
	ID          int64             `json:"id"`
	Consumer    string            `json:"consumer"`
	Tenant      string            `json:"tenant,omitempty"`
	MessageKey  string            `json:"message_key"`
	State       inbox.ParkedState `json:"state"`
	Reason      inbox.Reason      `json:"reason"`
	Error       string            `json:"error"`
	Attempts    int               `json:"attempts"`
	Duplicates  int               `json:"duplicates"`
	ParkedAt    *time.Time        `json:"parked_at"`
	UpdatedAt   *time.Time        `json:"updated_at"`
	Worker      string            `json:"worker"`
	Lane        string            `json:"lane,omitempty"`
	Source      string            `json:"source"`
	Position    *int64            `json:"position"`
	MessageID   string            `json:"message_id"`
	MessageTime *time.Time        `json:"message_time"`
	EventTime   *time.Time        `json:"event_time"`
	Fingerprint string            `json:"fingerprint"`
}

// parkedMessage is a whole row of the parked table as JSON.
type parkedMessage struct {
	parkedEntry
	BodyBytes   int `json:"body_bytes"`
	HeaderCount int `json:"header_count"`
	// The message itself, with --body.
	Content *parkedContent `json:"content,omitempty"`
}

type parkedContent struct {
	BrokerKey *content       `json:"broker_key"`
	Headers   []parkedHeader `json:"headers"`
	Body      *content       `json:"body"`
}

type parkedHeader struct {
	Name  string   `json:"name"`
	Value *content `json:"value"`
}

func newParkedEntry(r *inbox.ParkedRecord) parkedEntry {
	m := messageOf(r)
	e := parkedEntry{
		ID: r.ID, Consumer: r.Consumer, Tenant: r.Tenant, MessageKey: r.MessageKey,
		State: r.State, Reason: r.Reason, Error: r.Error, Attempts: r.Attempts, Duplicates: r.Duplicates,
		ParkedAt: jsonTime(r.ParkedAt), UpdatedAt: jsonTime(r.UpdatedAt), Worker: r.Worker, Lane: r.Lane,
		Source: m.Source, MessageID: m.ID, MessageTime: jsonTime(m.Time), EventTime: jsonTime(r.EventTime),
		Fingerprint: hex.EncodeToString(r.Fingerprint),
	}
	if m.Position.Known {
		e.Position = &m.Position.Offset
	}
	return e
}

func newParkedMessage(r *inbox.ParkedRecord, withBody bool) parkedMessage {
	m := messageOf(r)
	p := parkedMessage{parkedEntry: newParkedEntry(r), BodyBytes: len(m.Body), HeaderCount: len(m.Headers)}
	if !withBody {
		return p
	}
	p.Content = &parkedContent{BrokerKey: newContent(m.Key), Headers: []parkedHeader{}, Body: newContent(m.Body)}
	for _, h := range m.Headers {
		p.Content.Headers = append(p.Content.Headers, parkedHeader{h.Name, newContent(h.Value)})
	}
	return p
}

// messageOf returns the message of r; an empty one when r has none.
func messageOf(r *inbox.ParkedRecord) *broker.Message {
	if r.Message == nil {
		return &broker.Message{}
	}
	return r.Message
}

// errorLimit is how many characters of an error and of a key the table shows.
const errorLimit, keyLimit = 60, 40

// writeParkedTable writes one line a row.
func writeParkedTable(w io.Writer, rows []inbox.ParkedRecord, now time.Time) {
	tenants := false
	for i := range rows {
		tenants = tenants || rows[i].Tenant != ""
	}
	t := newTable(w)
	cells := func(tenant string, before []string, after ...string) {
		if tenants {
			before = append(before, tenant)
		}
		t.row(append(before, after...)...)
	}
	cells("TENANT", []string{"ID", "CONSUMER"}, "KEY", "STATE", "REASON", "ATTEMPTS", "DUPLICATES", "PARKED", "ERROR")
	for i := range rows {
		r := &rows[i]
		cells(r.Tenant, []string{strconv.FormatInt(r.ID, 10), r.Consumer},
			shortened(r.MessageKey, keyLimit), string(r.State), string(r.Reason), strconv.Itoa(r.Attempts), strconv.Itoa(r.Duplicates),
			distance(r.ParkedAt, now), shortened(r.Error, errorLimit))
	}
	t.flush()
}

// writeParked writes a row whole; the message itself only withBody.
func writeParked(w io.Writer, r *inbox.ParkedRecord, now time.Time, withBody bool) {
	m := messageOf(r)
	t := newTable(w)
	line := func(name, value string) {
		if value != "" {
			t.row(name, value)
		}
	}
	line("id", strconv.FormatInt(r.ID, 10))
	line("consumer", r.Consumer)
	line("tenant", r.Tenant)
	line("key", r.MessageKey)
	line("state", string(r.State))
	line("reason", string(r.Reason))
	line("error", r.Error)
	line("attempts", strconv.Itoa(r.Attempts))
	line("duplicates", strconv.Itoa(r.Duplicates))
	line("parked", moment(r.ParkedAt, now))
	line("updated", moment(r.UpdatedAt, now))
	line("by worker", r.Worker)
	line("lane", r.Lane)
	line("from", place(m.Source, m.Position.String()))
	line("message id", m.ID)
	line("message time", moment(m.Time, now))
	line("event time", moment(r.EventTime, now))
	line("fingerprint", fingerprint(r.Fingerprint))
	hint := ""
	if !withBody {
		hint = " (--body shows it)"
	}
	line("message", fmt.Sprintf("body of %s bytes, %d headers%s", grouped(int64(len(m.Body))), len(m.Headers), hint))
	t.flush()
	if withBody {
		writeMessage(w, m)
	}
}

// writeMessage writes the message itself.
func writeMessage(w io.Writer, m *broker.Message) {
	if m.Key != nil {
		_, _ = fmt.Fprintf(w, "\nbroker key:\n%s\n", indented(block(m.Key), "  "))
	}
	if len(m.Headers) > 0 {
		_, _ = fmt.Fprintln(w, "\nheaders:")
		t := newTable(w)
		for _, h := range m.Headers {
			t.row("  "+h.Name, string(h.Value))
		}
		t.flush()
	}
	switch {
	case m.Body == nil:
		_, _ = fmt.Fprintln(w, "\nno body")
	case len(m.Body) == 0:
		_, _ = fmt.Fprintln(w, "\nempty body")
	default:
		_, _ = fmt.Fprintf(w, "\nbody:\n%s\n", indented(block(m.Body), "  "))
	}
}
