package keyfunc

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/broker"
)

// case Y1
func TestNUL(t *testing.T) {
	t.Parallel()
	f := JSON("id")
	wantError(t, f, jsonBody(`{"id":"a\u0000b"}`), ErrInvalid, `"id": holds a NUL`)
	wantError(t, Header("id"), headers("id", "a\x00b"), ErrInvalid, `"id": holds a NUL`)
	wantError(t, BrokerKey(), &broker.Message{Key: []byte("a\x00b")}, ErrInvalid, "NUL")
	// Elsewhere in the body it is not the key's matter.
	if key := mustKey(t, f, jsonBody(`{"note":"a\u0000b","\u0000":1,"id":"A1"}`)); key != "A1" {
		t.Errorf("key = %q", key)
	}
}

// case Y2
func TestInvalidUnicode(t *testing.T) {
	t.Parallel()
	f := JSON("id")
	for _, id := range []string{"a\xffb", "a\xfeb", "\xc3", "\xed\xa0\x80", "\xc0\x80", "\xf4\x90\x80\x80"} {
		wantError(t, f, jsonBody(`{"id":"`+id+`"}`), ErrInvalid, "not valid UTF-8")
		wantError(t, Header("id"), headers("id", id), ErrInvalid, "not valid UTF-8")
		wantError(t, BrokerKey(), &broker.Message{Key: []byte(id)}, ErrInvalid, "not valid UTF-8")
	}
	for _, id := range []string{`\ud800`, `\udbff`, `\udc00`, `\ud800x`, `\ud800\ud800`, `\ud800\u0041`, `\udc00\ud800`, `x\uD834`, `\ud800\n\udc00`, `\ud834xudd1e`, `\ud834\ndd1e`, `\ud834udd1ex`} {
		wantError(t, f, jsonBody(`{"id":"`+id+`"}`), ErrInvalid, "lone surrogate")
	}
	for in, want := range map[string]string{
		"\ufffd": "\ufffd", `\ufffd`: "\ufffd", `\uFFFD\ud834\udd1e`: "\ufffd\U0001d11e", `\uD834\uDD1E`: "\U0001d11e",
		"ü": "ü", `\u00fc`: "ü", `\/\"\b\f\n\r\tx`: "/\"\b\f\n\r\tx",
	} {
		if key := mustKey(t, f, jsonBody(`{"id":"`+in+`"}`)); key != want {
			t.Errorf("%s: key %q, want %q", in, key, want)
		}
	}
	// Elsewhere in the body it is not the key's matter.
	if key := mustKey(t, f, jsonBody("{\"note\":\"\xff\",\"\xfe\":\"\\ud800\",\"\\udfff\":1,\"id\":\"A1\"}")); key != "A1" {
		t.Errorf("key = %q", key)
	}
}

// case Y3
func TestTuplesDiffer(t *testing.T) {
	t.Parallel()
	two := JSON("x", "y")
	key := func(x, y string) string {
		return mustKey(t, two, jsonBody(`{"x":`+quote(x)+`,"y":`+quote(y)+`}`))
	}
	seen := map[string]string{}
	for _, pair := range [][2]string{{"a|b", "c"}, {"a", "b|c"}, {"ab", "c"}, {"a", "bc"}, {`a\`, "c"}, {"a", `\c`}, {`a\|b`, "c"}, {`a\`, "b|c"}, {"|", "|"}, {`\`, `\`}, {"null", "x"}} {
		k := key(pair[0], pair[1])
		if other, ok := seen[k]; ok {
			t.Errorf("%q and %s have the key %q", pair, other, k)
		}
		seen[k] = fmt.Sprintf("%q", pair)
	}
	if got := key("a|b", "c"); got != `a\|b|c` {
		t.Errorf("key = %q", got)
	}

	// An empty component is never a component.
	wantError(t, two, jsonBody(`{"x":"","y":"x"}`), ErrInvalid, `"x": is blank`)
	wantError(t, two, jsonBody(`{"x":"x","y":""}`), ErrInvalid, `"y": is blank`)
	wantError(t, two, jsonBody(`{"x":"a"}`), ErrMissing, `"y": is missing`)

	// missing, null, "null" and ""
	one := JSON("id")
	wantError(t, one, jsonBody(`{}`), ErrMissing, `"id": is missing`)
	wantError(t, one, jsonBody(`{"id":null}`), ErrInvalid, `"id": is null`)
	wantError(t, one, jsonBody(`{"id":""}`), ErrInvalid, `"id": is blank`)
	if k := mustKey(t, one, jsonBody(`{"id":"null"}`)); k != "null" {
		t.Errorf("key = %q", k)
	}
}

// case Y4
func TestNumbers(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"9007199254740992":             "9007199254740992",
		"9007199254740993":             "9007199254740993",
		"12345678":                     "12345678",
		"1":                            "1",
		"1.0":                          "1",
		"1e0":                          "1",
		"1E+0":                         "1",
		"10e-1":                        "1",
		"0.001e3":                      "1",
		`"1"`:                          "1", // the number 1 and the string "1" are one key
		`"1.0"`:                        "1.0",
		`"1e0"`:                        "1e0",
		`"01"`:                         "01",
		"-1":                           "-1",
		"0":                            "0",
		"-0":                           "0",
		"0.000":                        "0",
		"-0.0e-5":                      "0",
		"0e99999999999999999999999999": "0",
		"2.50":                         "2.5",
		"0.1":                          "0.1",
		"-12.034500e2":                 "-1203.45",
		"1e3":                          "1000",
		"1.23e1":                       "12.3",
		"100":                          "100",
		"1e-3":                         "0.001",
		"12345678901234567890123456789012345678901234567890": "12345678901234567890123456789012345678901234567890",
		"1" + strings.Repeat("0", 1023):                      "1" + strings.Repeat("0", 1023),
		"1e1023":                                             "1" + strings.Repeat("0", 1023),
		"1e-1022":                                            "0." + strings.Repeat("0", 1021) + "1",
		"0." + strings.Repeat("0", 5000) + "1e5001":          "1",
		"1" + strings.Repeat("0", 5000) + "e-5000":           "1",
		"1" + strings.Repeat("0", 5000) + "e-00000000000000000005000": "1",
	} {
		if key := mustKey(t, JSON("id"), jsonBody(`{"id":`+in+`}`)); key != want {
			t.Errorf("%.40s: key %.40q, want %.40q", in, key, want)
		}
	}
	for _, in := range []string{"1e1024", "-1e1023", "1e-1023", "1e400000000", "1E-400000000", "1e99999999999999999999", "1e18446744073709551616", "1e-18446744073709551617", "-1e-99999999999999999999", strings.Repeat("1", 1025), "0." + strings.Repeat("3", 1023)} {
		wantError(t, JSON("id"), jsonBody(`{"id":`+in+`}`), ErrInvalid, "more than 1024 characters")
	}
}

// case Y5
func TestNoKeyIsShared(t *testing.T) {
	t.Parallel()
	f := JSON("id")
	wantError(t, f, jsonBody(`{}`), ErrMissing, `json "id": is missing`)
	for in, want := range map[string]string{
		"null": "is null", `""`: "is blank", `"   "`: "is blank", `"\t\n"`: "is blank", `"\u00a0\u2003\u3000"`: "is blank",
		`"\u200b\ufeff"`: "is blank", `"\u0001"`: "is blank", "{}": "is an object", "[]": "is an array", `{"a":1}`: "is an object", `["A1"]`: "is an array",
	} {
		wantError(t, f, jsonBody(`{"id":`+in+`}`), ErrInvalid, `json "id": `+want)
	}

	// Two events of one order are two keys.
	f = JSON("orderId", "eventType")
	paid := mustKey(t, f, jsonBody(`{"eventType":"order.paid","orderId":"A1"}`))
	shipped := mustKey(t, f, jsonBody(`{"orderId":"A1","eventType":"order.shipped"}`))
	if paid != "A1|order.paid" || shipped != "A1|order.shipped" {
		t.Errorf("keys %q, %q", paid, shipped)
	}
}

func TestBooleans(t *testing.T) {
	t.Parallel()
	if key := mustKey(t, JSON("a", "b"), jsonBody(`{"a":true,"b":false}`)); key != "true|false" {
		t.Errorf("key = %q", key)
	}
}

func TestJSONPaths(t *testing.T) {
	t.Parallel()
	const body = ` { "order" : { "id" : "A1" , "lines" : [ { "sku" : 1 } , [ "x" , "y" ] , "z" ] } ,
		"a.b" : "dot" , "a" : { "b" : "nested", "c\\d" : "backslash" } , "0" : "zero" , "list" : { "01" : "leading", "7" : "seven" } , "" : "empty", "ü" : "umlaut", "last" : 1 } `
	for path, want := range map[string]string{
		"order.id": "A1", "order.lines.0.sku": "1", "order.lines.1.1": "y", "order.lines.2": "z",
		`a\.b`: "dot", "a.b": "nested", `a.c\\d`: "backslash", "0": "zero", "list.01": "leading", "list.7": "seven", "ü": "umlaut", "last": "1",
	} {
		if key := mustKey(t, JSON(path), jsonBody(body)); key != want {
			t.Errorf("%s: key %q, want %q", path, key, want)
		}
	}
	if key := mustKey(t, JSON("last", "order.lines.1.0", "order.id", "a.b", `a\.b`), jsonBody(body)); key != "1|x|A1|nested|dot" {
		t.Errorf("key = %q", key)
	}
	for path, want := range map[string]string{
		"order.ID": "is missing", "Order.id": "is missing", "order.lines.3": "is missing", "order.lines.1.2": "is missing", "nothing.at.all": "is missing",
		"order.lines.999999999": "is missing", "list.8": "is missing",
	} {
		wantError(t, JSON(path), jsonBody(body), ErrMissing, want)
	}
	for path, want := range map[string]string{
		"order": `"order": is an object`, "order.lines": "is an array", "order.id.x": `"order.id": is a string, must be an object`,
		"order.lines.sku": `"order.lines": is an array, must be an object`, "order.lines.00": "is an array", "last.x": "is a number, must be an object",
		"order.lines.1234567890": "is an array, must be an object",
	} {
		wantError(t, JSON(path), jsonBody(body), ErrInvalid, want)
	}
	// At the root.
	if key := mustKey(t, JSON("1.id"), jsonBody(`[0,{"id":"A1"}]`)); key != "A1" {
		t.Errorf("key = %q", key)
	}
	for body, want := range map[string]string{`"A1"`: "body is a string", `1`: "body is a number", `null`: "body is null", ` true `: "body is a boolean", `[]`: "body is an array"} {
		wantError(t, JSON("id"), jsonBody(body), ErrInvalid, want+", must be an object")
	}
	// A literal ends at any white space.
	if key := mustKey(t, JSON("a", "b", "c", "d"), jsonBody("{\"a\":1\r,\"b\":2\t,\"c\":3\n,\"d\":true\r\n}")); key != "1|2|3|true" {
		t.Errorf("key = %q", key)
	}
	// A null on the way is not an absent member.
	wantError(t, JSON("order.id"), jsonBody(`{"order":null}`), ErrInvalid, `"order": is null, must be an object`)
	wantError(t, JSON("order.id"), jsonBody(`{"order":{}}`), ErrMissing, `"order.id": is missing`)
	// Invalid outranks absent, in either order.
	wantError(t, JSON("a", "b"), jsonBody(`{"b":null}`), ErrInvalid, `"b": is null`)
	wantError(t, JSON("b", "a"), jsonBody(`{"b":null}`), ErrInvalid, `"b": is null`)
}

func TestManyPaths(t *testing.T) {
	t.Parallel()
	var paths, want []string
	var body strings.Builder
	body.WriteString(`{"x":0`)
	for i := range 3 * fewSteps {
		paths = append(paths, fmt.Sprintf("f%d", i))
		want = append(want, fmt.Sprint(i*i))
		fmt.Fprintf(&body, `,"f%d":%d`, i, i*i)
	}
	body.WriteString("}")
	if key := mustKey(t, JSON(paths...), jsonBody(body.String())); key != strings.Join(want, "|") {
		t.Errorf("key = %q", key)
	}
	deep := strings.TrimSuffix(strings.Repeat("a.", maxSteps), ".")
	if key := mustKey(t, JSON(deep), jsonBody(strings.Repeat(`{"b":[{}],"a":`, maxSteps)+`"A1"`+strings.Repeat("}", maxSteps))); key != "A1" {
		t.Errorf("key = %q", key)
	}
}

func TestRepeatedNames(t *testing.T) {
	t.Parallel()
	for _, body := range []string{
		`{"id":"A1","id":"A2"}`, `{"id":"A1","id":"A1"}`, `{"id":"A1","x":{},"\u0069d":"A1"}`, `{"\u0069\u0064":1,"i\u0064":1}`, `{"id":null,"id":"A1"}`, `{"id":"A1","id":null}`,
	} {
		wantError(t, JSON("id"), jsonBody(body), ErrInvalid, `"id": is repeated`)
	}
	for _, body := range []string{`{"order":{"id":1},"order":{"id":1}}`, `{"order":{"id":1},"order":{}}`, `{"order":{},"order":{"id":1}}`, `{"order":{"id":1},"order":null}`} {
		wantError(t, JSON("order.id"), jsonBody(body), ErrInvalid, `"order": is repeated`)
	}
	wantError(t, JSON("order.id"), jsonBody(`{"order":{"id":1,"id":1}}`), ErrInvalid, `"order.id": is repeated`)
	wantError(t, JSON("0.id"), jsonBody(`[{"id":1,"id":1}]`), ErrInvalid, `"0.id": is repeated`)
	// Off the path, or in another case, a name is somebody else's.
	for _, body := range []string{
		`{"x":1,"x":2,"id":"A1"}`, `{"ID":"X","id":"A1","Id":"Y"}`, `{"a":{"id":1,"id":2},"id":"A1"}`, `{"i\\u0064":"X","id":"A1"}`, `{"id\u0000":"X","id":"A1"}`, `{"id\ud800":"X","id":"A1"}`,
		`{"id ":"X","id":"A1"}`, `[{"id":"A1"}]`, `{"x":"\"id\":\"X\"","id":"A1"}`, `{"x":"}","y":["]"],"id":"A1"}`, `{"x":"\\","id":"A1"}`, `{"x":[[[]],{"a":[{}]}],"id":"A1","z":[{"id":"B"}]}`,
	} {
		f := JSON("id")
		if body[0] == '[' {
			f = JSON("0.id")
		}
		if key := mustKey(t, f, jsonBody(body)); key != "A1" {
			t.Errorf("%s: key %q", body, key)
		}
	}
	// A name that is not valid Unicode is not the one it would be replaced by.
	wantError(t, JSON("a\ufffd"), jsonBody("{\"a\xff\":1,\"a\\ud800\":2}"), ErrMissing, "is missing")
}

// case K9
func TestBodyIsNotJSON(t *testing.T) {
	t.Parallel()
	f := JSON("id")
	wantError(t, f, &broker.Message{}, ErrMissing, "message has no body")
	wantError(t, f, jsonBody(""), ErrInvalid, "body is empty")
	var zipped bytes.Buffer
	w := gzip.NewWriter(&zipped)
	_, _ = w.Write([]byte(`{"id":"A1"}`))
	_ = w.Close()
	for body, want := range map[string]string{
		"\x00\x00\x00\x00\x0c{\"id\":\"A1\"}": "first byte is 0x00, as in the frame of a schema registry",
		zipped.String():                       "first byte is 0x1f, as in gzip",
		"\xef\xbb\xbf{\"id\":\"A1\"}":         "first byte is 0xef, a byte order mark",
		"hello":                               "first byte is 0x68, syntax error near byte",
		"<id>A1</id>":                         "first byte is 0x3c",
		"\xff\xfe{":                           "first byte is 0xff",
		" ":                                   "first byte is 0x20, body ends too early, at byte 1",
		`{"id":"A1"`:                          "first byte is 0x7b, body ends too early, at byte 10",
		`{"id":"A1",}`:                        "syntax error near byte 1",
		`{"id":"A1"} x`:                       "data follows the JSON value at byte 11",
		`{"id":"A1"}{"id":"A2"}`:              "data follows the JSON value at byte 11",
		"{\"id\":\"A1\"}\x00":                 "data follows the JSON value",
		"{\"id\":\"A\x001\"}":                 "syntax error",
		`{"id":01}`:                           "syntax error",
		`{"id":.5}`:                           "syntax error",
		`{"id":NaN}`:                          "syntax error",
		`{'id':1}`:                            "syntax error",
		`{"id":"\x41"}`:                       "syntax error",
		strings.Repeat("[", 100_000) + strings.Repeat("]", 100_000):                                "syntax error",
		`{"id":"A1","x":` + strings.Repeat(`{"id":`, 100_000) + `1` + strings.Repeat("}", 100_001): "syntax error",
	} {
		wantError(t, f, jsonBody(body), ErrInvalid, want)
	}
	// Deep, but still JSON to the standard library.
	if key := mustKey(t, f, jsonBody(`{"x":`+strings.Repeat("[", 9000)+strings.Repeat("]", 9000)+`,"id":"A1"}`)); key != "A1" {
		t.Errorf("key = %q", key)
	}
}

// Values are personal data: no error shows one.
func TestErrorsShowNoValues(t *testing.T) {
	t.Parallel()
	const secret = "jane.doe"
	tests := []struct {
		f Func
		m *broker.Message
	}{
		{JSON("id"), jsonBody(`{"id":["` + secret + `"]}`)},
		{JSON("id"), jsonBody(`{"id":"` + secret + `\u0000"}`)},
		{JSON("id"), jsonBody(`{"id":"` + secret + "\xff" + `"}`)},
		{JSON("id"), jsonBody(`{"id":"` + secret + `\ud800"}`)},
		{JSON("id"), jsonBody(`{"id":"` + secret + `","id":1}`)},
		{JSON("id"), jsonBody(`{"id":"` + secret + `"`)},
		{JSON("id"), jsonBody(`"` + secret + `"`)},
		{JSON("id"), jsonBody(secret)},
		{JSON("id.x"), jsonBody(`{"id":"` + secret + `"}`)},
		{JSON("x"), jsonBody(`{"id":"` + secret + `"}`)},
		{JSON("id"), jsonBody(`{"id":"` + strings.Repeat(secret, 10000) + `"}`)},
		{Header("h"), headers("h", secret, "h", secret)},
		{Header("h"), headers("h", secret+"\x00")},
		{BrokerKey(), &broker.Message{Key: []byte(secret + "\xff")}},
		{MessageID(), &broker.Message{ID: secret + "\x00"}},
		{CloudEvents(), headers("ce-id", secret+"%", "ce-source", secret)},
		{CloudEvents(), headers("ce_id", secret)},
		{CloudEvents(), &broker.Message{Headers: headers("content-type", "application/cloudevents+xml; x="+secret).Headers}},
		{Custom("c", func(*broker.Message) (string, error) { panic(secret) }), &broker.Message{}},
		{Custom("c", func(*broker.Message) (string, error) { return secret + "\x00", nil }), &broker.Message{}},
		{Unwrap(Gzip(0), JSON("id")), jsonBody("\x1f\x8b" + secret + secret)},
		{First(Header(secretless), JSON("x")), jsonBody(`{"id":"` + secret + `"}`)},
	}
	for _, tt := range tests {
		_, err := tt.f.Key(tt.m)
		if !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: error %v", tt.f.Definition(), err)
			continue
		}
		if strings.Contains(err.Error(), secret) {
			t.Errorf("%s: the error shows the value: %v", tt.f.Definition(), err)
		}
	}
}

const secretless = "X-Id"

func quote(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}
