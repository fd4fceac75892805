package main

import (
	"bytes"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"
	"unicode"
	"unicode/utf8"
)

// table aligns columns.
type table struct {
	to      io.Writer
	columns *tabwriter.Writer
	aligned *bytes.Buffer
}

func newTable(w io.Writer) table {
	aligned := new(bytes.Buffer)
	return table{to: w, columns: tabwriter.NewWriter(aligned, 0, 0, 2, ' ', 0), aligned: aligned}
}

// row adds a line. Cells are made safe for a terminal.
func (t table) row(cells ...string) {
	for i := range cells {
		cells[i] = printable(cells[i])
	}
	_, _ = fmt.Fprintln(t.columns, strings.Join(cells, "\t"))
}

// flush writes what was added, without spaces at the ends of lines.
func (t table) flush() {
	_ = t.columns.Flush()
	for line := range strings.Lines(t.aligned.String()) {
		_, _ = fmt.Fprintln(t.to, strings.TrimRight(line, " \n"))
	}
	t.aligned.Reset()
}

// printable returns s in one line and without anything that a terminal would
// obey: keys and errors come from outside.
func printable(s string) string {
	if !strings.ContainsFunc(s, unprintable) && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); {
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unprintable(r):
			quoted := strconv.QuoteRuneToASCII(r)
			b.WriteString(quoted[1 : len(quoted)-1])
		default:
			b.WriteRune(r)
		}
		i += size
	}
	return b.String()
}

func unprintable(r rune) bool { return !unicode.IsPrint(r) }

// shortened returns s with at most limit characters; the last one is an
// ellipsis when something was cut off.
func shortened(s string, limit int) string {
	if utf8.RuneCountInString(s) <= limit {
		return s
	}
	runes := []rune(s)
	return string(runes[:limit-1]) + "…"
}

// grouped returns n with its digits in groups of three: 1,234,567.
func grouped(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
