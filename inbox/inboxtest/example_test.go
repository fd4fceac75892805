package inboxtest_test

import (
	"testing"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox/inboxtest"
	"github.com/ackafter/ackafter/keyfunc"
)

// In a test of your own handler, on a database of your own.
func ExampleOnce() {
	_ = func(t *testing.T) {
		s := newShop(t)
		consumer := s.consumer(t, keyfunc.JSON("orderId"), charge)
		inboxtest.Once(t, consumer, &broker.Message{Body: []byte(`{"orderId":"A1"}`)}, s.charges(t))
	}
	// Output:
}
