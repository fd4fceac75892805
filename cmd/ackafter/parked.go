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
	Failure     string            `json:"failure"`
	Attempts    int               `json:"attempts"`
	Duplicates  int               `json:"duplicates"`
	ParkedAt    *time.Time        `json:"parked_at"`
	UpdatedAt   *time.Time        `json:"updated_at"`
	NextAttempt *time.Time        `json:"next_attempt"`
	LeasedUntil *time.Time        `json:"leased_until"`
	Died        *time.Time        `json:"died"`
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
		State: r.State, Reason: r.Reason, Error: r.Error, Failure: r.Failure, Attempts: r.Attempts, Duplicates: r.Duplicates,
		ParkedAt: jsonTime(r.ParkedAt), UpdatedAt: jsonTime(r.UpdatedAt), NextAttempt: jsonTime(r.NextAttempt),
		LeasedUntil: jsonTime(r.LeasedUntil), Died: jsonTime(r.Died), Worker: r.Worker, Lane: r.Lane,
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

// writeParkedTable writes one line a row. Columns that are empty in all of them are
// left out.
func writeParkedTable(w io.Writer, rows []inbox.ParkedRecord, now time.Time) {
	columns := []struct {
		name     string
		optional bool
		cell     func(r *inbox.ParkedRecord) string
	}{
		{"ID", false, func(r *inbox.ParkedRecord) string { return strconv.FormatInt(r.ID, 10) }},
		{"CONSUMER", false, func(r *inbox.ParkedRecord) string { return r.Consumer }},
		{"TENANT", true, func(r *inbox.ParkedRecord) string { return r.Tenant }},
		{"KEY", false, func(r *inbox.ParkedRecord) string { return shortened(r.MessageKey, keyLimit) }},
		{"STATE", false, func(r *inbox.ParkedRecord) string { return string(r.State) }},
		{"REASON", false, func(r *inbox.ParkedRecord) string { return string(r.Reason) }},
		{"ATTEMPTS", false, func(r *inbox.ParkedRecord) string { return strconv.Itoa(r.Attempts) }},
		{"DUPLICATES", false, func(r *inbox.ParkedRecord) string { return strconv.Itoa(r.Duplicates) }},
		{"PARKED", false, func(r *inbox.ParkedRecord) string { return distance(r.ParkedAt, now) }},
		{"NEXT", true, func(r *inbox.ParkedRecord) string { return nextAttempt(r, now) }},
		{"LEASED", true, func(r *inbox.ParkedRecord) string { return lease(r, now) }},
		{"ERROR", false, func(r *inbox.ParkedRecord) string { return shortened(r.Error, errorLimit) }},
	}
	t := newTable(w)
	table := make([][]string, 1+len(rows))
	for _, c := range columns {
		cells, filled := make([]string, len(rows)), !c.optional
		for i := range rows {
			cells[i] = c.cell(&rows[i])
			filled = filled || cells[i] != ""
		}
		if !filled {
			continue
		}
		table[0] = append(table[0], c.name)
		for i := range cells {
			table[i+1] = append(table[i+1], cells[i])
		}
	}
	for _, line := range table {
		t.row(line...)
	}
	t.flush()
}

// nextAttempt says when a message is due; empty when it does not wait for a time.
func nextAttempt(r *inbox.ParkedRecord, now time.Time) string {
	switch {
	case r.NextAttempt.IsZero():
		return ""
	case !r.NextAttempt.After(now):
		return "due"
	}
	return distance(r.NextAttempt, now)
}

// lease says how long a process may have a message in work; empty when none has.
func lease(r *inbox.ParkedRecord, now time.Time) string {
	switch {
	case r.LeasedUntil.IsZero():
		return ""
	case !r.LeasedUntil.After(now):
		return "over"
	}
	return distance(r.LeasedUntil, now)
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
	line("failure", r.Failure)
	line("attempts", strconv.Itoa(r.Attempts))
	line("duplicates", strconv.Itoa(r.Duplicates))
	line("parked", moment(r.ParkedAt, now))
	line("updated", moment(r.UpdatedAt, now))
	line("next attempt", moment(r.NextAttempt, now))
	line("leased until", moment(r.LeasedUntil, now))
	line("dead since", moment(r.Died, now))
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
