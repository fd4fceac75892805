package main

import (
	"fmt"
	"testing"
	"time"
)

func TestDeadList(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		orders(t, term)
		term.golden("dead_list", []string{"dead", "list"}, []string{"dead", "list", "--state", "all"}, []string{"dead", "list", "--state", "retry"},
			[]string{"dead", "list", "--consumer", "mailer"}, []string{"dead", "list", "--tenant", "acme", "--json"},
			[]string{"dead", "list", "--reason", "effects unknown"}, []string{"dead", "list", "--key", "A1|order.paid"},
			[]string{"dead", "list", "--limit", "2"}, []string{"dead", "list", "--limit", "2", "--after", "8"},
			[]string{"dead", "list", "--limit", "1", "--json"},
			[]string{"dead", "list", "--consumer", "nobody"}, []string{"dead", "list", "--consumer", "nobody", "--state", "all", "--json"})
	})
}

func TestDeadShow(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		orders(t, term)
		term.golden("dead_show", []string{"dead", "show", "7"}, []string{"dead", "show", "7", "--body"}, []string{"dead", "show", "8", "--body"},
			[]string{"dead", "show", "9", "--body"}, []string{"dead", "show", "10", "--body"}, []string{"dead", "show", "11"})
		term.golden("dead_show_json", []string{"dead", "show", "7", "--json"}, []string{"dead", "show", "7", "--body", "--json"},
			[]string{"dead", "show", "8", "--body", "--json"})
	})
}

// Pages follow each other without gap or overlap, to the end.
func TestDeadListPages(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, term *terminal) {
		term.must("migrate", "up")
		for id := int64(1); id <= 7; id++ {
			term.insertParked(parkedRow{id: id, consumer: "billing", key: fmt.Sprint("K", id), state: "dead", reason: "conflict", parked: ago(time.Hour)})
		}
		term.run("dead", "list", "--limit", "3").expect(t, exitOK, "K1", "K3", "There are more: --after 3")
		term.run("dead", "list", "--limit", "3", "--after", "3").expect(t, exitOK, "K4", "K6", "There are more: --after 6")
		o := term.run("dead", "list", "--limit", "3", "--after", "6")
		o.expect(t, exitOK, "K7")
		o.lacks(t, "There are more", "K6")
		term.run("dead", "list", "--limit", "7").lacks(t, "There are more")
	})
}
