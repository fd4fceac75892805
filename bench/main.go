package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
)

// The bounds of what can be asked for. Fewer events are over before there is
// anything to measure; more do not fit the memory of a small machine.
const (
	minEvents = 400
	maxEvents = 5_000_000
	maxReps   = 1000
)

// options are the flags.
type options struct {
	events  int
	reps    int
	only    []string // names of passes; none: all
	json    bool
	profile string // folder for profiles; "": none
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch err := command(ctx, os.Args[1:], os.Stdout, os.Stderr); {
	case err == nil, errors.Is(err, flag.ErrHelp):
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// command is the whole program: the table or the JSON goes to out, progress and
// the usage to messages.
func command(ctx context.Context, args []string, out, messages io.Writer) error {
	o, err := parse(args, messages)
	if err != nil {
		return err
	}
	servers, stop, err := findServers(ctx, messages)
	if err != nil {
		return err
	}
	defer stop()
	r, err := measure(ctx, servers, o, chains(), messages)
	if err != nil {
		return err
	}
	if o.json {
		return r.writeJSON(out)
	}
	return r.writeTable(out)
}

// parse reads the flags.
func parse(args []string, messages io.Writer) (options, error) {
	var o options
	var only string
	names := passNames(chains())
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.SetOutput(messages)
	flags.IntVar(&o.events, "events", 40_000, "messages in the topic")
	flags.IntVar(&o.reps, "reps", 5, "repetitions; the median counts")
	flags.StringVar(&only, "only", "", "contestants to run, separated by commas, of: "+strings.Join(names, ", ")+"; default all")
	flags.BoolVar(&o.json, "json", false, "print JSON instead of a table")
	flags.StringVar(&o.profile, "profile", "", "write a CPU and an allocation profile of each contestant's last repetition into this folder")
	if err := flags.Parse(args); err != nil {
		return options{}, err
	}
	switch {
	case flags.NArg() > 0:
		return options{}, fmt.Errorf("unknown argument %q: there are only flags", flags.Arg(0))
	case o.events < minEvents || o.events > maxEvents:
		return options{}, fmt.Errorf("-events = %d: must be from %d to %d", o.events, minEvents, maxEvents)
	case o.reps < 1 || o.reps > maxReps:
		return options{}, fmt.Errorf("-reps = %d: must be from 1 to %d", o.reps, maxReps)
	}
	for name := range strings.SplitSeq(only, ",") {
		name = strings.TrimSpace(name)
		switch {
		case name == "":
		case !slices.Contains(names, name):
			return options{}, fmt.Errorf("-only: unknown contestant %q: there are %s", name, strings.Join(names, ", "))
		default:
			o.only = append(o.only, name)
		}
	}
	return o, nil
}
