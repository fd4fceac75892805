package inbox

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Message is a message as the handler gets it: the broker's message and what
// the inbox knows about it. It belongs to one run of the handler and must not
// be used after it, nor by several goroutines at once.
type Message struct {
	broker.Message

	// Consumer is the name of the consumer that handles it.
	Consumer string
	// Tenant is its tenant; empty without Config.Tenant.
	Tenant string
	// MessageKey is its business key. It is the same for every delivery of the
	// message and the right base for keys of outside calls (the Idempotency-Key
	// of a payment gateway).
	MessageKey string
	// Attempt is the number of this attempt, from 1: in this process, and over all
	// processes once the message has been parked. Runs that failed because of
	// infrastructure do not count.
	Attempt int
	// EventTime is when the event happened, see Config.EventTime; zero when
	// unknown.
	EventTime time.Time

	result    []byte
	resultErr error
}

// SetResult stores v with the message's key, in the same transaction. A replay
// gets it back (Result.Value, Record.Result). v is stored as JSON; a
// json.RawMessage is stored as it is. The last call counts; SetResult(nil) takes
// the result back. Stored results may be personal data: they are kept for the
// consumer's whole window.
//
// It returns an error when v cannot be encoded. A handler that ignores it fails
// with it all the same, so that no message is done without its result.
func (m *Message) SetResult(v any) error {
	m.result, m.resultErr = nil, nil
	if v == nil {
		return nil
	}
	b, err := json.Marshal(v)
	if err != nil {
		m.resultErr = fmt.Errorf("inbox: set result: %w", err)
		return m.resultErr
	}
	m.result = b
	return nil
}
