package main

import (
	"encoding/base64"
	"encoding/json"
	"strings"
	"testing"
	"time"
)

// orders fills the database: two consumers and tenants, results of all kinds,
// expired and endless windows, parked messages.
func orders(t *testing.T, term *terminal) {
	t.Helper()
	term.must("migrate", "up")
	term.insertConsumer("billing", "json:orderId,eventType;v1")
	term.insertConsumer("mailer", "header:Event-Id;v1")
	hash := []byte{0x3f, 0xb2, 0xc1, 0xa0, 0x9d, 0x4e, 0xff, 0x01}
	term.insertKey(keyRow{
		consumer: "billing", key: "A1|order.paid", fingerprint: hash, messageID: "orders/3/4711", source: "kafka:orders/3",
		position: at(4711), worker: "billing-7f9c:1", traceID: "0af7651916cd43dd8448eb211c80319c", attempts: 2,
		result: []byte(`{"charge":"ch_1","amount":12.50}`), eventTime: ago(5 * time.Minute), processed: ago(3 * time.Minute),
		expires: ago(-6*24*time.Hour - time.Hour),
	})
	term.insertKey(keyRow{
		tenant: "acme", consumer: "mailer", key: "A1|order.paid", fingerprint: hash, source: "rabbitmq:mails",
		processed: ago(49 * time.Hour), expires: ago(time.Hour),
	})
	term.insertKey(keyRow{consumer: "billing", key: "old", processed: ago(10 * 24 * time.Hour), expires: ago(3 * 24 * time.Hour)})
	term.insertKey(keyRow{consumer: "billing", key: "long", result: []byte(`{"items": [` + strings.Repeat(`{"sku": "x1", "n": 1}, `, 20) + `{}]}`)})
	term.insertKey(keyRow{consumer: "billing", key: "odd", result: []byte{0xff, 0x00, 0x1b, '[', '2', 'J'}, worker: "evil\x1b[2J\nworker"})
	term.insertKey(keyRow{consumer: "billing", key: "leased", status: "processing", processed: ago(time.Second), position: at(0)})
	term.insertKey(keyRow{consumer: "billing", key: "-17|refund"})

	headers := []byte(`[{"n":"` + b64("Event-Type") + `","v":"` + b64("order.paid") + `"},{"n":"` + b64("bin") + `","v":"` + b64("\xff\x00") + `"}]`)
	term.insertParked(parkedRow{
		id: 7, consumer: "billing", key: "A1|order.paid", fingerprint: []byte{1, 2, 3}, state: "dead", reason: "conflict",
		err: "the key was handled before with another body", attempts: 0, duplicates: 2, messageID: "orders/3/4800",
		source: "kafka:orders/3", position: at(4800), brokerKey: []byte("A1"), headers: headers, body: []byte("{\n\t\"orderId\": \"A1\"\n}"),
		messageTime: ago(3 * time.Hour), eventTime: ago(4 * time.Hour), worker: "billing-7f9c:1", parked: ago(2 * time.Hour), updated: ago(time.Hour),
		lane: "orders/3/A1",
	})
	term.insertParked(parkedRow{
		id: 8, consumer: "mailer", tenant: "acme", key: "B2|order.paid", state: "dead", reason: "attempts exhausted",
		err: "dial smtp:\nno route to host " + strings.Repeat("x", 100), attempts: 5, body: []byte{0xff, 0xfe, 0x00}, parked: ago(90 * time.Second),
	})
	term.insertParked(parkedRow{
		id: 9, consumer: "billing", key: "C3|" + strings.Repeat("c", 60), state: "retry", reason: "attempts exhausted",
		err: "later", attempts: 1, parked: ago(10 * time.Second), next: ago(-20 * time.Second), body: []byte{},
	})
	term.insertParked(parkedRow{id: 10, consumer: "billing", key: "only-parked", state: "dead", reason: "effects unknown", attempts: 1})
}

func b64(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

func TestShow(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		orders(t, term)
		key := "A1|order.paid"
		term.golden("show", []string{"show", key}, []string{"show", key, "--full"}, []string{"show", key, "--consumer", "mailer"},
			[]string{"show", key, "--tenant", "acme"})
		term.golden("show_kinds", []string{"show", "old"}, []string{"show", "long"}, []string{"show", "long", "--full"},
			[]string{"show", "odd"}, []string{"show", "odd", "--full"}, []string{"show", "leased"}, []string{"show", "only-parked"},
			[]string{"show", "--", "-17|refund"})
		term.golden("show_json", []string{"show", key, "--json"}, []string{"show", "odd", "--json"})
		term.golden("show_unknown", []string{"show", "A1|order.payd"}, []string{"show", "A1|order.payd", "--json"},
			[]string{"show", key, "--consumer", "search", "--tenant", "acme"})
	})
}

// A database in which nothing has run yet.
func TestShowEmpty(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		term.must("migrate", "up")
		term.run("show", "K").expect(t, exitNotFound, `nothing is known of the key "K"`, "No consumer has ever run with this database.")
	})
}

func TestShowIsJSON(t *testing.T) {
	t.Parallel()
	term := onSQLite(t)
	orders(t, term)
	for _, args := range [][]string{
		{"show", "A1|order.paid"}, {"show", "odd"}, {"show", "unknown"}, {"dead", "list"}, {"dead", "list", "--consumer", "nobody"},
		{"dead", "show", "7"}, {"dead", "show", "8", "--body"}, {"migrate", "status"}, {"version"},
	} {
		o := term.run(append(args, "--json")...)
		if !json.Valid([]byte(o.stdout)) {
			t.Errorf("%v: not JSON:\n%s", args, o.stdout)
		}
	}
}
