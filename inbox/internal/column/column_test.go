package column_test

import (
	"reflect"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

func TestKey(t *testing.T) {
	t.Parallel()
	for _, key := range []string{"", "a", strings.Repeat("x", 512), "é"} {
		if got := column.Key(key); got != key {
			t.Errorf("Key of %d bytes: changed to %q", len(key), got)
		}
	}
	long := column.Key(strings.Repeat("x", 513))
	if len(long) > 512 || !strings.HasPrefix(long, strings.Repeat("x", 100)) {
		t.Errorf("a long key must be stored short, with a readable prefix: %q", long)
	}
	if again := column.Key(long); again == long {
		t.Error("a key that looks like a stored hash must not collide with it")
	}
	if column.Key(strings.Repeat("x", 513)) == column.Key(strings.Repeat("x", 514)) {
		t.Error("two long keys share a stored form")
	}
	// A key that looks like a stored hash and is as long as the readable prefix.
	if got := column.Key(strings.Repeat("a", 54) + "…sha256:" + strings.Repeat("0", 64)); len(got) > 512 {
		t.Errorf("stored form of %d bytes", len(got))
	}
	odd := column.Key(strings.Repeat("é", 400) + "x")
	if !utf8.ValidString(odd) {
		t.Errorf("cut inside a rune: %q", odd)
	}
}

// What a table shows of a key leads to the same row as the key itself.
func TestStoredKeys(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("x", 513)
	odd := column.Key(long) // A key that looks like a stored form.
	for _, key := range []string{"", "a", strings.Repeat("é", 256), long, odd} {
		stored := column.Key(key)
		if again := column.Stored(stored); again != stored {
			t.Errorf("Stored(%q) = %q, want the same", stored, again)
		}
		for _, text := range []string{key, stored} {
			if forms := column.Forms(text); !slices.Contains(forms, stored) || len(forms) > 2 {
				t.Errorf("Forms(%q) = %q, without %q", text, forms, stored)
			}
		}
	}
	if got := column.Stored(long); got != odd {
		t.Errorf("a long key that was derived anew: %q", got)
	}
	if forms := column.Forms(odd); forms[0] != column.Key(odd) {
		t.Errorf("the key itself comes first: %q", forms)
	}
}

func TestLane(t *testing.T) {
	t.Parallel()
	for _, lane := range []string{"", "orders/3\x00\xff", strings.Repeat("x", 512)} {
		if got := column.Lane(lane); string(got) != lane {
			t.Errorf("Lane of %d bytes: changed to %q", len(lane), got)
		}
	}
	long := column.Lane(strings.Repeat("x", 513))
	if len(long) > 512 || string(column.Lane(string(long))) != string(long) {
		t.Errorf("Lane of 513 bytes: %q", long)
	}
	if string(column.Lane(strings.Repeat("x", 514))) == string(long) {
		t.Error("two lanes have the same form")
	}
}

func TestText(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in    string
		limit int
		want  string
	}{
		{"plain", 10, "plain"},
		{"a\x00b", 10, "a\uFFFDb"},
		{"a\xffb", 10, "a\uFFFDb"},
		{"éé", 3, "é"},
		{"abc", 0, ""},
	} {
		if got := column.Text(c.in, c.limit); got != c.want {
			t.Errorf("Text(%q, %d) = %q, want %q", c.in, c.limit, got, c.want)
		}
	}
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	in := broker.Headers{{Name: "a", Value: []byte{0, 0xff}}, {Name: "a", Value: []byte("2")}, {Name: "\xff", Value: []byte("x")}}
	out, err := column.DecodeHeaders(column.EncodeHeaders(in))
	if err != nil || !reflect.DeepEqual(in, out) {
		t.Errorf("round trip: %v, %v", out, err)
	}
	if _, err := column.DecodeHeaders([]byte("{")); err == nil {
		t.Error("broken headers decode without an error")
	}
}
