package inbox

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// beatEvery is the time between two signs of life of a Run; one that has given
	// none for beatStale is dead.
	beatEvery   = 10 * time.Second
	beatStale   = 3 * beatEvery
	beatTimeout = 5 * time.Second
	// After a death, deliveries are run with care for careTime at least, and those
	// that are known to have been handed out before for redeliveredCare.
	careTime        = time.Minute
	redeliveredCare = time.Hour
)

// careful lets one message through at a time that is run with care, in the whole
// process: when the process dies, only that message has a mark for it, whichever
// consumer it belongs to.
var careful turnstile

// ownRuns are the ids of the Runs of this process.
var ownRuns sync.Map

// caution finds out that a Run of the consumer has died, and then sees to it that
// what it may have had in its hands is run one message at a time, each after a mark
// for it was committed. A message that has too many marks is not run again.
//
// A nil caution does nothing.
type caution[Tx any] struct {
	r      *runner[Tx]
	marker Marker
	self   RunRecord

	mu    sync.Mutex
	dead  map[string]time.Time // Runs that died, by when that was noticed
	wrong map[string]bool      // Runs that were thought to be dead and are not
	since time.Time            // when the last death was noticed; zero: none
	first time.Time            // when the first message was run with care since then
	left  int                  // messages that are to be run with care in any case

	// Of beat, which is not called by two at once.
	beaten  bool      // a beat has succeeded
	trouble bool      // it was told that they fail
	judges  time.Time // from when on the ages of others count
}

// newCaution returns nil when there is nothing to be done.
func newCaution[Tx any](r *runner[Tx]) *caution[Tx] {
	marker, ok := any(r.c.store).(Marker)
	if !ok || r.c.cfg.Retry.MaxCrashes <= 0 {
		return nil
	}
	host, err := os.Hostname()
	if err != nil {
		host = ""
	}
	k := &caution[Tx]{
		r: r, marker: marker, dead: map[string]time.Time{}, wrong: map[string]bool{},
		self: RunRecord{ID: strconv.Itoa(os.Getpid()) + "-" + rand.Text(), Worker: r.c.cfg.Worker, Host: host},
	}
	ownRuns.Store(k.self.ID, nil)
	return k
}

// keep gives signs of life until the stop.
func (k *caution[Tx]) keep() {
	for sleep(k.r.soft, nil, beatEvery) {
		k.beat()
	}
}

// close says that this Run has ended, and not died.
func (k *caution[Tx]) close() {
	if k == nil {
		return
	}
	defer ownRuns.Delete(k.self.ID)
	if !k.beaten {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(k.r.hard), beatTimeout)
	defer cancel()
	if err := k.marker.EndRuns(ctx, k.r.c.name, k.self.ID); err != nil {
		k.log(slog.LevelWarn, "inbox: the stop could not be recorded: the next run may begin with one message at a time", slog.Any("error", err))
	}
}

// beat gives a sign of life and looks for those of others.
func (k *caution[Tx]) beat() {
	if k == nil {
		return
	}
	ctx, cancel := context.WithTimeout(k.r.soft, beatTimeout)
	defer cancel()
	runs, err := k.marker.Beat(ctx, k.r.c.name, k.self)
	if err != nil {
		// The loop itself tells of a database that cannot be used.
		if c := k.r.c.store.Classify(err); ctx.Err() == nil && c == ClassMessage && !k.trouble {
			k.trouble = true
			k.log(slog.LevelWarn, "inbox: signs of life cannot be recorded: a message that kills the process may not be found out", slog.Any("error", err))
		}
		return
	}
	// Whoever could not beat for a while is not in a position to say that others did
	// not: the database may have been away for all, and some come back later.
	late := k.beaten
	for i := range runs {
		if runs[i].ID == k.self.ID && runs[i].Age <= 2*beatEvery {
			late = false
		}
	}
	if late {
		k.judges = time.Now().Add(beatStale)
	}
	k.beaten, k.trouble = true, false
	if over := k.judge(runs, time.Now().Before(k.judges)); len(over) > 0 {
		if err := k.marker.EndRuns(ctx, k.r.c.name, over...); err != nil {
			k.log(slog.LevelDebug, "inbox: runs that died could not be forgotten", slog.Any("error", err))
		}
	}
}

// judge finds out which Runs are dead, and returns those that were so for long enough
// for every other Run to have noticed.
func (k *caution[Tx]) judge(runs []RunRecord, late bool) (over []string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	for i := range runs {
		run := &runs[i]
		noticed, known := k.dead[run.ID]
		switch {
		case run.ID == k.self.ID:
		case known && run.Age+beatEvery/2 < now.Sub(noticed):
			// It has beaten since. (Another machine has the same name, or it was
			// stopped for a while.)
			delete(k.dead, run.ID)
			k.wrong[run.ID] = true
			if len(k.dead) == 0 {
				k.since = time.Time{}
			}
		case known:
			if run.Age > 2*beatStale && !k.general(now) {
				over = append(over, run.ID)
			}
		case run.Age > beatStale && !late, k.gone(run):
			k.dead[run.ID] = now
			k.since, k.first = now, time.Time{}
			k.left = 2 * k.r.c.cfg.Workers * k.r.c.cfg.BatchSize
			k.log(slog.LevelWarn, "inbox: a run has ended without a stop: what it may have had in work is run one message at a time",
				slog.String("run", run.ID), slog.String("worker", run.Worker), slog.Duration("last_sign_of_life", run.Age))
		}
	}
	return over
}

// gone tells that a Run of this host is not there any more, without waiting for its
// signs of life. k.mu is held.
func (k *caution[Tx]) gone(run *RunRecord) bool {
	text, _, ok := strings.Cut(run.ID, "-")
	pid, err := strconv.Atoi(text)
	if !ok || err != nil || pid <= 0 || run.Host == "" || run.Host != k.self.Host || k.wrong[run.ID] {
		return false
	}
	if pid == os.Getpid() {
		// A container that was restarted often has the same name and ids.
		_, ours := ownRuns.Load(run.ID)
		return !ours
	}
	process, err := os.FindProcess(pid)
	if err != nil {
		return true
	}
	defer func() { _ = process.Release() }()
	return errors.Is(process.Signal(syscall.Signal(0)), os.ErrProcessDone)
}

// general tells that deliveries are run with care of which it is not known whether
// they were handed out before. k.mu is held.
func (k *caution[Tx]) general(now time.Time) bool {
	return !k.since.IsZero() && (k.left > 0 || k.first.IsZero() || now.Sub(k.first) < careTime)
}

// needed tells that a message is to be run with care: it may have been in work when a
// process died.
func (k *caution[Tx]) needed(w *work) bool {
	if k == nil || w.keyErr != nil || w.verdict != nil {
		return false
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Now()
	switch {
	case w.deaths > 0:
		return true
	case k.since.IsZero(), w.delivery.Attempt == 1:
		return false // The broker says that nobody has had it before.
	case w.fed(), w.delivery.Attempt > 1:
		return now.Sub(k.since) < redeliveredCare
	}
	return k.general(now)
}

// anyNeeded is needed for one of several.
func (k *caution[Tx]) anyNeeded(items []*item) bool {
	for _, it := range items {
		if k.needed(it.Value) {
			return true
		}
	}
	return false
}

// errProcessDied is what becomes of a message that kills its process.
var errProcessDied = errors.New("inbox: the process died while it ran this message alone")

// attempt is runner.transact for one message, with care.
func (k *caution[Tx]) attempt(ctx context.Context, it *item) *batchError {
	w := it.Value
	if !careful.enter(k.r.soft.Done(), w.end().Done()) {
		w.fate = fate{}
		if w.lost() {
			w.fate.kind = fateLost
		}
		return nil
	}
	defer careful.leave()
	marks, err := k.mark(ctx, w)
	switch {
	case err != nil:
		return err
	case marks == 0:
		return k.r.transact(ctx, []*item{it})
	}
	// Those of this process's own attempts that could not be taken back say nothing.
	w.deaths = marks - 1 - w.unmarked
	if w.deaths >= k.r.c.cfg.Retry.MaxCrashes {
		w.verdict = dead(ReasonProcessDied, fmt.Errorf("%w, %d times", errProcessDied, w.deaths))
	}
	failed := k.r.transact(ctx, []*item{it})
	done := failed == nil && w.fate.kind == fateDone && w.fate.outcome != WasParked
	k.unmark(ctx, w, done)
	return failed
}

// mark commits a mark. It returns 0 when the message can be run without.
func (k *caution[Tx]) mark(ctx context.Context, w *work) (int, *batchError) {
	mctx, cancel := context.WithTimeout(ctx, statementTimeout)
	defer cancel()
	marks, err := k.marker.MarkStart(mctx, w.claim)
	switch {
	case err == nil && marks > 0:
		k.mu.Lock()
		k.left = max(k.left-1, 0)
		if k.first.IsZero() {
			k.first = time.Now()
		}
		k.mu.Unlock()
	case err == nil:
	case mctx.Err() != nil, errors.Is(err, ErrInFlight), k.r.c.store.Classify(err) != ClassMessage:
		return 0, &batchError{stage: stageBegin, err: err, down: mctx.Err() != nil && ctx.Err() == nil}
	default:
		k.log(slog.LevelWarn, "inbox: the start of a message could not be marked", append(k.r.c.attrs(w)[1:], slog.Any("error", err))...)
		return 0, nil
	}
	return marks, nil
}

// unmark takes the mark back: the process has not died of it.
func (k *caution[Tx]) unmark(ctx context.Context, w *work, all bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), beatTimeout)
	defer cancel()
	if err := k.marker.UnmarkStart(ctx, w.claim, all); err != nil {
		w.unmarked++
		k.log(slog.LevelDebug, "inbox: the mark of a message could not be taken back", append(k.r.c.attrs(w)[1:], slog.Any("error", err))...)
	}
}

func (k *caution[Tx]) log(level slog.Level, text string, attrs ...slog.Attr) {
	//nolint:sloglint // The callers' texts are constants.
	k.r.c.cfg.Logger.LogAttrs(k.r.hard, level, text, append([]slog.Attr{slog.String("consumer", k.r.c.name)}, attrs...)...)
}
