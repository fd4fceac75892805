package keyfunc

import (
	"errors"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/broker"
)

// jsonBody is a message with a body and nothing else.
func jsonBody(body string) *broker.Message { return &broker.Message{Body: []byte(body)} }

// headers is a message with the headers name, value, name, value ...
func headers(pairs ...string) *broker.Message {
	m := &broker.Message{}
	for i := 0; i < len(pairs); i += 2 {
		m.Headers = append(m.Headers, broker.Header{Name: pairs[i], Value: []byte(pairs[i+1])})
	}
	return m
}

// mustKey returns the key of m and fails the test when there is none.
func mustKey(t *testing.T, f Func, m *broker.Message) string {
	t.Helper()
	key, err := f.Key(m)
	if err != nil {
		t.Fatalf("%s: %v", f.Definition(), err)
	}
	return key
}

// wantError checks the sentinel, and that the text says something.
func wantError(t *testing.T, f Func, m *broker.Message, want error, text string) {
	t.Helper()
	key, err := f.Key(m)
	if err == nil {
		t.Fatalf("%s: key %q, want an error with %q", f.Definition(), key, text)
	}
	if key != "" {
		t.Errorf("%s: key %q beside the error %v", f.Definition(), key, err)
	}
	if !errors.Is(err, want) || !errors.Is(err, ErrInvalid) || errors.Is(err, ErrDefinition) {
		t.Errorf("%s: error %v is not %v", f.Definition(), err, want)
	}
	if want != ErrMissing && errors.Is(err, ErrMissing) { //nolint:errorlint // a sentinel is asked for by identity
		t.Errorf("%s: error %v must not be ErrMissing", f.Definition(), err)
	}
	if typed := (*Error)(nil); !errors.As(err, &typed) || typed.Func == "" || typed.Rule == "" {
		t.Errorf("%s: error %#v is no complete *Error", f.Definition(), err)
	}
	if !strings.HasPrefix(err.Error(), "keyfunc: ") || !strings.Contains(err.Error(), text) {
		t.Errorf("%s: error %q does not say %q", f.Definition(), err, text)
	}
}

// own is a Func from outside of the package.
type own struct {
	key, definition string
	err, errAtStart error
	panics          any
}

func (o own) Key(*broker.Message) (string, error) {
	if o.panics != nil {
		panic(o.panics)
	}
	return o.key, o.err
}
func (o own) Definition() string { return o.definition }
func (o own) Err() error         { return o.errAtStart }

// pointer is a Func on which a nil pointer panics.
type pointer struct{ definition string }

func (p *pointer) Key(*broker.Message) (string, error) { return p.definition, nil }
func (p *pointer) Definition() string                  { return p.definition }

type nilFrame struct{ definition string }

func (f *nilFrame) Strip(m *broker.Message) (*broker.Message, error) { return nil, nil }
func (f *nilFrame) Definition() string                               { return f.definition }

func TestUnusableArguments(t *testing.T) {
	t.Parallel()
	fn := func(*broker.Message) (string, error) { return "k", nil }
	secret := []byte("0123456789abcdef0123456789abcdef")
	good := MessageID()
	tests := []struct {
		name string
		f    Func
		want string
	}{
		{"nil func", nil, "must not be nil"},
		{"nil pointer", (*pointer)(nil), "must not be nil"},
		{"own blank definition", own{definition: " "}, "definition is blank"},
		{"own definition with newline", own{definition: "a\nb"}, "control character"},
		{"own definition not UTF-8", own{definition: "a\xff"}, "not valid UTF-8"},
		{"own definition too long", own{definition: strings.Repeat("a", 4097)}, "longer than 4096 bytes"},
		{"own error", own{definition: "x", errAtStart: errors.New("no schema")}, "no schema"},

		{"json no path", JSON(), "at least one path"},
		{"json blank path", JSON("id", " "), "path 2 is blank"},
		{"json empty path", JSON(""), "path 1 is blank"},
		{"json empty step", JSON("a..b"), "path 1 has an empty step"},
		{"json leading dot", JSON(".a"), "empty step"},
		{"json trailing dot", JSON("a."), "empty step"},
		{"json trailing backslash", JSON(`a\`), "backslash"},
		{"json unknown escape", JSON(`a\n`), "backslash"},
		{"json control character", JSON("a\x01"), "control character"},
		{"json NUL", JSON("a\x00"), "control character"},
		{"json not UTF-8", JSON("a\xff"), "not valid UTF-8"},
		{"json path of another language", JSON("$.order.id"), `begins with "$."`},
		{"json too many steps", JSON(strings.Repeat("a.", 32) + "a"), "more than 32 steps"},
		{"json twice", JSON("a.b", "a.b"), `"a.b": is given twice`},
		{"json prefix", JSON("a", "a.b"), "lead into each other"},
		{"json prefix reversed", JSON("a.b", "a"), "lead into each other"},
		{"json too much", JSON(strings.Repeat("a", 4096)), "longer than 4096 bytes"},

		{"header no name", Header(), "at least one name"},
		{"header blank name", Header("a", ""), "name 2 is blank"},
		{"header twice", Header("Id", "iD"), "named twice"},
		{"header control character", Header("a\r\nb"), "control character"},

		{"join nothing", Join(), "at least one part"},
		{"join nil", Join(good, nil), "part 2 cannot be used"},
		{"join unusable", Join(good, JSON()), "at least one path"},
		{"first nothing", First(), "at least one part"},
		{"first nil", First(nil), "part 1 cannot be used"},
		{"prefix blank", Prefix("\u00a0", good), "text is blank"},
		{"prefix NUL", Prefix("a\x00", good), "NUL"},
		{"prefix nil", Prefix("a", nil), "must not be nil"},
		{"hmac no secret", HMAC(nil, good), "shorter than 16 bytes"},
		{"hmac short secret", HMAC(secret[:15], good), "shorter than 16 bytes"},
		{"hmac nil", HMAC(secret, nil), "must not be nil"},
		{"custom blank", Custom("", fn), "definition is blank"},
		{"custom nil", Custom("x", nil), `"x": function must not be nil`},
		{"unwrap nil frame", Unwrap(nil, good), "frame must not be nil"},
		{"unwrap nil pointer", Unwrap((*nilFrame)(nil), good), "frame must not be nil"},
		{"unwrap blank definition", Unwrap(&nilFrame{}, good), "definition of the frame is blank"},
		{"unwrap negative limit", Unwrap(Gzip(-1), good), "limit must not be negative"},
		{"unwrap nil", Unwrap(Gzip(0), nil), "must not be nil"},
		{"nested", First(Join(Prefix("a", HMAC(secret, Unwrap(Gzip(0), JSON(".")))))), "empty step"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			err := Validate(tt.f)
			if err == nil {
				t.Fatal("Validate accepted it")
			}
			if !errors.Is(err, ErrDefinition) || errors.Is(err, ErrInvalid) || errors.Is(err, ErrMissing) {
				t.Errorf("error %v is not only ErrDefinition", err)
			}
			if !strings.HasPrefix(err.Error(), "keyfunc: ") || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %q does not say %q", err, tt.want)
			}
			if f, ok := tt.f.(*derived); ok {
				if key, err := f.Key(jsonBody(`{}`)); key != "" || !errors.Is(err, ErrDefinition) {
					t.Errorf("Key = %q, %v; want ErrDefinition", key, err)
				}
				if !errors.Is(f.Err(), ErrDefinition) {
					t.Errorf("Err = %v", f.Err())
				}
				if f.Definition() != "" {
					t.Errorf("Definition = %q of an unusable Func", f.Definition())
				}
			}
		})
	}
}

func TestValidateAccepts(t *testing.T) {
	t.Parallel()
	for _, f := range []Func{
		JSON("a"), Header("a"), BrokerKey(), MessageID(), CloudEvents(), BodyHash(),
		own{definition: "order id"}, &pointer{definition: "x"},
	} {
		if err := Validate(f); err != nil {
			t.Errorf("Validate(%s) = %v", f.Definition(), err)
		}
		if f, ok := f.(*derived); ok && f.Err() != nil {
			t.Errorf("Err of %s = %v", f.Definition(), f.Err())
		}
	}
}

func TestNilMessage(t *testing.T) {
	t.Parallel()
	for _, f := range []Func{
		JSON("a"), Header("a"), BrokerKey(), MessageID(), CloudEvents(), BodyHash(),
		Unwrap(Gzip(0), JSON("a")), Custom("x", func(m *broker.Message) (string, error) { return m.ID, nil }),
	} {
		wantError(t, f, nil, ErrInvalid, "message is nil")
	}
	if _, err := Gzip(0).Strip(nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("Strip(nil) = %v", err)
	}
	if _, err := Derive(own{definition: "x", key: "k"}, nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("Derive(nil) = %v", err)
	}
}

func TestDerive(t *testing.T) {
	t.Parallel()
	m := jsonBody(`{"id":"a|b"}`)
	if key, err := Derive(JSON("id"), m); key != `a\|b` || err != nil {
		t.Errorf("own Func: %q, %v", key, err)
	}
	// The key of a foreign Func is checked and not changed.
	if key, err := Derive(own{key: "a|b", definition: "x"}, m); key != "a|b" || err != nil {
		t.Errorf("foreign Func: %q, %v", key, err)
	}
	if _, err := Derive(nil, m); !errors.Is(err, ErrDefinition) {
		t.Errorf("nil Func: %v", err)
	}
	for want, f := range map[string]own{
		"is blank":                             {key: " \u2003"},
		"NUL":                                  {key: "a\x00b"},
		"UTF-8":                                {key: "a\xff"},
		"65536":                                {key: strings.Repeat("k", MaxSize+1)},
		"function failed: no luck":             {err: errors.New("no luck")},
		"panicked: runtime error":              {panics: runtimeError()},
		"panicked with a value of type string": {panics: "SECRET"},
	} {
		key, err := Derive(f, m)
		if key != "" || !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) {
			t.Errorf("Derive = %q, %v; want %q", key, err, want)
		}
		if strings.Contains(err.Error(), "SECRET") {
			t.Errorf("error shows the value: %v", err)
		}
	}
	if _, err := Derive(own{err: ErrMissing}, m); !errors.Is(err, ErrMissing) {
		t.Errorf("foreign ErrMissing: %v", err)
	}
}

// runtimeError is the value of a panic that the runtime made.
func runtimeError() (value any) {
	defer func() { value = recover() }()
	var none []int
	_ = none[len(none)]
	return nil
}

func TestCheck(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"a", "a|b", "\ufffd", "\u00fc", " a ", strings.Repeat("k", MaxSize)} {
		if err := Check(key); err != nil {
			t.Errorf("Check(%.20q) = %v", key, err)
		}
	}
	for _, key := range []string{"", " ", "\t\n", "\u00a0\u3000\u2028", "\u200b\ufeff", "\x01\x7f", "a\x00", "\xff", strings.Repeat("k", MaxSize+1)} {
		if err := Check(key); !errors.Is(err, ErrInvalid) || errors.Is(err, ErrMissing) {
			t.Errorf("Check(%.20q) = %v", key, err)
		}
	}
}

func TestKeyIsBounded(t *testing.T) {
	t.Parallel()
	half := strings.Repeat("k", MaxSize/2)
	fits := JSON("a", "b")
	if key := mustKey(t, fits, jsonBody(`{"a":"`+half+`","b":"`+half[1:]+`"}`)); len(key) != MaxSize {
		t.Errorf("len = %d", len(key))
	}
	wantError(t, fits, jsonBody(`{"a":"`+half+`","b":"`+half+`"}`), ErrInvalid, "longer than 65536 bytes")
	wantError(t, JSON("a"), jsonBody(`{"a":"`+half+half+`k"}`), ErrInvalid, `"a": is longer than 65536 bytes`)
	wantError(t, JSON("a"), jsonBody(`{"a":"`+strings.Repeat("|", MaxSize)+`"}`), ErrInvalid, "longer than 65536 bytes")
	wantError(t, Header("h"), headers("h", half+half+"k"), ErrInvalid, "longer than 65536 bytes")
	secret := []byte("0123456789abcdef")
	wantError(t, HMAC(secret, fits), jsonBody(`{"a":"`+half+`","b":"`+half+`"}`), ErrInvalid, "longer than 65536 bytes")
}

func TestErrors(t *testing.T) {
	t.Parallel()
	cause := errors.New("cause")
	tests := []struct {
		err              *Error
		text             string
		invalid, missing bool
	}{
		{&Error{Func: "json", Field: "a.b", Rule: "is blank"}, `keyfunc: json "a.b": is blank`, true, false},
		{&Error{Func: "json", Rule: "is blank", Err: ErrInvalid}, `keyfunc: json: is blank`, true, false},
		{&Error{Func: "json", Field: "a", Rule: "is missing", Err: ErrMissing}, `keyfunc: json "a": is missing`, true, true},
		{&Error{Func: "gzip", Rule: "is broken", Err: cause}, `keyfunc: gzip: is broken: cause`, true, false},
		{&Error{Func: "json", Rule: "needs a path", Err: ErrDefinition}, `keyfunc: json: needs a path`, false, false},
	}
	for _, tt := range tests {
		if got := tt.err.Error(); got != tt.text {
			t.Errorf("text %q, want %q", got, tt.text)
		}
		if errors.Is(tt.err, ErrInvalid) != tt.invalid || errors.Is(tt.err, ErrMissing) != tt.missing {
			t.Errorf("%v: ErrInvalid %v, ErrMissing %v", tt.err, errors.Is(tt.err, ErrInvalid), errors.Is(tt.err, ErrMissing))
		}
	}
	if !errors.Is(tests[3].err, cause) {
		t.Error("the cause is lost")
	}
	if !errors.Is(ErrMissing, ErrInvalid) {
		t.Error("ErrMissing is not ErrInvalid")
	}
}
