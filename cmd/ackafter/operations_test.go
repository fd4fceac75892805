package main

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
)

const operationsPath = "../../docs/operations.md"

// shop fills the database with what docs/operations.md tells of.
func shop(t *testing.T, term *terminal) {
	t.Helper()
	term.must("migrate", "up")
	term.insertConsumer("billing", "json:orderId,eventType;v1")
	term.insertConsumer("shipping", "json:orderId,eventType;v1")
	body := func(order string, more string) []byte {
		return []byte(`{"orderId":"` + order + `","eventType":"paid"` + more + `}`)
	}
	term.insertKey(keyRow{
		consumer: "billing", key: "A1|paid", fingerprint: []byte{0x3f, 0xb2, 0xc1, 0xa0, 0x9d, 0x4e}, messageID: "orders/3/4711",
		source: "kafka:orders/3", position: at(4711), worker: "billing-7f9c:1", traceID: "0af7651916cd43dd8448eb211c80319c",
		attempts: 2, result: []byte(`{"charge":"ch_1"}`), processed: ago(3 * time.Minute), expires: ago(-7 * 24 * time.Hour),
	})
	term.insertKey(keyRow{
		consumer: "billing", key: "A2|paid", fingerprint: []byte{1, 2, 3, 4, 5, 6}, source: "kafka:orders/1", position: at(4000),
		worker: "billing-7f9c:1", result: []byte(`{"charge":"ch_2"}`), processed: ago(26 * time.Hour), expires: ago(-6 * 24 * time.Hour),
	})
	for i, id := range []int64{11, 12, 14} {
		order := fmt.Sprint("B", i+1)
		term.insertParked(parkedRow{
			id: id, consumer: "billing", key: order + "|paid", state: "dead", reason: "attempts exhausted", attempts: 15,
			err:     fmt.Sprintf(`charge %d: column "currency" does not exist (SQLSTATE 42703)`, 900+id),
			failure: "5f0c9a2be1d34c77", body: body(order, ""), source: "kafka:orders/3", position: at(4700 + id), parked: ago(time.Duration(5-i) * time.Hour),
		})
	}
	term.insertParked(parkedRow{
		id: 15, consumer: "billing", key: "A2|paid", state: "dead", reason: "conflict", fingerprint: []byte{9, 8, 7, 6, 5, 4},
		err: "the key was handled before with another body", failure: "c0ffee11c0ffee11", body: body("A2", `,"cents":1250`),
		source: "kafka:orders/1", position: at(4130), parked: ago(2 * time.Hour), worker: "billing-7f9c:1",
	})
	term.insertParked(parkedRow{
		id: 16, consumer: "billing", key: "A3|paid", state: "dead", reason: "effects unknown", attempts: 1, failure: "de1e7edde1e7edde",
		err: "the handler ended the transaction, which belongs to the inbox", body: body("A3", ""), parked: ago(90 * time.Minute),
	})
	for i, id := range []int64{17, 18} {
		term.insertParked(parkedRow{
			id: id, consumer: "billing", key: fmt.Sprintf("invalid:%032x", id), state: "dead", reason: "invalid key", failure: "81e3a6f7c2b45d90",
			err: `key: field "orderId" is missing`, body: []byte(`{"test":1}`), parked: ago(time.Duration(80-i) * time.Minute),
		})
	}
	term.insertConsumer("search", "json:order.id;v1")
	for id := int64(31); id <= 33; id++ {
		term.insertParked(parkedRow{
			id: id, consumer: "search", key: fmt.Sprintf("invalid:%032x", id), state: "dead", reason: "invalid key", failure: "7be0c5d1f3a29486",
			err: `key: field "order" is missing`, body: body(fmt.Sprint("A", id), ""), parked: ago(5 * time.Minute),
		})
	}
	lane := "orders/1/A9"
	term.insertParked(parkedRow{
		id: 21, consumer: "shipping", key: "A9|paid", lane: lane, state: "retry", reason: "attempt failed", attempts: 6, failure: "0dd0b0a7c4f1e5aa",
		err: "dial warehouse:443: no route to host", body: body("A9", ""), source: "kafka:orders/1", position: at(4120), parked: ago(4 * time.Minute),
		updated: ago(time.Minute), next: ago(-5 * time.Second),
	})
	for id, event := range map[int64]string{22: "packed", 23: "changed"} {
		term.insertParked(parkedRow{
			id: id, consumer: "shipping", key: "A9|" + event, lane: lane, state: "waiting", reason: "waits for its lane",
			body: body("A9", ""), parked: ago(3 * time.Minute), source: "kafka:orders/1", position: at(4100 + id),
		})
	}
	term.insertParked(parkedRow{
		id: 24, consumer: "shipping", key: "A7|paid", state: "retry", reason: "attempt failed", attempts: 5, failure: "0dd0b0a7c4f1e5aa",
		err: "dial warehouse:443: no route to host", body: body("A7", ""), parked: ago(2 * time.Minute), next: ago(time.Second), lease: ago(-time.Minute),
	})
}

// What docs/operations.md says that commands print is what they print, on both
// databases. -update writes it anew.
func TestOperationsDocument(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		shop(t, term)
		document, err := os.ReadFile(operationsPath)
		if err != nil {
			t.Fatal(err)
		}
		got, commands := term.replay(string(document))
		if commands < 10 {
			t.Errorf("only %d commands", commands)
		}
		switch {
		case got == string(document):
		case *update:
			if err := os.WriteFile(operationsPath, []byte(got), 0o600); err != nil {
				t.Fatal(err)
			}
		default:
			t.Errorf("%s differs from what the commands print (-update writes it anew):\n%s", operationsPath, got)
		}
	})
}

// prompt begins a command of a document whose output follows.
const prompt = "    $ ackafter "

// replay runs the commands of a document, in their order, and returns it with the
// outputs that they gave.
func (term *terminal) replay(document string) (string, int) {
	term.t.Helper()
	var b bytes.Buffer
	commands, inOutput, empty := 0, false, false
	for line := range strings.Lines(document) {
		command, isCommand := strings.CutPrefix(line, prompt)
		switch {
		case isCommand:
			commands++
			b.WriteString(line + term.answer(strings.TrimSuffix(command, "\n")))
			inOutput = true
		case inOutput && (line == "\n" || strings.HasPrefix(line, "    ")):
			// The output of before, which may have empty lines. Only text ends it.
			empty = line == "\n"
			continue
		default:
			if inOutput && empty {
				b.WriteByte('\n')
			}
			inOutput = false
			b.WriteString(line)
		}
		empty = false
	}
	return b.String(), commands
}

// answer runs a command line and returns its output as a document shows it.
func (term *terminal) answer(command string) string {
	term.t.Helper()
	command, _, toFile := strings.Cut(command, " > ")
	o := term.run(words(command)...)
	if o.code != exitOK || o.stderr != "" {
		term.t.Errorf("%s: exit code %d\n%s%s", command, o.code, o.stdout, o.stderr)
	}
	if toFile {
		return ""
	}
	var b strings.Builder
	for shown := range strings.Lines(o.stdout) {
		b.WriteString(strings.TrimRight("    "+shown, " \n") + "\n")
	}
	return b.String()
}

// Every command line that the documents show in a block can be parsed.
func TestDocumentedCommands(t *testing.T) {
	t.Parallel()
	found := 0
	for _, path := range []string{operationsPath, "../../docs/kafka.md", "../../docs/rabbitmq.md"} {
		document, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(document)) {
			command, ok := strings.CutPrefix(strings.TrimPrefix(strings.TrimSpace(line), "$ "), "ackafter ")
			if !ok || !strings.HasPrefix(line, "    ") {
				continue
			}
			found++
			command, _, _ = strings.Cut(command, " #")
			command, _, _ = strings.Cut(strings.TrimSpace(command), " > ")
			o := onSQLite(t).run(words(command)...)
			if o.code == exitUsage {
				t.Errorf("%s: ackafter %s\n%s", path, command, o.stderr)
			}
		}
	}
	if found < 15 {
		t.Errorf("only %d commands were found", found)
	}
}

// words splits a command line as a shell would, as far as documents need it.
func words(line string) (all []string) {
	word, quoted, started := "", false, false
	for _, r := range line {
		switch {
		case r == '\'':
			quoted, started = !quoted, true
		case r == ' ' && !quoted:
			if started {
				all = append(all, word)
			}
			word, started = "", false
		default:
			word, started = word+string(r), true
		}
	}
	if started {
		all = append(all, word)
	}
	return all
}
