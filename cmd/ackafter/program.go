package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"time"
)

// program is one run of the command line: where it reads and writes, and the
// flags that all commands have.
type program struct {
	stdin  io.Reader
	stdout io.Writer
	stderr io.Writer
	getenv func(string) string

	// now overrides the database's clock, for tests.
	now func() time.Time

	// clock and wait are time.Now and sleep, but in tests.
	clock func() time.Time
	wait  func(ctx context.Context, d time.Duration) error

	// watch, when set, stands between the commands and the inbox, for tests.
	watch func(keeper) keeper

	databaseURL string
	schema      string
	json        bool
	timeout     time.Duration
}

// run runs the command line with args (without the program's name) and returns
// its exit code. It ends early when ctx does.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	p := &program{stdin: stdin, stdout: stdout, stderr: stderr, getenv: os.Getenv, clock: time.Now, wait: sleep}
	return p.run(ctx, args)
}

func (p *program) run(ctx context.Context, args []string) int {
	root := p.rootCommand() //nolint:contextcheck // Cobra hands the context to the commands.
	root.SetArgs(args)
	root.SetIn(p.stdin)
	root.SetOut(p.stdout)
	root.SetErr(p.stderr)
	command, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	path := root.Name()
	if command != nil {
		path = command.CommandPath()
	}
	printError(p.stderr, path, err)
	return exitCode(err)
}

// view is something that can be shown to people and to programs.
type view interface {
	// text writes it for people.
	text(w io.Writer)
	// data returns what is encoded as JSON.
	data() any
}

// show writes v to standard output, in one piece.
func (p *program) show(v view) error {
	var b bytes.Buffer
	if p.json {
		encoder := json.NewEncoder(&b)
		encoder.SetIndent("", "  ")
		encoder.SetEscapeHTML(false)
		if err := encoder.Encode(v.data()); err != nil {
			return fmt.Errorf("encode the output: %w", err)
		}
	} else {
		v.text(&b)
	}
	if _, err := p.stdout.Write(b.Bytes()); err != nil {
		return fmt.Errorf("write the output: %w", err)
	}
	return nil
}

// withDatabase opens the database of the flags and calls do with it, all within
// the time of --timeout.
func (p *program) withDatabase(ctx context.Context, do func(context.Context, *database) error) error {
	address, err := p.address()
	if err != nil {
		return err
	}
	return p.with(ctx, address, do)
}

// with is withDatabase for an address that was parsed already.
func (p *program) with(ctx context.Context, address *address, do func(context.Context, *database) error) error {
	return p.bounded(ctx, func(ctx context.Context) error {
		db, err := openDatabase(ctx, address)
		if err != nil {
			return err
		}
		defer db.close()
		return do(ctx, db)
	})
}

// bounded calls do with a context that ends after --timeout. When that or a
// signal made do fail, the error says so first.
func (p *program) bounded(ctx context.Context, do func(context.Context) error) error {
	timed, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	err := do(timed)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return fmt.Errorf("interrupted: %w", err)
	case timed.Err() != nil:
		return fmt.Errorf("not done within %v (--timeout): %w", p.timeout, err)
	}
	return err
}

// address parses the flags that say where the database is.
func (p *program) address() (*address, error) {
	url := p.databaseURL
	if url == "" {
		url = p.getenv(environmentURL)
	}
	if url == "" {
		return nil, usagef("no database: give --database URL or set %s", environmentURL)
	}
	return parseAddress(url, p.schema)
}
