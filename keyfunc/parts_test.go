package keyfunc

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/broker"
)

var secret = []byte("0123456789abcdef0123456789abcdef")

func TestHeader(t *testing.T) {
	t.Parallel()
	m := headers("Order-Id", "A1", "Order-Type", "paid", "other", "x", "other", "y", "blank", " ", "K", "kelvin")
	if key := mustKey(t, Header("order-id", "ORDER-TYPE"), m); key != "A1|paid" {
		t.Errorf("key = %q", key)
	}
	wantError(t, Header("id"), m, ErrMissing, `header "id": is missing`)
	wantError(t, Header("id", "other"), m, ErrInvalid, `header "other": is repeated`)
	wantError(t, Header("other"), m, ErrInvalid, "is repeated")
	wantError(t, Header("blank"), m, ErrInvalid, "is blank")
	wantError(t, Header("k"), headers("\u212a", "Kelvin sign"), ErrMissing, "is missing")
	// Two spellings are the same header twice.
	wantError(t, Header("X-Id"), headers("X-Id", "1", "x-id", "2"), ErrInvalid, "is repeated")
	wantError(t, Header("X-Id"), headers("X-Id", "1", "X-ID", "1"), ErrInvalid, "is repeated")
	null := &broker.Message{Headers: broker.Headers{{Name: "id"}}}
	wantError(t, Header("id"), null, ErrInvalid, "has no value")
	// Values are not trimmed.
	if key := mustKey(t, Header("id"), headers("id", " a1 ")); key != " a1 " {
		t.Errorf("key = %q", key)
	}
	if a, b := Header("X-Id").Definition(), Header("x-id").Definition(); a != b {
		t.Errorf("definitions %q and %q of one key", a, b)
	}
}

func TestBrokerKeyAndMessageID(t *testing.T) {
	t.Parallel()
	m := &broker.Message{Key: []byte("A|1"), ID: "orders/3/4711"}
	if key := mustKey(t, BrokerKey(), m); key != `A\|1` {
		t.Errorf("key = %q", key)
	}
	if key := mustKey(t, MessageID(), m); key != "orders/3/4711" {
		t.Errorf("key = %q", key)
	}
	wantError(t, BrokerKey(), &broker.Message{}, ErrMissing, "no broker key")
	wantError(t, BrokerKey(), &broker.Message{Key: []byte{}}, ErrInvalid, "is blank")
	wantError(t, BrokerKey(), &broker.Message{Key: []byte{0, 0, 0, 17}}, ErrInvalid, "NUL")
	wantError(t, MessageID(), &broker.Message{}, ErrMissing, "no id")
	wantError(t, MessageID(), &broker.Message{ID: " "}, ErrInvalid, "is blank")
}

// varying gives the tuple of the header "t", whose values are separated by
// slashes: a part whose number of components varies.
type varying string

func (v varying) appendKey(dst []byte, m *broker.Message) ([]byte, error) {
	value, _ := m.Headers.Get(string(v))
	return appendTuple(dst, strings.Split(string(value), "/"))
}
func (v varying) text() string { return "varying" }
func (v varying) arity() int   { return 0 }

func appendTuple(dst []byte, tuple []string) ([]byte, error) {
	var err error
	for i, component := range tuple {
		if i > 0 {
			dst = append(dst, separator)
		}
		if dst, err = appendText(dst, "tuple", "", component); err != nil {
			return dst, err
		}
	}
	return dst, nil
}

func TestJoin(t *testing.T) {
	t.Parallel()
	f := Join(Header("tenant"), JSON("id", "version"))
	m := headers("tenant", "ac|me")
	m.Body = []byte(`{"id":"A1","version":2}`)
	if key := mustKey(t, f, m); key != `ac\|me|A1|2` {
		t.Errorf("key = %q", key)
	}
	wantError(t, f, headers("tenant", "acme"), ErrMissing, "message has no body")
	wantError(t, f, jsonBody(`{"id":"A1","version":2}`), ErrMissing, `header "tenant": is missing`)
	// Invalid outranks absent, in either order.
	wantError(t, f, jsonBody(`{"id":null,"version":2}`), ErrInvalid, `"id": is null`)
	wantError(t, Join(JSON("id"), Header("tenant")), jsonBody(`{"id":""}`), ErrInvalid, "is blank")
	wantError(t, Join(JSON("x"), Header("tenant")), &broker.Message{Headers: headers("tenant", "").Headers, Body: []byte(`{}`)}, ErrInvalid, "is blank")
	// Nested joins are one tuple.
	if a, b := mustKey(t, Join(Join(f), Header("tenant")), m), mustKey(t, Join(f, Join(Header("tenant"))), m); a != b || a != `ac\|me|A1|2|ac\|me` {
		t.Errorf("keys %q, %q", a, b)
	}
}

// case Y3: parts of varying length are told apart.
func TestJoinVaryingLength(t *testing.T) {
	t.Parallel()
	f := &derived{part: joinPart{parts: []part{varying("a"), varying("b")}}}
	seen := map[string]string{}
	for _, pair := range [][2]string{{"x", "y/z"}, {"x/y", "z"}, {"x|y", "z"}, {"x", "y|z"}, {`x\`, "y/z"}, {`x/y`, `\z`}, {"x/y/z", "w"}, {"x", "y/z/w"}, {"x/y", "z/w"}} {
		key := mustKey(t, f, headers("a", pair[0], "b", pair[1]))
		if other, ok := seen[key]; ok {
			t.Errorf("%q and %s have the key %q", pair, other, key)
		}
		seen[key] = fmt.Sprintf("%q", pair)
	}
	// The one such part that users can make.
	first := First(JSON("a"), JSON("b", "c"))
	joined := Join(first, Header("h"))
	m := headers("h", "H")
	m.Body = []byte(`{"b":"B","c":"C"}`)
	if key := mustKey(t, joined, m); key != `B\|C|H` {
		t.Errorf("key = %q", key)
	}
	m.Body = []byte(`{"a":"B|C"}`)
	if key := mustKey(t, joined, m); key != `B\\\|C|H` {
		t.Errorf("key = %q", key)
	}
	long := &derived{part: joinPart{parts: []part{varying("a"), varying("b")}}}
	wantError(t, long, headers("a", strings.Repeat("k", MaxSize)+"/x", "b", "y"), ErrInvalid, "longer than")
}

func TestFirst(t *testing.T) {
	t.Parallel()
	f := First(JSON("orderId"), JSON("id"), BrokerKey())
	m := &broker.Message{Key: []byte("K")}
	for body, want := range map[string]string{`{"orderId":1,"id":2}`: "1", `{"id":2}`: "2", `{}`: "K", "": "K"} {
		m := &broker.Message{Key: m.Key}
		if body != "" {
			m.Body = []byte(body)
		}
		if key := mustKey(t, f, m); key != want {
			t.Errorf("%s: key %q, want %q", body, key, want)
		}
	}
	// No fallback from what is there and invalid.
	for _, body := range []string{`{"orderId":null,"id":2}`, `{"orderId":" ","id":2}`, `{"orderId":1,"orderId":1,"id":2}`, `{"orderId":"\ud800","id":2}`, `{"orderId":{},"id":2}`, `not JSON`} {
		wantError(t, f, &broker.Message{Key: m.Key, Body: []byte(body)}, ErrInvalid, "keyfunc: json")
	}
	wantError(t, f, &broker.Message{Key: m.Key, Body: []byte{}}, ErrInvalid, "body is empty")
	wantError(t, f, jsonBody(`{}`), ErrMissing,
		`keyfunc: first: no alternative is there (json "orderId": is missing; json "id": is missing; broker-key: message has no broker key)`)
	// One text is one key, unless told apart.
	apart := First(Prefix("order", JSON("orderId")), Prefix("id", JSON("id")))
	if a, b := mustKey(t, apart, jsonBody(`{"orderId":1}`)), mustKey(t, apart, jsonBody(`{"id":1}`)); a != "order|1" || b != "id|1" {
		t.Errorf("keys %q, %q", a, b)
	}
	// An alternative that fails half way leaves nothing behind.
	half := Join(Header("h"), First(Join(JSON("a"), JSON("b")), JSON("a")))
	h := headers("h", "H")
	h.Body = []byte(`{"a":"A"}`)
	if key := mustKey(t, half, h); key != "H|A" {
		t.Errorf("key = %q", key)
	}
}

func TestPrefix(t *testing.T) {
	t.Parallel()
	if key := mustKey(t, Prefix("a|b", JSON("id")), jsonBody(`{"id":"c"}`)); key != `a\|b|c` {
		t.Errorf("key = %q", key)
	}
	wantError(t, Prefix("a", JSON("id")), jsonBody(`{}`), ErrMissing, "is missing")
	// Alternatives of three components and of one: nested in a tuple.
	m := headers("h", "H")
	m.Body = []byte(`{"x":1,"y":2}`)
	if key := mustKey(t, Join(First(Prefix("a", JSON("x", "y")), JSON("z")), Header("h")), m); key != `a\|1\|2|H` {
		t.Errorf("key = %q", key)
	}
	if key := mustKey(t, Join(First(Prefix("a", JSON("x", "y")), JSON("x", "y", "z")), Header("h")), m); key != `a|1|2|H` {
		t.Errorf("key = %q", key)
	}
}

func TestBodyHash(t *testing.T) {
	t.Parallel()
	// The well-known digest of "abc".
	if key := mustKey(t, BodyHash(), jsonBody("abc")); key != "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad" {
		t.Errorf("key = %q", key)
	}
	if a, b := mustKey(t, BodyHash(), jsonBody("\xff\x00")), mustKey(t, BodyHash(), jsonBody("\xfe\x00")); a == b {
		t.Errorf("one key for two bodies: %q", a)
	}
	wantError(t, BodyHash(), &broker.Message{}, ErrMissing, "no body")
	wantError(t, BodyHash(), jsonBody(""), ErrInvalid, "body is empty")
}

func TestHMAC(t *testing.T) {
	t.Parallel()
	given := bytes.Clone(secret)
	f := HMAC(given, JSON("email"))
	m := jsonBody(`{"email":"jane@example.org"}`)
	key := mustKey(t, f, m)
	if len(key) != 64 || strings.Contains(key, "jane") {
		t.Errorf("key = %q", key)
	}
	clear(given) // the secret was copied
	if again := mustKey(t, f, m); again != key {
		t.Errorf("keys %q, %q", key, again)
	}
	if other := mustKey(t, f, jsonBody(`{"email":"joe@example.org"}`)); other == key {
		t.Error("one key for two addresses")
	}
	// Another secret is another definition, and neither shows it.
	rotated := HMAC(bytes.Repeat([]byte("s"), 32), JSON("email"))
	if mustKey(t, rotated, m) == key || rotated.Definition() == f.Definition() {
		t.Errorf("another secret: definition %q", rotated.Definition())
	}
	if d := HMAC(secret, JSON("email")).Definition(); d != f.Definition() {
		t.Errorf("definitions %q, %q of one secret", d, f.Definition())
	}
	if strings.Contains(f.Definition(), string(secret[:8])) {
		t.Errorf("definition %q shows the secret", f.Definition())
	}
	wantError(t, f, jsonBody(`{}`), ErrMissing, `"email": is missing`)
	wantError(t, f, jsonBody(`{"email":" "}`), ErrInvalid, "is blank")
	// In a tuple only its own component is replaced.
	if joined := mustKey(t, Join(Prefix("p", JSON("email")), f), m); joined != "p|jane@example.org|"+key {
		t.Errorf("key = %q", joined)
	}
}

func TestCustom(t *testing.T) {
	t.Parallel()
	with := func(key string, err error) Func {
		return Custom("my key", func(*broker.Message) (string, error) { return key, err })
	}
	m := &broker.Message{}
	if key := mustKey(t, with("a|b", nil), m); key != `a\|b` {
		t.Errorf("key = %q", key)
	}
	cause := errors.New("no such tag")
	wantError(t, with("", cause), m, ErrInvalid, `keyfunc: custom "my key": function failed: no such tag`)
	if _, err := with("", cause).Key(m); !errors.Is(err, cause) {
		t.Errorf("the cause is lost: %v", err)
	}
	wantError(t, with("", ErrMissing), m, ErrMissing, "function found no key")
	wantError(t, with("", fmt.Errorf("tag 7: %w", ErrMissing)), m, ErrMissing, "tag 7")
	wantError(t, with("", nil), m, ErrInvalid, `custom "my key": is blank`)
	wantError(t, with("\xff", nil), m, ErrInvalid, "UTF-8")
	wantError(t, Custom("p", func(*broker.Message) (string, error) { panic(runtimeError()) }), m, ErrInvalid, "function panicked: runtime error: index out of range")
	wantError(t, Custom("p", func(m *broker.Message) (string, error) { panic(errors.New("SECRET")) }), m, ErrInvalid, "panicked with a value of type *errors.errorString")
	if key := mustKey(t, First(with("", ErrMissing), with("b", nil)), m); key != "b" {
		t.Errorf("key = %q", key)
	}
}

func TestForeignPart(t *testing.T) {
	t.Parallel()
	m := &broker.Message{ID: "m"}
	f := Join(own{key: "a|b", definition: "x,y"}, MessageID())
	if key := mustKey(t, f, m); key != `a\|b|m` {
		t.Errorf("key = %q", key)
	}
	if d := f.Definition(); d != `join(func:x\,y|message-id);v1` {
		t.Errorf("definition = %q", d)
	}
	wantError(t, Join(own{key: " ", definition: "x"}), m, ErrInvalid, "is blank")
	wantError(t, Join(own{err: errors.New("cause"), definition: "x"}), m, ErrInvalid, "function failed: cause")
	wantError(t, Join(own{panics: "SECRET", definition: "x"}), m, ErrInvalid, "panicked with a value of type string")
	if key := mustKey(t, First(own{err: ErrMissing, definition: "x"}, MessageID()), m); key != "m" {
		t.Errorf("key = %q", key)
	}
	wantError(t, First(own{err: fmt.Errorf("tag: %w", ErrMissing), definition: "x"}), m, ErrMissing, "func: function found no key: tag: ")
}

// zip is body in gzip.
func zip(t testing.TB, body string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write([]byte(body)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestConfluentFrame(t *testing.T) {
	t.Parallel()
	f := Unwrap(ConfluentFrame(), JSON("id"))
	if key := mustKey(t, f, jsonBody("\x00\x00\x00\x00\x0c{\"id\":\"A1\"}")); key != "A1" {
		t.Errorf("key = %q", key)
	}
	// Another schema is the same key.
	if key := mustKey(t, f, jsonBody("\x00\xff\x00\x00\x0d{\"id\":\"A1\"}")); key != "A1" {
		t.Errorf("key = %q", key)
	}
	wantError(t, f, jsonBody(`{"id":"A1"}`), ErrMissing, "no registry frame: first byte is 0x7b")
	wantError(t, f, &broker.Message{}, ErrMissing, "no body")
	wantError(t, f, jsonBody(""), ErrInvalid, "body is empty")
	wantError(t, f, jsonBody("\x00\x00\x00\x0c"), ErrInvalid, "cut off")
	wantError(t, f, jsonBody("\x00\x00\x00\x00\x0c"), ErrInvalid, "body is empty")
	wantError(t, f, jsonBody("\x00\x00\x00\x00\x0c\x02A1"), ErrInvalid, "not JSON: first byte is 0x02")
	// A topic in which only some messages are framed.
	mixed := First(f, JSON("id"))
	for _, body := range []string{"\x00\x00\x00\x00\x0c{\"id\":\"A1\"}", `{"id":"A1"}`} {
		if key := mustKey(t, mixed, jsonBody(body)); key != "A1" {
			t.Errorf("%q: key = %q", body, key)
		}
	}
}

func TestConfluentProtobufFrame(t *testing.T) {
	t.Parallel()
	rest := Custom("rest", func(m *broker.Message) (string, error) { return string(m.Body), nil })
	f := Unwrap(ConfluentProtobufFrame(), rest)
	const id = "\x00\x00\x00\x00\x01"
	for body, want := range map[string]string{
		id + "\x00A1":             "A1", // short for the first type
		id + "\x02\x00A1":         "A1", // [0]
		id + "\x04\x02\x06A1":     "A1", // [1, 3]
		id + "\x02\x80\x02A1":     "A1", // [128]
		id + "\x02\x80\x02\x02A1": "\x02A1",
	} {
		if key := mustKey(t, f, jsonBody(body)); key != want {
			t.Errorf("%q: key %q, want %q", body, key, want)
		}
	}
	for _, index := range []string{"", "\x02", "\x01", "\x80", "\x06\x00\x00", "\x02\x01A", "\xfe\xff\xff\xff\x0f", "\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"} {
		wantError(t, f, jsonBody(id+index), ErrInvalid, "type index")
	}
	wantError(t, f, jsonBody("A1"), ErrMissing, "first byte is 0x41")
	wantError(t, f, jsonBody("\x00"), ErrInvalid, "cut off")
}

func TestGzip(t *testing.T) {
	t.Parallel()
	const body = `{"id":"A1"}`
	f := Unwrap(Gzip(0), JSON("id"))
	zipped := zip(t, body)
	for range 3 { // readers are used again
		if key := mustKey(t, f, jsonBody(zipped)); key != "A1" {
			t.Errorf("key = %q", key)
		}
		wantError(t, f, jsonBody(zipped[:len(zipped)-5]), ErrInvalid, "gzip: frame is broken: unexpected EOF")
	}
	if key := mustKey(t, f, jsonBody(zip(t, `{"id":`)+zip(t, `"A1"}`))); key != "A1" {
		t.Errorf("two members: key = %q", key)
	}
	wantError(t, f, jsonBody(body), ErrMissing, "not gzip, which begins with 0x1f 0x8b: first byte is 0x7b")
	wantError(t, f, jsonBody("\x1f"), ErrInvalid, "frame is broken")
	wantError(t, f, jsonBody("\x1f\x00"), ErrMissing, "not gzip")
	wantError(t, f, jsonBody("\x1f\x8b"), ErrInvalid, "frame is broken")
	wantError(t, f, jsonBody(zipped+"x"), ErrInvalid, "frame is broken")
	wantError(t, f, jsonBody(strings.Replace(zipped, zipped[len(zipped)-8:], "01234567", 1)), ErrInvalid, "frame is broken")
	wantError(t, f, jsonBody(zip(t, "")), ErrInvalid, "body is empty")

	// The limit, to the byte.
	if key := mustKey(t, Unwrap(Gzip(int64(len(body))), JSON("id")), jsonBody(zipped)); key != "A1" {
		t.Errorf("key = %q", key)
	}
	wantError(t, Unwrap(Gzip(int64(len(body))-1), JSON("id")), jsonBody(zipped), ErrInvalid, "longer than 10 bytes uncompressed")
	if key := mustKey(t, Unwrap(Gzip(1<<63-1), JSON("id")), jsonBody(zipped)); key != "A1" {
		t.Errorf("key = %q", key)
	}
	wantError(t, f, jsonBody(zip(t, strings.Repeat(" ", defaultGzipLimit+1))), ErrInvalid, "longer than 16777216 bytes")
	if a, b := Unwrap(Gzip(10), JSON("id")).Definition(), f.Definition(); a != b {
		t.Errorf("definitions %q and %q of one key", a, b)
	}
}

// envelope is a user's frame that replaces headers and body.
type envelope struct{ err error }

func (e envelope) Strip(m *broker.Message) (*broker.Message, error) {
	if e.err != nil {
		return nil, e.err
	}
	inner := *m
	inner.Body = bytes.TrimPrefix(m.Body, []byte("envelope:"))
	inner.Headers = broker.Headers{{Name: "kind", Value: []byte("paid")}}
	return &inner, nil
}
func (e envelope) Definition() string { return "env:1" }

func TestOwnFrame(t *testing.T) {
	t.Parallel()
	m := jsonBody(`envelope:{"id":"A1"}`)
	f := Unwrap(envelope{}, Join(JSON("id"), Header("kind")))
	if key := mustKey(t, f, m); key != "A1|paid" {
		t.Errorf("key = %q", key)
	}
	if string(m.Body) != `envelope:{"id":"A1"}` || m.Headers != nil {
		t.Error("the message was changed")
	}
	if d := f.Definition(); d != `unwrap(frame:env\:1|join(json:id|header:kind));v1` {
		t.Errorf("definition = %q", d)
	}
	wantError(t, Unwrap(envelope{err: errors.New("cause")}, JSON("id")), m, ErrInvalid, `unwrap "env:1": function failed: cause`)
	wantError(t, Unwrap(envelope{err: ErrMissing}, JSON("id")), m, ErrMissing, "function found no key")
	wantError(t, Unwrap(&nilFrame{definition: "x"}, JSON("id")), m, ErrInvalid, "frame returned no message")
	stacked := Unwrap(ConfluentFrame(), Unwrap(Gzip(0), JSON("id")))
	if key := mustKey(t, stacked, jsonBody("\x00\x00\x00\x00\x01"+zip(t, `{"id":"A1"}`))); key != "A1" {
		t.Errorf("key = %q", key)
	}
	if _, err := Gzip(-1).Strip(m); !errors.Is(err, ErrDefinition) {
		t.Errorf("Strip = %v", err)
	}
}
