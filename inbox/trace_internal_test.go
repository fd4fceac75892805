package inbox

import (
	"testing"

	"github.com/ackafter/ackafter/broker"
)

func TestTraceID(t *testing.T) {
	t.Parallel()
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	for value, want := range map[string]string{
		"00-" + id + "-00f067aa0ba902b7-01": id,
		"":                                  "",
		"00-" + id:                          "",
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01": "",
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01": "",
		"00_" + id + "-00f067aa0ba902b7-01":                       "",
	} {
		if got := traceID(broker.Headers{{Name: "traceparent", Value: []byte(value)}}); got != want {
			t.Errorf("traceID(%q) = %q, want %q", value, got, want)
		}
	}
	if traceID(nil) != "" {
		t.Error("a message without the header has a trace id")
	}
}

func TestKeylessID(t *testing.T) {
	t.Parallel()
	base := broker.Message{ID: "1", Source: "kafka:t/0", Position: broker.At(3), Body: []byte("x")}
	replayed := base
	replayed.ID = "2"
	other := base
	other.Position = broker.At(4)
	if keylessID(&base) != keylessID(&replayed) {
		t.Error("a replay with another broker id does not attach")
	}
	if keylessID(&base) == keylessID(&other) {
		t.Error("two messages share one parked row")
	}
}
