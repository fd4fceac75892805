package keyfunc

import (
	"bytes"
	"encoding/json"
	"errors"
	"math/big"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ackafter/ackafter/broker"
)

// splitTuple is the inverse of the canonical form, written on its own.
func splitTuple(key string) []string {
	var tuple []string
	var component strings.Builder
	for i := 0; i < len(key); i++ {
		switch key[i] {
		case '\\':
			i++
			component.WriteByte(key[i])
		case '|':
			tuple = append(tuple, component.String())
			component.Reset()
		default:
			component.WriteByte(key[i])
		}
	}
	return append(tuple, component.String())
}

// FuzzTuples: two different tuples, of equal or different length, never give one
// key, neither plain nor as parts of another tuple.
//
// case Y3
func FuzzTuples(f *testing.F) {
	f.Add("a|b/c", "a/b|c")
	f.Add("ab/c", "a/bc")
	f.Add("/x", "x/")
	f.Add("a/", "a")
	f.Add(`a\/b`, `a/\b`)
	f.Add(`\|`, `\/|`)
	f.Add("a\xff", "a\xfe")
	plain := &derived{part: varying("a")}
	pair := &derived{part: joinPart{parts: []part{varying("a"), varying("b")}}}
	f.Fuzz(func(t *testing.T, a, b string) {
		keyA, errA := plain.Key(headers("a", a))
		keyB, errB := plain.Key(headers("a", b))
		if errA == nil && !slices.Equal(splitTuple(keyA), strings.Split(a, "/")) {
			t.Errorf("%q has the key %q, which reads %q", a, keyA, splitTuple(keyA))
		}
		if errA != nil || errB != nil {
			if a == b && (errA == nil) != (errB == nil) {
				t.Errorf("%q: %v and %v", a, errA, errB)
			}
			return
		}
		if (keyA == keyB) != (a == b) {
			t.Errorf("%q has the key %q, %q has %q", a, keyA, b, keyB)
		}
		// (a, b) and (b, a), and other groupings of the same components.
		keys := map[string]string{}
		both := a + "/" + b
		for i := range len(both) {
			if both[i] != '/' {
				continue
			}
			key, err := pair.Key(headers("a", both[:i], "b", both[i+1:]))
			if err != nil {
				if len(both) < 1000 {
					t.Fatal(err)
				}
				return // too long once it is escaped
			}
			if other, ok := keys[key]; ok {
				t.Errorf("%q and %q, cut in two ways, have the key %q", both[:i], other, key)
			}
			keys[key] = both[:i]
		}
	})
}

// FuzzDefinition: two different lists of names never have one definition, in
// whatever Func they are.
func FuzzDefinition(f *testing.F) {
	f.Add("a,b", "a/b")
	f.Add(`a\.b`, "a.b")
	f.Add("a|json:b", "a/b")
	f.Add("a);v1", "a")
	f.Add(`a\`, `a/`)
	f.Fuzz(func(t *testing.T, a, b string) {
		seen := map[string]string{}
		for _, names := range []string{a, b} {
			list := strings.Split(names, "/")
			headers := Header(list...)
			if names != strings.ToLower(names) {
				headers = failed(ErrDefinition) // names that differ in case are one
			}
			fn := func(*broker.Message) (string, error) { return "", nil }
			for kind, f := range map[string]Func{
				"json": JSON(list...), "header": headers, "custom": Custom(names, fn), "prefix": Prefix(names, JSON("id")),
				"join": Join(JSON(list...), JSON("id")), "first": First(JSON(list...), JSON("id")),
				"nested": Join(JSON("id"), First(JSON(list...))), "own": Join(own{definition: names}, JSON("id")),
			} {
				if Validate(f) != nil {
					continue
				}
				id := kind + " " + names
				if other, ok := seen[f.Definition()]; ok && other != id {
					t.Errorf("%q and %q have the definition %q", other, id, f.Definition())
				}
				seen[f.Definition()] = id
			}
		}
	})
}

// FuzzUnescape: for every JSON string, the text is that of encoding/json, except
// that what encoding/json would replace is refused.
//
// case Y2
func FuzzUnescape(f *testing.F) {
	for _, s := range []string{"a", `\u0041\n`, `\ud834\udd1e`, `\ud834`, `\udd1e\ud834`, "\xff", "\ufffd", `\uFFFD`, `\ud800\u0041`, `\\u0041`, "\xed\xa0\x80", `\ud800\\udc00`} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, raw string) {
		literal := []byte(`"` + raw + `"`)
		var want string
		if json.Unmarshal(literal, &want) != nil {
			return
		}
		got, rule := appendUnescaped([]byte("before"), []byte(raw))
		got, ok := bytes.CutPrefix(got, []byte("before"))
		if !ok {
			t.Fatal("what was there before is gone")
		}
		replaced := strings.Count(want, "\ufffd") > strings.Count(raw, "\ufffd")+countEscapedReplacement(raw)
		switch accepted := rule == "" && utf8.Valid(got); {
		case accepted == replaced:
			t.Errorf("%q: accepted %v (%s), replaced by encoding/json: %v", raw, accepted, rule, replaced)
		case accepted && string(got) != want:
			t.Errorf("%q: %q, encoding/json says %q", raw, got, want)
		}
	})
}

// countEscapedReplacement counts the escapes of U+FFFD in a JSON string.
func countEscapedReplacement(raw string) (n int) {
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			continue
		}
		if i++; raw[i] == 'u' && strings.EqualFold(raw[i+1:i+5], "fffd") {
			n++
		}
	}
	return n
}

// FuzzNumber: two numbers have one text exactly if they have one value.
//
// case Y4
func FuzzNumber(f *testing.F) {
	f.Add("1", "1.0")
	f.Add("1e0", "10e-1")
	f.Add("9007199254740992", "9007199254740993")
	f.Add("-0", "0")
	f.Add("1e-300", "0.0001e-296")
	f.Add("1e1024", "1e1023")
	f.Fuzz(func(t *testing.T, a, b string) {
		valueA, textA := number(t, a)
		valueB, textB := number(t, b)
		if textA == "" || textB == "" {
			return
		}
		if (valueA.Cmp(valueB) == 0) != (textA == textB) {
			t.Errorf("%s is written %s, %s is written %s", a, textA, b, textB)
		}
	})
}

// number returns the value and the text of a JSON number, "" for what is none.
func number(t *testing.T, in string) (*big.Rat, string) {
	if in == "" || in[0] != '-' && (in[0] < '0' || in[0] > '9') || !json.Valid([]byte(in)) || strings.TrimSpace(in) != in {
		return nil, ""
	}
	text, rule := appendNumber(nil, []byte(in))
	if len(text) > maxNumber || strings.ContainsAny(string(text), "eE+") {
		t.Errorf("%.50s is written %s", in, text)
	}
	// big.Rat would fill the memory with a large exponent.
	if n := strings.IndexAny(in, "eE"); n >= 0 && len(strings.TrimLeft(in[n+1:], "+-0")) > 4 {
		return nil, ""
	}
	value, ok := new(big.Rat).SetString(in)
	if !ok {
		t.Fatalf("big.Rat does not read %q", in)
	}
	if rule != "" {
		// Refused: the shortest plain text must really be too long.
		if plain := strings.TrimRight(value.FloatString(maxNumber), "0"); len(strings.TrimRight(plain, ".")) <= maxNumber && exact(value, plain) {
			t.Errorf("%s is refused, and is %s", in, plain)
		}
		return nil, ""
	}
	if !exact(value, string(text)) {
		t.Errorf("%s is written %s", in, text)
	}
	if again, rule := appendNumber(nil, text); rule != "" || !bytes.Equal(again, text) || !json.Valid(text) {
		t.Errorf("%s is written %s, and that %s", in, text, again)
	}
	return value, string(text)
}

func exact(value *big.Rat, text string) bool {
	other, ok := new(big.Rat).SetString(text)
	return ok && other.Cmp(value) == 0
}

// FuzzJSON holds the walker against an oracle on encoding/json's own decoder:
// the same bodies are accepted and the same values found.
func FuzzJSON(f *testing.F) {
	for _, s := range []string{
		`{"a":"x","b":{"c":1}}`, `{"a":"x","a":1}`, `{"b":{"c":[]},"a":{}}`, `{"a":[[{"c":2}],7]}`, `{"a":{"0":{"c":1}}}`, `{"\u0061":true,"b":{"c":null}}`,
		` [ "x" , { "c" : 1.50e1 } ] `, `{"a":"x"} {`, "\ufeff{}", `{"a":"\ud800"}`, "{\"a\":\"\xff\"}", `{"a":"}","b":"\\"}`, `{"b":null,"a":1}`, `""`, `{"a":[1,[2,3]],"":{}}`, `{"a":1e999999999}`,
	} {
		f.Add([]byte(s))
	}
	paths := [][]string{{"a"}, {"a", "b.c"}, {"a.0.c"}, {"a.0", "a.1.1"}, {"0", "1.c"}}
	funcs := make([]Func, len(paths))
	for i := range paths {
		funcs[i] = JSON(paths[i]...)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		before := bytes.Clone(body)
		for i, f := range funcs {
			key, err := f.Key(&broker.Message{Body: body})
			want, verdict := oracle(body, paths[i])
			switch {
			case verdict == nil && err != nil:
				t.Errorf("%v of %q: %v, want %q", paths[i], body, err, want)
			case verdict == nil && !slices.Equal(splitTuple(key), want):
				t.Errorf("%v of %q: key %q, want %q", paths[i], body, key, want)
			case verdict != nil && !errors.Is(err, ErrInvalid):
				t.Errorf("%v of %q: key %q, %v; want %v", paths[i], body, key, err, verdict)
			case verdict != nil && errors.Is(err, ErrMissing) != errors.Is(verdict, ErrMissing):
				t.Errorf("%v of %q: error %v, want %v", paths[i], body, err, verdict)
			}
		}
		if !bytes.Equal(body, before) {
			t.Error("the body was changed")
		}
	})
}

// oracle finds the tuple at paths in the slow and plain way: it decodes one level
// at a time.
func oracle(body []byte, paths []string) (tuple []string, err error) {
	if body == nil || !json.Valid(body) {
		if body == nil {
			return nil, ErrMissing
		}
		return nil, ErrInvalid
	}
	for _, path := range paths {
		value, e := lookUp(body, strings.Split(path, "."))
		component := ""
		if e == nil {
			component, e = scalar(value)
		}
		switch {
		case e == nil:
			tuple = append(tuple, component)
		case err == nil || errors.Is(err, ErrMissing) && !errors.Is(e, ErrMissing):
			err = e // invalid outranks absent
		}
	}
	return tuple, err
}

func lookUp(value json.RawMessage, path []string) (json.RawMessage, error) {
	if len(path) == 0 {
		return value, nil
	}
	value = bytes.TrimLeft(value, " \t\r\n")
	decoder := json.NewDecoder(bytes.NewReader(value))
	var found []json.RawMessage
	switch value[0] {
	case '{':
		_, _ = decoder.Token()
		for decoder.More() {
			name, _ := decoder.Token()
			var member json.RawMessage
			if err := decoder.Decode(&member); err != nil {
				return nil, err
			}
			if name == path[0] {
				found = append(found, member)
			}
		}
	case '[':
		var elements []json.RawMessage
		if err := decoder.Decode(&elements); err != nil {
			return nil, err
		}
		if path[0] != "0" && path[0] != "1" {
			return nil, ErrInvalid
		}
		if index := int(path[0][0] - '0'); index < len(elements) {
			found = elements[index : index+1]
		}
	default:
		return nil, ErrInvalid
	}
	switch len(found) {
	case 0:
		return nil, ErrMissing
	case 1:
		return lookUp(found[0], path[1:])
	default:
		return nil, ErrInvalid
	}
}

func scalar(value json.RawMessage) (string, error) {
	value = bytes.Trim(value, " \t\r\n")
	switch value[0] {
	case '"':
		var s string
		if err := json.Unmarshal(value, &s); err != nil {
			return "", err
		}
		if strings.Count(s, "\ufffd") > strings.Count(string(value), "\ufffd")+countEscapedReplacement(string(value)) || Check(s) != nil {
			return "", ErrInvalid
		}
		return s, nil
	case 't', 'f':
		return string(value), nil
	case 'n', '{', '[':
		return "", ErrInvalid
	default:
		text, rule := appendNumber(nil, value)
		if rule != "" {
			return "", ErrInvalid
		}
		return string(text), nil
	}
}

// FuzzCloudEvents: one event has one key in all modes.
func FuzzCloudEvents(f *testing.F) {
	f.Add("/source", "id")
	f.Add("a|b", "%41")
	f.Add(`"q"`, `\`)
	f.Add(" ü ", "\U0001d11e")
	f.Fuzz(func(t *testing.T, source, id string) {
		if !utf8.ValidString(source) || !utf8.ValidString(id) {
			return // JSON could not carry them
		}
		percent := func(s string) string {
			var b strings.Builder
			for _, c := range []byte(s) {
				if c <= ' ' || c == '"' || c == '%' || c >= 0x7f {
					b.WriteString("%" + string("0123456789ABCDEF"[c>>4]) + string("0123456789abcdef"[c&15]))
				} else {
					b.WriteByte(c)
				}
			}
			return b.String()
		}
		quoted := func(s string) string {
			return `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`, "%", "%25").Replace(s) + `"`
		}
		events := map[string]*broker.Message{
			"structured": structured("application/cloudevents+json", `{"source":`+quote(source)+`,"id":`+quote(id)+`}`),
			"kafka":      headers("ce_source", source, "ce_id", id),
			"amqp":       headers("cloudEvents:source", source, "cloudEvents:id", id),
			"http":       headers("Ce-Source", percent(source), "Ce-Id", percent(id)),
			"old http":   headers("Ce-Source", quoted(source), "Ce-Id", quoted(id)),
		}
		want, wantErr := Join(Header("ce_source"), Header("ce_id")).Key(events["kafka"])
		for mode, m := range events {
			key, err := CloudEvents().Key(m)
			if key != want || (err == nil) != (wantErr == nil) {
				t.Errorf("%s of %q, %q: %q, %v; want %q, %v", mode, source, id, key, err, want, wantErr)
			}
		}
	})
}

// FuzzFrames: no body breaks a frame, and gzip keeps to its limit.
//
// case K9
func FuzzFrames(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x00\x0c{\"id\":\"A1\"}"))
	f.Add([]byte("\x00\x00\x00\x00\x0c\x04\x02\x06{\"id\":\"A1\"}"))
	f.Add([]byte(zip(f, `{"id":"A1"}`)))
	f.Add([]byte(zip(f, strings.Repeat("x", 2000))))
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, frame := range []Frame{ConfluentFrame(), ConfluentProtobufFrame(), Gzip(1000)} {
			before := bytes.Clone(body)
			m, err := frame.Strip(&broker.Message{ID: "m", Body: body})
			switch {
			case err != nil && !errors.Is(err, ErrInvalid):
				t.Errorf("%s: error %v is not ErrInvalid", frame.Definition(), err)
			case err == nil && (m.ID != "m" || m.Body == nil || len(m.Body) > max(1000, len(body))):
				t.Errorf("%s of %q: %+v", frame.Definition(), body, m)
			case !bytes.Equal(before, body):
				t.Errorf("%s changed the body", frame.Definition())
			}
		}
	})
}
