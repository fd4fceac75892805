package orders_test

import (
	"bytes"
	"math"
	"testing"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/integration_test/orders"
	"github.com/ackafter/ackafter/keyfunc"
)

func TestGenerate(t *testing.T) {
	t.Parallel()
	c := orders.Config{Events: 20_000, Repeats: 0.2, Seed: 1}
	s, err := orders.Generate(c)
	if err != nil {
		t.Fatal(err)
	}
	bodies := map[string]string{}
	key := keyfunc.JSON("orderId", "eventType")
	for _, l := range s.Lines {
		k, err := key.Key(&broker.Message{Body: l.Body})
		if err != nil {
			t.Fatal(err)
		}
		if first, ok := bodies[k]; ok && first != string(l.Body) {
			t.Fatalf("key %s has two bodies", k)
		}
		bodies[k] = string(l.Body)
	}
	if len(s.Lines) != c.Events || len(bodies) != s.Distinct {
		t.Errorf("%d lines with %d distinct keys, said to be %d", len(s.Lines), len(bodies), s.Distinct)
	}
	if share := 1 - float64(s.Distinct)/float64(c.Events); math.Abs(share-c.Repeats) > 0.02 {
		t.Errorf("%.3f of the lines are repeats, want %.2f", share, c.Repeats)
	}
	again, _ := orders.Generate(c)
	c.Seed = 2
	other, _ := orders.Generate(c)
	var a, b, o bytes.Buffer
	for s, w := range map[*orders.Stream]*bytes.Buffer{&s: &a, &again: &b, &other: &o} {
		if _, err := s.WriteTo(w); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(a.Bytes(), b.Bytes()) || bytes.Equal(a.Bytes(), o.Bytes()) {
		t.Error("the stream must depend on the seed, and on nothing else")
	}
	for _, bad := range []orders.Config{{}, {Events: -1}, {Events: 1, Repeats: 1}, {Events: 1, Repeats: -0.1}} {
		if _, err := orders.Generate(bad); err == nil {
			t.Errorf("Generate(%+v): no error", bad)
		}
	}
}
