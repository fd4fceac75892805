package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// The exit codes. Scripts rely on them: they do not change.
const (
	exitOK       = 0
	exitFailure  = 1
	exitUsage    = 2
	exitNotFound = 3
)

// usageError is a wrong command line.
type usageError struct{ err error }

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error { return &usageError{fmt.Errorf(format, args...)} }

// notFoundError says that what was asked for is not there.
type notFoundError struct{ text string }

func (e *notFoundError) Error() string { return e.text }

func exitCode(err error) int {
	var (
		usage    *usageError
		notFound *notFoundError
	)
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &usage):
		return exitUsage
	case errors.As(err, &notFound):
		return exitNotFound
	}
	return exitFailure
}

// printError writes err in the name of the command whose path is given.
func printError(w io.Writer, path string, err error) {
	text := strings.ReplaceAll(strings.TrimSpace(err.Error()), "\t", "  ")
	program, command, _ := strings.Cut(path, " ")
	if command != "" {
		command += ": "
	}
	_, _ = fmt.Fprintf(w, "%s: %s%s\n", program, command, text)
	var usage *usageError
	if errors.As(err, &usage) {
		_, _ = fmt.Fprintf(w, "Run %q for help.\n", path+" --help")
	}
}
