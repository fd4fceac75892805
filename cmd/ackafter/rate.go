package main

import (
	"context"
	"strconv"
	"strings"
	"time"
)

// rate is the time between two messages; zero is no limit.
type rate time.Duration

// parseRate parses "50/s", "100/m" or "20/h"; empty is no limit.
func parseRate(value string) (rate, error) {
	if value == "" {
		return 0, nil
	}
	number, per, _ := strings.Cut(value, "/")
	unit := map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour}[per]
	const most = 1_000_000
	n, err := strconv.Atoi(number)
	if err != nil || unit == 0 || n < 1 || n > most {
		return 0, usagef("--rate %q: must be how many in a second, minute or hour, from 1 to %d: 50/s, 100/m, 20/h", value, most)
	}
	return rate(unit / time.Duration(n)), nil
}

// batch is how many messages go together: a tenth of a second's.
func (r rate) batch() int {
	if r == 0 {
		return pageSize
	}
	return min(max(int(time.Second/10/time.Duration(r)), 1), pageSize)
}

// span is how long n messages take.
func (r rate) span(n int) time.Duration { return time.Duration(r) * time.Duration(n) }

// sleep waits for d. It returns early with the error of ctx.
func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}
