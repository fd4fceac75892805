package inboxtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Fault is a set of kinds of faults.
type Fault uint32

// The kinds of faults.
const (
	// FaultDuplicate publishes messages twice, the second time with another
	// broker id, position and time, as a producer does that got no answer.
	FaultDuplicate Fault = 1 << iota

	// FaultRedelivery delivers messages again as they were after they were acked,
	// as offsets that are set back do.
	FaultRedelivery

	// FaultReorder delivers messages of different lanes in any order.
	FaultReorder

	// FaultTwin gives a message to another process just when its transaction is
	// about to be committed.
	FaultTwin

	// FaultOverlap handles another message, of another lane, while the handler is
	// between two statements or its transaction is not committed yet. A database
	// with one writer (SQLite) has no such thing.
	FaultOverlap

	// FaultRevoke takes deliveries away: while the handler runs (its context ends),
	// or after COMMIT and before the ack.
	FaultRevoke

	// FaultCrash lets the process die: while the handler runs, before COMMIT, or
	// after COMMIT and before the ack. Another one takes over.
	FaultCrash

	// FaultCommitLost loses the answer to COMMIT, which was carried out or not.
	FaultCommitLost

	// FaultError fails the handler: one of its statements, or its end.
	FaultError

	// FaultPanic lets the handler panic after its work.
	FaultPanic

	// FaultCancel ends the handler's context, before it starts or at one of its
	// statements.
	FaultCancel

	// FaultDatabase fails the database: no connection, a connection that is lost,
	// a serialization failure at a statement or at COMMIT.
	FaultDatabase

	// FaultPoison lets one message fail for good: it must leave nothing but a
	// dead letter.
	FaultPoison

	// FaultDisorder delivers messages in any order, against their lanes. Only a
	// handler that needs no order at all stands it; it is not in DefaultFaults.
	FaultDisorder

	// DefaultFaults are all that every handler has to stand.
	DefaultFaults = FaultDisorder - 1
)

// kind is one thing that can go wrong.
type kind int

const (
	beginDown kind = iota
	beginBusy
	runError
	runBusy
	runLost
	runPanic
	runCancel
	runCrash
	runRevoke
	runOverlap
	commitRefused
	commitLostNo
	commitLostYes
	commitCrashBefore
	commitCrashAfter
	commitRevoke
	commitTwin
)

// point is where a kind of fault can happen.
type point int

const (
	atBegin point = iota
	atRun
	atCommit
)

// kinds say what each kind belongs to, where it happens, and how it is called.
var kinds = []struct {
	of   Fault
	at   point
	text string
}{
	beginDown:         {FaultDatabase, atBegin, "no connection to the database"},
	beginBusy:         {FaultDatabase, atBegin, "a serialization failure when the key is claimed"},
	runError:          {FaultError, atRun, "an error"},
	runBusy:           {FaultDatabase, atRun, "a serialization failure"},
	runLost:           {FaultDatabase, atRun, "the connection is lost"},
	runPanic:          {FaultPanic, atRun, "a panic"},
	runCancel:         {FaultCancel, atRun, "the handler's context ends"},
	runCrash:          {FaultCrash, atRun, "the process dies"},
	runRevoke:         {FaultRevoke, atRun, "the delivery is lost"},
	runOverlap:        {FaultOverlap, atRun, "another process handles another message"},
	commitRefused:     {FaultDatabase, atCommit, "a serialization failure at COMMIT"},
	commitLostNo:      {FaultCommitLost, atCommit, "no answer to COMMIT, which was not carried out"},
	commitLostYes:     {FaultCommitLost, atCommit, "no answer to COMMIT, which was carried out"},
	commitCrashBefore: {FaultCrash, atCommit, "the process dies before COMMIT"},
	commitCrashAfter:  {FaultCrash, atCommit, "the process dies after COMMIT, before the ack"},
	commitRevoke:      {FaultRevoke, atCommit, "the delivery is lost after COMMIT, before the ack"},
	commitTwin:        {FaultTwin, atCommit, "another process gets the message just before COMMIT"},
}

// fault is something that goes wrong, once: with a message, at the first chance
// from its time-th claim, run or commit on.
type fault struct {
	kind      kind
	message   int
	time      int // from 1
	statement int // of the run, from 1; 0: when the handler has returned
	other     int // the message that overlaps, or the next one that can
}

// copyKind says how a published message relates to the one that was given.
type copyKind int

const (
	original copyKind = iota
	duplicate
	redelivery
)

// entry is one message in the order of publication.
type entry struct {
	message int
	copy    copyKind
}

// schedule is all that is decided about a round beforehand.
type schedule struct {
	entries []entry
	batches []int // batch sizes of the processes, over and over
	faults  []fault
	poison  int    // the message that fails for good; -1: none
	absent  []bool // by message: not in this round
}

// plain returns the schedule of an undisturbed run.
func (c *chaos[Tx]) plain() *schedule {
	s := &schedule{batches: []int{1}, poison: -1, absent: make([]bool, len(c.messages))}
	for i := range c.messages {
		s.entries = append(s.entries, entry{message: i})
	}
	return s
}

func (s *schedule) clone() *schedule {
	d := *s
	d.entries, d.batches = slices.Clone(s.entries), slices.Clone(s.batches)
	d.faults, d.absent = slices.Clone(s.faults), slices.Clone(s.absent)
	return &d
}

// generate makes a schedule from a seed.
func (c *chaos[Tx]) generate(seed uint64) *schedule {
	const stream = 0x61636b6166746572
	rng := rand.New(rand.NewPCG(seed, stream)) //nolint:gosec // It must be the same each time.
	s := c.plain()
	c.order(rng, s)
	c.copies(rng, s)
	s.batches = nil
	for range 1 + rng.IntN(3) {
		s.batches = append(s.batches, 1+rng.IntN(2)*rng.IntN(min(len(s.entries), 8)))
	}
	if c.cfg.Faults&FaultPoison != 0 && len(c.messages) > 1 && rng.IntN(4) == 0 {
		if i := rng.IntN(len(c.messages)); !c.hasDuplicate(i) {
			s.poison = i
		}
	}
	var possible [][]kind // by what they belong to
	for of := Fault(1); of <= DefaultFaults; of <<= 1 {
		var group []kind
		for k, about := range kinds {
			if about.of == of && c.cfg.Faults&of != 0 {
				group = append(group, kind(k))
			}
		}
		if group != nil {
			possible = append(possible, group)
		}
	}
	if len(possible) == 0 {
		return s
	}
	for range 1 + rng.IntN(min(3+len(c.messages)/2, 8)) {
		s.faults = append(s.faults, c.fault(rng, possible))
	}
	return s
}

func (c *chaos[Tx]) fault(rng *rand.Rand, possible [][]kind) fault {
	group := possible[rng.IntN(len(possible))]
	f := fault{kind: group[rng.IntN(len(group))], message: rng.IntN(len(c.messages)), time: 1}
	if rng.IntN(4) == 0 {
		f.time = 2
	}
	if n := c.statements[f.message]; kinds[f.kind].at == atRun && f.kind != runPanic && n > 0 && rng.IntN(2) == 0 {
		f.statement = 1 + rng.IntN(n)
	}
	if f.kind == runOverlap {
		f.other = rng.IntN(len(c.messages))
	}
	return f
}

// order chooses the order of delivery.
func (c *chaos[Tx]) order(rng *rand.Rand, s *schedule) {
	switch {
	case c.cfg.Faults&FaultDisorder != 0:
		rng.Shuffle(len(s.entries), func(i, j int) { s.entries[i], s.entries[j] = s.entries[j], s.entries[i] })
	case c.cfg.Faults&FaultReorder != 0 && rng.IntN(4) > 0:
		rng.Shuffle(len(s.entries), func(i, j int) { s.entries[i], s.entries[j] = s.entries[j], s.entries[i] })
		c.sortLanes(s.entries)
	}
}

// sortLanes puts the messages of each lane into their order, at the places that
// the lane has.
func (c *chaos[Tx]) sortLanes(entries []entry) {
	places := map[string][]int{}
	for at, e := range entries {
		if lane := c.lanes[e.message]; lane != "" {
			places[lane] = append(places[lane], at)
		}
	}
	for _, at := range places {
		members := make([]entry, len(at))
		for i, a := range at {
			members[i] = entries[a]
		}
		slices.SortFunc(members, func(a, b entry) int { return a.message - b.message })
		for i, a := range at {
			entries[a] = members[i]
		}
	}
}

// copies puts in copies of messages, behind them.
func (c *chaos[Tx]) copies(rng *rand.Rand, s *schedule) {
	for _, k := range []struct {
		of   Fault
		copy copyKind
	}{{FaultDuplicate, duplicate}, {FaultRedelivery, redelivery}} {
		if c.cfg.Faults&k.of == 0 {
			continue
		}
		for i := range c.messages {
			if rng.IntN(4) > 0 {
				continue
			}
			first := slices.IndexFunc(s.entries, func(e entry) bool { return e.message == i })
			at := first + 1 + rng.IntN(len(s.entries)-first)
			s.entries = slices.Insert(s.entries, at, entry{message: i, copy: k.copy})
		}
	}
}

// withoutMessages drops the entries of absent messages.
func withoutMessages(entries []entry, absent []bool) []entry {
	return slices.DeleteFunc(slices.Clone(entries), func(e entry) bool { return absent[e.message] })
}

// steps counts what makes a schedule differ from an undisturbed run.
func (s *schedule) steps() int {
	n := len(s.faults)
	for _, e := range s.entries {
		if e.copy != original {
			n++
		}
	}
	if s.poison >= 0 {
		n++
	}
	if !s.inOrder() {
		n++
	}
	return n
}

// inOrder tells that the messages come in the order in which they were given.
func (s *schedule) inOrder() bool {
	last := -1
	for _, e := range s.entries {
		if e.copy != original {
			continue
		}
		if e.message < last {
			return false
		}
		last = e.message
	}
	return true
}

// describe returns the schedule for people, a line for each thing.
func (c *chaos[Tx]) describe(s *schedule) []string {
	var order []string
	copies := false
	for _, e := range s.entries {
		order = append(order, fmt.Sprint(e.message+1)+[]string{original: "", duplicate: "'", redelivery: "*"}[e.copy])
		copies = copies || e.copy != original
	}
	line := "delivered in the order " + strings.Join(order, " ")
	if copies {
		line += "  (': published again with another id, *: delivered again)"
	}
	lines := []string{line}
	if slices.Max(s.batches) > 1 {
		lines = append(lines, fmt.Sprintf("in transactions of up to %v messages (first process, second, ...)", s.batches))
	}
	if s.poison >= 0 {
		lines = append(lines, c.names[s.poison]+" fails in every run, for good")
	}
	for _, f := range s.faults {
		lines = append(lines, c.describeFault(f))
	}
	return lines
}

func (c *chaos[Tx]) describeFault(f fault) string {
	about := kinds[f.kind]
	where := map[point]string{atBegin: "claim", atRun: "run", atCommit: "commit"}[about.at]
	text := fmt.Sprintf("%s, %s %d: %s", c.names[f.message], where, f.time, about.text)
	switch {
	case about.at != atRun:
	case f.statement > 0:
		text += fmt.Sprintf(" at statement %d", f.statement)
	case f.kind == runCancel:
		text += " before it starts"
	default:
		text += " after the handler's work"
	}
	return text
}
