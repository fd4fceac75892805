// Package orders generates order events for the crash tests and the benchmarks:
// realistic random order ids, a share of repeated events, the same stream for the
// same seed.
package orders

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
)

// Config says what to generate.
type Config struct {
	// Events is the number of lines, repeats included.
	Events int
	// Repeats is the share of lines that repeat an earlier event, from 0 up to
	// and without 1.
	Repeats float64
	// Seed makes the stream; the same seed gives the same stream.
	Seed uint64
}

// Event is the body of one message.
type Event struct {
	OrderID   string `json:"orderId"`
	EventType string `json:"eventType"`
	Amount    int64  `json:"amount"`
	Customer  int64  `json:"customer"`
	Note      string `json:"note"`
}

// Stream is a generated stream.
type Stream struct {
	// Lines are the events in order. A repeat is byte-equal to the first.
	Lines []Line
	// Distinct is the number of distinct keys (orderId, eventType).
	Distinct int
}

// Line is one message: the broker's key and the body.
type Line struct {
	Key  string
	Body []byte
}

// types are the events of an order, in their order.
var types = []string{"created", "paid", "packed", "shipped", "delivered"}

// Generate makes the stream.
func Generate(c Config) (Stream, error) {
	if c.Events < 1 {
		return Stream{}, fmt.Errorf("orders: Events = %d: must be positive", c.Events)
	}
	if c.Repeats < 0 || c.Repeats >= 1 {
		return Stream{}, fmt.Errorf("orders: Repeats = %v: must be from 0 up to and without 1", c.Repeats)
	}
	r := rand.New(rand.NewPCG(c.Seed, 0x5eed))
	s := Stream{Lines: make([]Line, 0, c.Events)}
	type order struct {
		id   string
		next int
	}
	var open []order
	for len(s.Lines) < c.Events {
		if len(s.Lines) > 0 && r.Float64() < c.Repeats {
			s.Lines = append(s.Lines, s.Lines[r.IntN(len(s.Lines))])
			continue
		}
		i := r.IntN(len(open) + 1)
		if i == len(open) {
			open = append(open, order{id: newID(r)})
		}
		body, err := json.Marshal(Event{
			OrderID: open[i].id, EventType: types[open[i].next], Amount: r.Int64N(100_000),
			Customer: r.Int64N(50_000), Note: newID(r) + newID(r),
		})
		if err != nil {
			return Stream{}, fmt.Errorf("orders: %w", err)
		}
		s.Lines = append(s.Lines, Line{Key: open[i].id, Body: body})
		s.Distinct++
		if open[i].next++; open[i].next == len(types) {
			open[i] = open[len(open)-1]
			open = open[:len(open)-1]
		}
	}
	return s, nil
}

// newID returns a random id in the form of a UUID.
func newID(r *rand.Rand) string {
	var b [16]byte
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	h := hex.EncodeToString(b[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// WriteTo writes the stream as lines of key, tab and body, as kcat -K '\t' reads
// them.
func (s Stream) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for _, l := range s.Lines {
		n, err := fmt.Fprintf(w, "%s\t%s\n", l.Key, l.Body)
		total += int64(n)
		if err != nil {
			return total, fmt.Errorf("orders: write: %w", err)
		}
	}
	return total, nil
}
