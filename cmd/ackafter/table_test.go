package main

import (
	"strings"
	"testing"
	"time"
)

func TestPrintable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                        "",
		"A1|order.paid":           "A1|order.paid",
		"Größe 日本":                "Größe 日本",
		"two\nlines\ttab":         `two\nlines\ttab`,
		"\x1b[2Jclear":            `\x1b[2Jclear`,
		"bad \xff byte":           `bad \xff byte`,
		"nul\x00":                 `nul\x00`,
		"right\u202eleft":         `right\u202eleft`,
		"hard\u00a0space":         `hard\u00a0space`,
		"replacement \ufffd char": "replacement \ufffd char",
		"it's \"quoted\"":         "it's \"quoted\"",
		"'\n":                     `'\n`,
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: got %s, want %s", in, got, want)
		}
	}
}

func TestBlock(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":                    "",
		"a\n\tb\r\nc\n":       "a\n\tb\nc",
		"\x1b[31mred":         `\x1b[31mred`,
		"\xff\x00":            "00000000  ff 00                                             |..|",
		"text with a \x00 in": "00000000  74 65 78 74 20 77 69 74  68 20 61 20 00 20 69 6e  |text with a . in|",
	} {
		if got := block([]byte(in)); got != want {
			t.Errorf("%q: got\n%s\nwant\n%s", in, got, want)
		}
	}
}

func TestShortened(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{"": "", "abcde": "abcde", "abcdef": "abcd…", "äöüßé": "äöüßé", "äöüßéè": "äöüß…"} {
		if got := shortened(in, 5); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
}

func TestGrouped(t *testing.T) {
	t.Parallel()
	for in, want := range map[int64]string{0: "0", 999: "999", 1000: "1,000", 1234567: "1,234,567", -999: "-999", -1000: "-1,000"} {
		if got := grouped(in); got != want {
			t.Errorf("%d: got %s, want %s", in, got, want)
		}
	}
	if got := counted(1, "key"); got != "1 key" {
		t.Error(got)
	}
	if got := counted(countLimit, "key"); got != "at least 1,000,000 keys" {
		t.Error(got)
	}
}

func TestMoment(t *testing.T) {
	t.Parallel()
	zone := time.FixedZone("east", 2*3600)
	for d, want := range map[time.Duration]string{
		0:                      "2026-03-10 12:00:00 UTC (now)",
		400 * time.Millisecond: "2026-03-10 11:59:59 UTC (now)",
		59 * time.Second:       "2026-03-10 11:59:01 UTC (59s ago)",
		3*time.Minute + 59*1e9: "2026-03-10 11:56:01 UTC (3m ago)",
		2 * time.Hour:          "2026-03-10 10:00:00 UTC (2h ago)",
		49 * time.Hour:         "2026-03-08 11:00:00 UTC (2d ago)",
		-61 * time.Second:      "2026-03-10 12:01:01 UTC (in 1m)",
		-7 * 24 * time.Hour:    "2026-03-17 12:00:00 UTC (in 7d)",
	} {
		if got := moment(pinned.Add(-d).In(zone), pinned); got != want {
			t.Errorf("%v: got %s, want %s", d, got, want)
		}
	}
	if got := moment(time.Time{}, pinned); got != "" {
		t.Errorf("no time: %q", got)
	}
}

func TestPlace(t *testing.T) {
	t.Parallel()
	for _, row := range [][3]string{
		{"kafka:o/3", "7", "kafka:o/3 at position 7"}, {"kafka:o/3", "", "kafka:o/3"}, {"", "7", "position 7"}, {"", "", ""},
	} {
		if got := place(row[0], row[1]); got != row[2] {
			t.Errorf("place(%q, %q) = %q, want %q", row[0], row[1], got, row[2])
		}
	}
}

// Cells cannot break a table.
func TestTableIsOneLineARow(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	table := newTable(&b)
	table.row("a", "b\nc\td")
	table.row("longer", "")
	table.flush()
	if want := "a       b\\nc\\td\nlonger\n"; b.String() != want {
		t.Errorf("got %q, want %q", b.String(), want)
	}
}
