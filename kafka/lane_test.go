package kafka

import (
	"bytes"
	"strings"
	"testing"
	randomly "testing/quick"
)

func TestLaneNames(t *testing.T) {
	t.Parallel()
	p := partitionLane("orders", 3)
	long := bytes.Repeat([]byte("x"), 201)
	for _, tc := range []struct {
		key  []byte
		want string
	}{
		{nil, "orders/3"},
		{[]byte{}, "orders/3/"},
		{[]byte("A1"), "orders/3/A1"},
		{[]byte("a/b"), "orders/3/a/b"},
		{[]byte("50% off"), "orders/3/50%25%20off"},
		{[]byte{0, 0xff, 'ß'}, "orders/3/%00%FF%DF"},
		{[]byte("é"), "orders/3/%C3%A9"},
		{long[:200], "orders/3/" + strings.Repeat("x", 200)},
	} {
		got := keyLane(p, tc.key)
		if got != tc.want {
			t.Errorf("lane of %q is %q, want %q", tc.key, got, tc.want)
		}
	}
	if got := keyLane(p, long); !strings.HasPrefix(got, "orders/3/%sha256:") || len(got) != len("orders/3/%sha256:")+64 {
		t.Errorf("lane of a long key is %q", got)
	}
}

// Two keys never share a lane, and a lane's name can be logged and stored.
func TestLaneNamesDiffer(t *testing.T) {
	t.Parallel()
	p := partitionLane("orders", 3)
	differ := func(a, b []byte) bool {
		return bytes.Equal(a, b) == (keyLane(p, a) == keyLane(p, b))
	}
	if err := randomly.Check(differ, nil); err != nil {
		t.Error(err)
	}
	printable := func(key []byte) bool {
		return !strings.ContainsFunc(keyLane(p, key), func(r rune) bool { return r <= ' ' || r > '~' })
	}
	if err := randomly.Check(printable, nil); err != nil {
		t.Error(err)
	}
	for _, pair := range [][2]string{{"a%20", "a "}, {"%sha256:", "\x25sha256:x"}, {"A", "a"}, {"", "/"}} {
		if !differ([]byte(pair[0]), []byte(pair[1])) {
			t.Errorf("%q and %q share a lane", pair[0], pair[1])
		}
	}
	if keyLane(p, nil) == keyLane(p, []byte{}) {
		t.Error("no key and an empty key share a lane")
	}
	long := strings.Repeat("y", 300)
	if keyLane(p, []byte(long)) == keyLane(p, []byte(strings.TrimPrefix(keyLane(p, []byte(long)), p+"/"))) {
		t.Error("a hashed key and its hash share a lane")
	}
}
