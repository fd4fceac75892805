package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"time"
)

// bench is one run of the program.
type bench struct {
	options
	topic    *topic
	database *database
	messages io.Writer
	groups   int
}

// measure runs every contestant as often as asked for, in turns, and returns
// the report. An error means that there are no figures: one contestant did not
// do its work.
func measure(ctx context.Context, s addresses, o options, contestants []chain, messages io.Writer) (r *report, err error) {
	b := &bench{options: o, messages: messages}
	name := "ackafter_bench_" + randomName()
	r = newReport(o)
	if b.database, err = makeDatabase(ctx, s.postgres, name); err != nil {
		return nil, err
	}
	defer b.database.drop(ctx)
	if r.Postgres, r.Settings, err = b.database.settings(ctx); err != nil {
		return nil, err
	}
	if b.topic, err = makeTopic(ctx, s.brokers, name, o.events); err != nil {
		return nil, err
	}
	defer b.topic.remove(ctx)

	chosen := choose(contestants, o.only)
	for rep := range o.reps {
		// Everybody is once first: whoever comes after another one is not always
		// the same.
		for i := range chosen {
			if err := b.run(ctx, chosen[(rep+i)%len(chosen)], rep, r); err != nil {
				return nil, err
			}
		}
	}
	r.conclude(contestants)
	return r, nil
}

// run runs the passes of one contestant.
func (b *bench) run(ctx context.Context, c chain, rep int, r *report) error {
	if err := b.database.reset(ctx); err != nil {
		return err
	}
	for _, p := range c.passes {
		f, err := b.pass(ctx, c, p, rep)
		if err != nil {
			return fmt.Errorf("%s, repetition %d: %w", p.name, rep+1, err)
		}
		if len(b.only) == 0 || slices.Contains(b.only, p.name) {
			r.add(p, f)
			fmt.Fprintf(b.messages, "bench: %d/%d %-12s %8.0f msg/s\n", rep+1, b.reps, p.name, f.PerSecond)
		}
	}
	return nil
}

// pass runs one pass and checks its effects.
func (b *bench) pass(ctx context.Context, c chain, p pass, rep int) (f figures, err error) {
	if err := b.database.settle(ctx); err != nil {
		return figures{}, err
	}
	// A spare connection or two, as a service has them.
	pool, err := b.database.connect(ctx, workers+2)
	if err != nil {
		return figures{}, err
	}
	defer pool.Close()
	b.groups++
	j := &job{topic: b.topic, group: fmt.Sprintf("%s-%d", b.topic.name, b.groups), pool: pool, meter: newMeter(b.topic.events)}
	defer b.topic.forget(ctx, j.group)

	limit := time.Minute + time.Duration(b.events)*5*time.Millisecond
	consuming, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %v", limit))
	defer cancel()
	runtime.GC()
	stop, err := b.startProfile(p, rep)
	if err != nil {
		return figures{}, err
	}
	err = p.consume(consuming, j)
	if err = errors.Join(err, stop()); err != nil {
		return figures{}, fmt.Errorf("%w (%d of %d messages done)", err, j.meter.seen.Load(), b.topic.events)
	}
	if err := b.check(ctx, c, j); err != nil {
		return figures{}, err
	}
	f, ok := j.meter.figures()
	if !ok {
		return figures{}, errors.New("everything was committed at once: more -events are needed to measure it")
	}
	return f, nil
}

// check makes sure that the contestant has done all of its work once.
func (b *bench) check(ctx context.Context, c chain, j *job) error {
	t, err := b.database.count(ctx, c.keys)
	if err != nil {
		return err
	}
	want := tally{bookings: b.topic.distinct, distinct: b.topic.distinct, keys: b.topic.distinct}
	if t != want {
		return fmt.Errorf("wrong effects: %d bookings of %d events, %d keys, %d dead letters; want %d bookings, events and keys, and no dead letter",
			t.bookings, t.distinct, t.keys, t.parked, b.topic.distinct)
	}
	if seen := j.meter.seen.Load(); seen != int64(b.topic.events) {
		return fmt.Errorf("%d messages were handled, %d are in the topic: some came twice", seen, b.topic.events)
	}
	lag, err := b.topic.lag(ctx, j.group)
	if err != nil {
		return err
	}
	if lag != 0 {
		return fmt.Errorf("the offsets of %d messages were not committed", lag)
	}
	return nil
}

// startProfile starts the profiles of a pass in its last repetition.
func (b *bench) startProfile(p pass, rep int) (stop func() error, err error) {
	if b.profile == "" || rep != b.reps-1 {
		return func() error { return nil }, nil
	}
	if err := os.MkdirAll(b.profile, 0o750); err != nil {
		return nil, fmt.Errorf("-profile: %w", err)
	}
	before := filepath.Join(b.profile, p.name+".allocs-before.pprof")
	if err := writeAllocs(before); err != nil {
		return nil, err
	}
	file, err := os.Create(filepath.Join(b.profile, p.name+".cpu.pprof"))
	if err != nil {
		return nil, fmt.Errorf("-profile: %w", err)
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("-profile: %w", err)
	}
	return func() error {
		pprof.StopCPUProfile()
		if err := file.Close(); err != nil {
			return fmt.Errorf("-profile: %w", err)
		}
		return writeAllocs(filepath.Join(b.profile, p.name+".allocs.pprof"))
	}, nil
}

// writeAllocs writes what was allocated since the start of the program; go tool
// pprof -diff_base takes two of them apart.
func writeAllocs(path string) error {
	file, err := os.Create(path)
	if err != nil {
		return fmt.Errorf("-profile: %w", err)
	}
	err = pprof.Lookup("allocs").WriteTo(file, 0)
	if err = errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("-profile: %w", err)
	}
	return nil
}

func randomName() string {
	var b [6]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}
