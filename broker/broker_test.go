package broker_test

import (
	"slices"
	"testing"

	"github.com/ackafter/ackafter/broker"
)

func TestPosition(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		position broker.Position
		known    bool
		text     string
	}{
		{broker.Position{}, false, ""},
		{broker.Position{Offset: 7}, false, ""}, // an offset that is not known does not count
		{broker.At(0), true, "0"},
		{broker.At(4711), true, "4711"},
		{broker.At(-1), true, "-1"},
		{broker.At(1<<63 - 1), true, "9223372036854775807"},
	} {
		if tt.position.Known != tt.known || tt.position.String() != tt.text {
			t.Errorf("%#v: known %v, text %q; want %v, %q", tt.position, tt.position.Known, tt.position.String(), tt.known, tt.text)
		}
	}
	if broker.At(0) == (broker.Position{}) {
		t.Error("offset 0 is the same as no position")
	}
}

func TestHeaders(t *testing.T) {
	t.Parallel()
	h := broker.Headers{
		{Name: "via", Value: []byte("a")}, {Name: "Via", Value: []byte("b")}, {Name: "via", Value: nil}, {Name: "", Value: []byte("c")},
	}
	for _, tt := range []struct {
		name   string
		first  string
		values []string
	}{
		{"via", "a", []string{"a", ""}},
		{"Via", "b", []string{"b"}},
		{"VIA", "", nil},
		{"", "c", []string{"c"}},
	} {
		first, ok := h.Get(tt.name)
		var values []string
		for _, v := range h.Values(tt.name) {
			values = append(values, string(v))
		}
		if string(first) != tt.first || ok != (tt.values != nil) || !slices.Equal(values, tt.values) {
			t.Errorf("%q: first %q (there: %v), values %q; want %q, %q", tt.name, first, ok, values, tt.first, tt.values)
		}
	}
	var none broker.Headers
	if _, ok := none.Get("via"); ok || none.Values("via") != nil {
		t.Error("nil headers have a header")
	}
}

func TestMessageSize(t *testing.T) {
	t.Parallel()
	empty := (&broker.Message{}).Size()
	if empty <= 0 {
		t.Fatalf("an empty message has size %d, want it to count", empty)
	}
	ten := []byte("0123456789")
	for name, m := range map[string]*broker.Message{
		"body":         {Body: ten},
		"key":          {Key: ten},
		"id":           {ID: string(ten)},
		"source":       {Source: string(ten)},
		"header name":  {Headers: broker.Headers{{Name: string(ten)}}},
		"header value": {Headers: broker.Headers{{Value: ten}}},
	} {
		if got := m.Size() - empty; got < 10 {
			t.Errorf("%s: 10 bytes count as %d", name, got)
		}
	}
	// Headers without content are memory, too.
	if got := (&broker.Message{Headers: make(broker.Headers, 1000)}).Size() - empty; got < 1000*40 {
		t.Errorf("1000 empty headers count as %d bytes", got)
	}
}
