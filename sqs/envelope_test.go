package sqs_test

import (
	"testing"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/keyfunc"
)

// An event of EventBridge is handed out as it is; keys are made of what is in it.
// Its own id is no business key: an archive that is replayed keeps it, a sender that
// tries again does not.
func TestEventBridgeEnvelope(t *testing.T) {
	t.Parallel()
	event := func(id, at string) *broker.Message {
		return &broker.Message{Body: []byte(`{"version":"0","id":"` + id + `","detail-type":"order.paid","source":"shop.orders","account":"123456789012",` +
			`"time":"` + at + `","region":"eu-central-1","resources":[],"detail":{"orderId":"A1","lines":[{"sku":"x"}],"amount":1999}}`)}
	}
	first := event("6a7e8feb-b491-4cf7-a9f1-bf3703467718", "2026-01-31T10:00:00Z")
	again := event("0d6bafbe-9b6f-4d7c-8a53-7c9a9dcd1a30", "2026-01-31T10:00:01Z")
	for _, row := range []struct {
		key  keyfunc.Func
		want string
	}{
		{keyfunc.JSON("detail.orderId", "detail-type"), "A1|order.paid"},
		{keyfunc.JSON("source", "detail-type", "detail.orderId"), "shop.orders|order.paid|A1"},
		{keyfunc.JSON("detail.lines.0.sku", "detail.amount"), "x|1999"},
	} {
		for _, m := range []*broker.Message{first, again} {
			if got, err := row.key.Key(m); err != nil || got != row.want {
				t.Errorf("%s: got the key %q, %v; want %q", row.key.Definition(), got, err, row.want)
			}
		}
	}
}
