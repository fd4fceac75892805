package integration_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/ackafter/ackafter/inbox"
)

// entryID names a distinct message: a key with one body.
type entryID struct{ consumer, key, fingerprint string }

func (e entryID) String() string {
	return fmt.Sprintf("%s %s %.8s", e.consumer, e.key, e.fingerprint)
}

// ledger is what was sent and what became of it.
type ledger struct {
	sent map[entryID]bool // whether it is poison
	// lanes are the messages of lanes in the order in which the broker gives them out,
	// repeats included, by a name.
	lanes map[string][]entryID

	effects  []entryID // in their order
	accounts map[string]int
	dead     map[entryID][]inbox.Reason
	done     map[entryID]int // rows of the inbox
	// open are parked messages that are neither dead nor gone, guards how many guard
	// rows are left.
	open, guards int
}

// violation is a rule that an entry breaks.
type violation struct {
	entry entryID
	rule  string
}

func (v violation) String() string { return v.entry.String() + ": " + v.rule }

// check returns all that is wrong.
func (l *ledger) check() []violation {
	var wrong []violation
	report := func(e entryID, format string, a ...any) {
		wrong = append(wrong, violation{e, fmt.Sprintf(format, a...)})
	}
	effects, winners := map[entryID]int{}, map[entryID]int{} // winners by key
	for _, e := range l.effects {
		effects[e]++
		winners[entryID{e.consumer, e.key, ""}]++
	}
	all := maps.Clone(l.sent)
	for _, some := range []map[entryID]int{effects, l.done} {
		for e := range some {
			all[e] = all[e] || false
		}
	}
	for e := range l.dead {
		all[e] = all[e] || false
	}
	for e := range all {
		key := entryID{e.consumer, e.key, ""}
		poison, sent := l.sent[e]
		switch n, dead := effects[e], l.dead[e]; {
		case !sent:
			report(e, "was not sent, and has %d effects and %d dead letters", n, len(dead))
		case n == 0 && len(dead) == 0:
			report(e, "has neither an effect nor a dead letter")
		case n > 0 && len(dead) > 0:
			report(e, "has %d effects and %d dead letters", n, len(dead))
		case n > 1 || len(dead) > 1:
			report(e, "has %d effects, %d dead letters", n, len(dead))
		case n == 1 && poison:
			report(e, "is poison and has an effect")
		case n == 1 && winners[key] > 1:
			report(e, "has an effect, as another body of its key")
		case n == 1:
		case dead[0] == inbox.ReasonConflict:
			if winners[key] == 0 {
				report(e, "is a conflict with nothing")
			}
		case !poison || (dead[0] != inbox.ReasonAttempts && dead[0] != inbox.ReasonPermanent):
			report(e, "is a dead letter: %s", dead[0])
		}
		if l.done[e] != effects[e] {
			report(e, "has %d effects and %d rows in the inbox", effects[e], l.done[e])
		}
	}
	wrong = append(wrong, l.checkOrder()...)
	for consumer, n := range l.accounts {
		of := 0
		for _, e := range l.effects {
			if e.consumer == consumer {
				of++
			}
		}
		if n != of {
			report(entryID{consumer: consumer}, "has %d effects, and the accounts say %d", of, n)
		}
	}
	if l.open != 0 || l.guards != 0 {
		report(entryID{}, "%d parked messages still wait, %d guard rows", l.open, l.guards)
	}
	slices.SortFunc(wrong, func(a, b violation) int { return strings.Compare(a.String(), b.String()) })
	return wrong
}

// checkOrder checks that in each lane the effects are in the order of the messages.
// The first time counts; what is in two lanes has no order.
func (l *ledger) checkOrder() []violation {
	type spot struct {
		lane string
		at   int
	}
	spots := map[entryID]spot{}
	for lane, entries := range l.lanes {
		for i, e := range entries {
			if s, ok := spots[e]; !ok {
				spots[e] = spot{lane, i}
			} else if s.lane != lane {
				spots[e] = spot{}
			}
		}
	}
	var wrong []violation
	last := map[string]entryID{}
	for _, e := range l.effects {
		s := spots[e]
		if s.lane == "" {
			continue
		}
		if before, ok := last[s.lane]; ok && s.at < spots[before].at {
			wrong = append(wrong, violation{e, fmt.Sprintf("%d in lane %q, came after %v, which is %d there", s.at, s.lane, before, spots[before].at)})
			continue
		}
		last[s.lane] = e
	}
	return wrong
}

// ordered counts the effects whose order is checked.
func (l *ledger) ordered() int {
	of := map[entryID]bool{}
	for _, entries := range l.lanes {
		for _, e := range entries {
			of[e] = true
		}
	}
	n := 0
	for _, e := range l.effects {
		if of[e] {
			n++
		}
	}
	return n
}

// chaosTables are what the handlers write to.
const chaosTables = `
	create table effects (id bigint generated always as identity primary key,
		consumer text not null, key text not null, fingerprint text not null, attempt integer not null);
	create table accounts (consumer text not null, account integer not null, effects bigint not null, primary key (consumer, account))`

// read reads what became of the messages.
func (l *ledger) read(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	each := func(query string, row func(e entryID, text string, n int)) {
		t.Helper()
		rows, err := pool.Query(t.Context(), query)
		if err != nil {
			t.Fatal(err)
		}
		defer rows.Close()
		for rows.Next() {
			var e entryID
			var text string
			var n int
			if err := rows.Scan(&e.consumer, &e.key, &e.fingerprint, &text, &n); err != nil {
				t.Fatal(err)
			}
			row(e, text, n)
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
	}
	l.accounts, l.dead, l.done = map[string]int{}, map[entryID][]inbox.Reason{}, map[entryID]int{}
	each("select consumer, key, fingerprint, '', 0 from effects order by id", func(e entryID, _ string, _ int) {
		l.effects = append(l.effects, e)
	})
	each("select consumer, '', '', '', sum(effects)::int from accounts group by consumer", func(e entryID, _ string, n int) {
		l.accounts[e.consumer] = n
	})
	each("select consumer, message_key, encode(fingerprint, 'hex'), reason, 0 from inbox_parked where state = 'dead'", func(e entryID, reason string, _ int) {
		l.dead[e] = append(l.dead[e], inbox.Reason(reason))
	})
	each("select consumer, message_key, encode(fingerprint, 'hex'), '', 0 from inbox where status = 'done'", func(e entryID, _ string, _ int) {
		l.done[e]++
	})
	l.open = count(t, pool, "select count(*) from inbox_parked where state <> 'dead'")
	l.guards = count(t, pool, "select count(*) from inbox_guard")
}

// The ledger finds each way in which messages can get lost, be doubled, or overtake.
func TestChaosLedger(t *testing.T) {
	t.Parallel()
	id := func(key, body string) entryID { return entryID{"c", key, body} }
	good := func() *ledger {
		return &ledger{
			sent:     map[entryID]bool{id("a", "1"): false, id("a", "2"): false, id("b", "1"): true, id("c", "1"): false, id("d", "1"): false},
			lanes:    map[string][]entryID{"l": {id("c", "1"), id("a", "1"), id("c", "1"), id("d", "1")}, "m": {id("d", "1")}},
			effects:  []entryID{id("d", "1"), id("c", "1"), id("a", "1")},
			accounts: map[string]int{"c": 3},
			dead:     map[entryID][]inbox.Reason{id("a", "2"): {inbox.ReasonConflict}, id("b", "1"): {inbox.ReasonAttempts}},
			done:     map[entryID]int{id("a", "1"): 1, id("c", "1"): 1, id("d", "1"): 1},
		}
	}
	if wrong := good().check(); len(wrong) != 0 {
		t.Fatalf("a good ledger: %v", wrong)
	}
	for name, row := range map[string]struct {
		spoil func(l *ledger)
		says  string
	}{
		"lost effect":         {func(l *ledger) { l.effects = l.effects[:2]; delete(l.done, id("a", "1")); l.accounts["c"] = 2 }, "neither an effect nor a dead letter"},
		"lost dead letter":    {func(l *ledger) { delete(l.dead, id("b", "1")) }, "neither an effect nor a dead letter"},
		"double effect":       {func(l *ledger) { l.effects = append(l.effects, id("a", "1")); l.accounts["c"] = 4 }, "has 2 effects, 0 dead"},
		"double dead letter":  {func(l *ledger) { l.dead[id("b", "1")] = slices.Repeat(l.dead[id("b", "1")], 2) }, "has 0 effects, 2 dead"},
		"both":                {func(l *ledger) { l.dead[id("c", "1")] = []inbox.Reason{inbox.ReasonConflict} }, "has 1 effects and 1 dead letters"},
		"both bodies":         {func(l *ledger) { l.effects = append(l.effects, id("a", "2")); delete(l.dead, id("a", "2")) }, "as another body of its key"},
		"nobody sent it":      {func(l *ledger) { l.effects = append(l.effects, id("x", "1")) }, "was not sent"},
		"poison works":        {func(l *ledger) { l.effects = append(l.effects, id("b", "1")); delete(l.dead, id("b", "1")) }, "is poison and has an effect"},
		"died for nothing":    {func(l *ledger) { l.sent[id("b", "1")] = false }, "is a dead letter: attempts exhausted"},
		"conflict of nothing": {func(l *ledger) { l.dead[id("b", "1")] = []inbox.Reason{inbox.ReasonConflict} }, "conflict with nothing"},
		"no inbox row":        {func(l *ledger) { delete(l.done, id("a", "1")) }, "1 effects and 0 rows in the inbox"},
		"claim without work":  {func(l *ledger) { l.done[id("b", "1")] = 1 }, "0 effects and 1 rows in the inbox"},
		"an effect in part":   {func(l *ledger) { l.accounts["c"]++ }, "the accounts say 4"},
		"overtaken":           {func(l *ledger) { slices.Reverse(l.effects) }, "came after"},
		"still parked":        {func(l *ledger) { l.open = 1 }, "1 parked messages still wait"},
		"guard row":           {func(l *ledger) { l.guards = 1 }, "1 guard rows"},
	} {
		l := good()
		row.spoil(l)
		wrong := l.check()
		if !slices.ContainsFunc(wrong, func(v violation) bool { return strings.Contains(v.rule, row.says) }) {
			t.Errorf("%s: the ledger says %v", name, wrong)
		}
	}
}
