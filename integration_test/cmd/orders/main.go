// Command orders writes generated order events to standard output, one message a
// line: key, tab, body. The number of distinct keys goes to standard error.
//
//	go run ./cmd/orders -events 100000 -repeats 0.2 -seed 1 | kcat -P -b localhost:9092 -t orders -K '\t'
package main

import (
	"bufio"
	"flag"
	"fmt"
	"os"

	"github.com/ackafter/ackafter/integration_test/orders"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	events := flag.Int("events", 100_000, "number of messages, repeats included")
	repeats := flag.Float64("repeats", 0.2, "share of messages that repeat an earlier one")
	seed := flag.Uint64("seed", 1, "seed of the stream")
	flag.Parse()
	s, err := orders.Generate(orders.Config{Events: *events, Repeats: *repeats, Seed: *seed})
	if err != nil {
		return err
	}
	out := bufio.NewWriter(os.Stdout)
	if _, err := s.WriteTo(out); err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "distinct keys: %d\n", s.Distinct)
	return out.Flush()
}
