package brokertest

import (
	"bytes"
	"context"
	"fmt"
	"runtime/pprof"
	"strings"
	"sync/atomic"
	"time"
)

const goroutineLabel = "brokertest"

var labelled atomic.Int64

// label runs f so that every goroutine that it starts, and those that they
// start, can be told from all others, and returns a function that lists those
// that still run. Labels are inherited, so tests may run in parallel.
func label(ctx context.Context, f func()) (running func() []string) {
	value := fmt.Sprintf("%d", labelled.Add(1))
	pprof.Do(ctx, pprof.Labels(goroutineLabel, value), func(context.Context) { f() })
	return func() []string {
		var profile bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			return []string{"the goroutine profile cannot be read: " + err.Error()}
		}
		var stacks []string
		for stack := range strings.SplitSeq(profile.String(), "\n\n") {
			if strings.Contains(stack, fmt.Sprintf("%q:%q", goroutineLabel, value)) {
				stacks = append(stacks, stack)
			}
		}
		return stacks
	}
}

// Rule 36: all goroutines of a source have ended when Close returns. Those that
// belong to the broker's client and outlive a source have the time of
// Timing.Prompt to go.
func closeEndsGoroutines(r *rig) {
	messages := spread(3)
	r.publish(messages...)
	running := label(r.Context(), func() {
		source := r.open()
		got := r.receive(source, bodies(messages)...)
		r.ack(got[0])
		r.nack(0, got[1])
		ctx, cancel := context.WithTimeout(r.Context(), r.timing.Quiet)
		_, _ = source.Receive(ctx, 1) // whatever comes: it must not leave anything behind
		cancel()
		r.close(source)
	})
	deadline := time.Now().Add(r.timing.Prompt)
	stacks := running()
	for len(stacks) > 0 && time.Now().Before(deadline) {
		pause(r.Context(), r.timing.Prompt/50)
		stacks = running()
	}
	if len(stacks) > 0 {
		r.Errorf("goroutines still run after Close:\n%s", strings.Join(stacks, "\n\n"))
	}
}
