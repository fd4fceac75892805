package inbox

import (
	"context"
	"fmt"
)

// plan chooses what to claim. Keys are distinct in a batch: a second message
// with the same key and fingerprint follows the first one's fate; one with
// another fingerprint waits for the next batch, and its lane with it.
func (a *attempt[Tx]) plan() []Claim {
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
		case string(leader.claim.Fingerprint) == string(w.claim.Fingerprint):
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
	switch e.Outcome {
	case FirstAttempt:
	case Conflict:
		return false, a.conflict(ctx, w, i, e)
	case Replay, Dead, WasParked:
		if w.effectsUnknown() && a.park {
			// The row may be the one that the handler committed by itself.
			return false, a.parkNow(ctx, w, -1, w.doomed)
		}
		w.fate = fate{kind: fateDone, outcome: e.Outcome, first: e.Stored}
		if e.Stored != nil {
			w.fate.value = e.Stored.Result
		}
		return false, nil
	default:
		return false, &batchError{stage: stageHandler, err: fmt.Errorf("inbox: the store answered a claim with outcome %q", e.Outcome)}
	}
	switch {
	case w.doomed != nil && a.park:
		return false, a.parkNow(ctx, w, i, w.doomed)
	case w.lost():
		w.fate.kind = fateLost
		return false, nil
	case w.recalled(), a.mayNotStart(ctx):
		a.hold(w)
		return false, nil
	}
	return true, nil
}

func (a *attempt[Tx]) conflict(ctx context.Context, w *work, i int, e Entry) error {
	w.fate = fate{kind: fateDone, outcome: Conflict, first: e.Stored, value: e.Stored.Result}
	if a.c.cfg.OnConflict == ConflictFail {
		a.hold(w) // Nothing behind it may run.
	}
	if a.c.cfg.OnConflict != ConflictDeadLetter || !a.park {
		return nil
	}
	first := w.fate
	err := a.parkNow(ctx, w, i, &doom{ReasonConflict, ErrConflict})
	w.fate.outcome, w.fate.first, w.fate.value = Conflict, first.first, first.value
	return err
}
