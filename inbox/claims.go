package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
)

// plan chooses what to claim. Keys are distinct in a batch: a second message
// with the same key and fingerprint follows the first one's fate; one with
// another fingerprint waits for the next batch, and its lane with it.
func (a *attempt[Tx]) plan() []Claim {
	sortFed(a.works)
	type id struct{ tenant, key string }
	leaders := make(map[id]*work, len(a.works))
	a.index = make(map[*work]int, len(a.works))
	claims := make([]Claim, 0, len(a.works))
	for _, w := range a.works {
		switch {
		case w.lost() && !w.effectsUnknown():
			w.fate.kind = fateLost
			continue
		case w.recalled():
			a.hold(w)
			continue
		case w.keyErr != nil, a.held[w.lane()]:
			continue
		}
		k := id{w.claim.Tenant, w.claim.MessageKey}
		leader := leaders[k]
		switch {
		case leader == nil:
			leaders[k] = w
			w.claim.Attempt = w.failed + 1
			a.index[w] = len(claims)
			claims = append(claims, w.claim)
		case string(leader.claim.Fingerprint) == string(w.claim.Fingerprint) && !w.fed(): // A parked row goes only with a claim of its own.
			if a.twins == nil {
				a.twins = map[*work]*work{}
			}
			a.twins[w] = leader
		default:
			a.hold(w)
		}
	}
	return claims
}

// sortFed brings fed messages of one lane, which are neighbours, into the order of
// their rows: one that was fed again has come behind those that were fed with it
// before and wait for it.
func sortFed(works []*work) {
	for len(works) > 0 {
		n := 1
		for n < len(works) && works[n].lane() == works[0].lane() {
			n++
		}
		if works[0].fed() && works[0].lane() != "" {
			slices.SortStableFunc(works[:n], func(a, b *work) int { return cmp.Compare(a.claim.Parked.ID, b.claim.Parked.ID) })
		}
		works = works[n:]
	}
}

func (a *attempt[Tx]) anyKeyless() bool {
	for _, w := range a.works {
		if w.keyErr != nil && w.fate.kind == fateOpen && a.park {
			return true
		}
	}
	return false
}

// hold keeps the rest of w's lane from running in this attempt.
func (a *attempt[Tx]) hold(w *work) {
	if lane := w.lane(); lane != "" {
		a.held[lane] = true
	}
}

// unplanned decides about a message that has no claim of its own in this
// attempt: a twin follows its leader, anything else waits, and its lane with it.
func (a *attempt[Tx]) unplanned(w *work, held bool) {
	leader := a.twins[w]
	switch {
	case leader != nil && a.c.bulk && leader.fate.kind == fateOpen && !a.held[leader.lane()]:
		// The leader runs at the end, with the group.
	case leader != nil && a.follow(w, leader):
	case leader != nil || held:
		a.hold(w)
	}
}

// follow gives a twin its fate when its leader is done; it reports whether the
// twin has one.
func (a *attempt[Tx]) follow(w, leader *work) bool {
	if leader.fate.kind != fateDone || (leader.fate.outcome != FirstAttempt && leader.fate.outcome != Replay) {
		return false
	}
	w.fate = fate{kind: fateDone, outcome: Replay, first: leader.fate.first, value: leader.fate.value}
	return true
}

// entry looks at the answer to one claim and reports whether the handler is to
// run.
func (a *attempt[Tx]) entry(ctx context.Context, w *work, i int) (bool, error) {
	e := a.batch.Entries()[i]
	if e.Gone {
		w.fate.kind = fateLost
		a.hold(w)
		return false, nil
	}
	switch e.Outcome {
	case FirstAttempt:
		return a.claimed(ctx, w, i, e)
	case Conflict:
		return false, a.conflict(ctx, w, i, e)
	case Replay, Dead, WasParked:
	default:
		return false, &batchError{stage: stageHandler, err: fmt.Errorf("inbox: the store answered a claim with outcome %q", e.Outcome)}
	}
	switch {
	case w.effectsUnknown() && a.park:
		// The row may be the one that the handler committed by itself.
		return false, a.parkNow(ctx, w, i, w.verdict)
	case w.fed() && e.Outcome != Replay:
		return false, a.parkNow(ctx, w, i, dead(ReasonInvalidKey, errParkedTwice))
	}
	w.fate = fate{kind: fateDone, outcome: e.Outcome, first: e.Stored}
	if e.Stored != nil {
		w.fate.value = e.Stored.Result
	}
	return false, nil
}

// rowGoes tells that the commit deletes the parked row that w comes from, unless it
// is parked again: so it must be decided about, also when its lane is held.
func (a *attempt[Tx]) rowGoes(w *work, i int) bool {
	o := a.batch.Entries()[i].Outcome
	return w.fed() && (o == Replay || o == Conflict)
}

// errParkedTwice is what becomes of a message that was parked without a key, when
// the key that is derived now is that of another parked message.
var errParkedTwice = errors.New("inbox: the key that is derived now is that of another parked message, with the same body")

// claimed decides about a message whose key is ours, and reports whether the handler
// is to run.
func (a *attempt[Tx]) claimed(ctx context.Context, w *work, i int, e Entry) (bool, error) {
	switch {
	case w.verdict != nil && a.park:
		return false, a.parkNow(ctx, w, i, w.verdict)
	case w.lost():
		w.fate.kind = fateLost
	case w.recalled(), a.mayNotStart(ctx), a.waits[w.lane()] && !e.Held:
		a.hold(w)
	case !e.Held || !a.park:
		return true, nil
	case w.fed():
		// Those of its lane that were claimed with it may be what holds it.
		if !a.behind(w) {
			w.fate.kind = fateHeld
		}
		a.hold(w)
	case e.Full:
		w.fate.kind = fateFull
		a.hold(w)
	default:
		a.waits[w.lane()] = true // What comes after it does not run before it.
		return false, a.parkNow(ctx, w, i, &verdict{state: ParkedWaiting, reason: ReasonWaiting})
	}
	return false, nil
}

// behind tells that another message of w's lane comes before it in this attempt.
func (a *attempt[Tx]) behind(w *work) bool {
	for _, other := range a.works {
		if other == w {
			break
		}
		if other.lane() == w.lane() {
			return w.lane() != ""
		}
	}
	return false
}

func (a *attempt[Tx]) conflict(ctx context.Context, w *work, i int, e Entry) error {
	conflict := fate{kind: fateDone, outcome: Conflict, first: e.Stored, value: e.Stored.Result}
	w.fate = conflict
	v := dead(ReasonConflict, ErrConflict)
	if a.c.cfg.OnConflict == ConflictFail {
		a.hold(w) // Nothing behind it may run.
		v = &verdict{state: ParkedRetry, reason: ReasonConflict, err: ErrConflict}
	}
	switch {
	case !a.park, a.c.cfg.OnConflict == ConflictSkip, a.c.cfg.OnConflict == ConflictFail && !w.fed():
		return nil // A parked row must not vanish with an error; else it would.
	}
	err := a.parkNow(ctx, w, i, v)
	if w.fate.kind == fateDone {
		conflict.reason, conflict.err = w.fate.reason, w.fate.err
		w.fate = conflict
	}
	return err
}
