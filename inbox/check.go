package inbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"time"
)

// Severity says how much a Finding matters.
type Severity string

// The severities.
const (
	// SeverityError: with this the promise does not hold, or nothing works.
	SeverityError Severity = "error"
	// SeverityWarning: the promise holds, but something that belongs to it is
	// weaker, or the consumer can come to a stop.
	SeverityWarning Severity = "warning"
	// SeverityInfo: worth knowing.
	SeverityInfo Severity = "info"
)

// rank orders severities, the worst first.
func (s Severity) rank() int {
	return slices.Index([]Severity{SeverityError, SeverityWarning, SeverityInfo}, s)
}

// Finding is something about a consumer, its store or its database that its user
// should know. It holds no keys, bodies or passwords.
type Finding struct {
	// Code names the kind of finding: lower case words, "fsync". Codes do not
	// change between releases; a new release may have new ones.
	Code string
	// Severity says how much it matters.
	Severity Severity
	// Setting is what it is about: a setting of the database, a field of Config, a
	// table. Value is what it is now.
	Setting, Value string
	// Meaning says what follows from it, Advice what to do; both in plain words.
	Meaning, Advice string
}

// Advisor is implemented by stores that know which settings of their database
// weaken the promise. All of this module do.
type Advisor interface {
	// Advise looks at the database and changes nothing. It returns findings in any
	// order; nil when there are none. It works with missing or outdated tables, on a
	// standby, and with a role that may only connect; what cannot be seen is no
	// finding. The error says that the database could not be asked.
	Advise(ctx context.Context, r AdviceRequest) ([]Finding, error)
}

// AdviceRequest says what the settings are judged for. The zero value is fine: what
// is zero is not judged.
type AdviceRequest struct {
	// Consumer whose parked messages are looked at.
	Consumer string
	// Workers is how many transactions are open at once, BatchSize how many
	// handlers may run in each of them.
	Workers, BatchSize int
	// LockTimeout, BatchTime and HandlerTimeout are those of Config. A
	// HandlerTimeout that is not positive: a handler has no bound.
	LockTimeout, BatchTime, HandlerTimeout time.Duration
}

// SortFindings orders findings: the worst first, then by code and setting.
func SortFindings(found []Finding) {
	slices.SortStableFunc(found, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.Severity.rank(), b.Severity.rank()), cmp.Compare(a.Code, b.Code), cmp.Compare(a.Setting, b.Setting))
	})
}

const (
	// checkTimeout bounds Check.
	checkTimeout = 10 * time.Second
	// startCheckTimeout bounds the check of a Run that begins.
	startCheckTimeout = 5 * time.Second
)

// Check looks for what makes the promise weaker than it seems: settings of the
// database and of the consumer, a pooler in between, missing privileges. It
// changes nothing, takes at most 10 s, and may be called at any time. The findings
// are sorted, the worst first; docs/operations.md explains each code.
//
// The error says that the database could not be asked; the findings that need no
// database are returned all the same.
//
// The first Run of a consumer does the same in the background and logs what it
// finds, so that Check is for tests of a deployment and for diagnosis.
func (c *Consumer[Tx]) Check(ctx context.Context) ([]Finding, error) {
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	found := c.ownFindings()
	storeErr := c.store.Check(ctx)
	if storeErr != nil && (ctx.Err() != nil || c.store.Classify(storeErr) == ClassUnavailable) {
		return found, fmt.Errorf("inbox: consumer %q: check the store: %w", c.name, storeErr)
	}
	advised, err := c.advise(ctx, c.name)
	found = append(found, advised...)
	if storeErr != nil && !slices.ContainsFunc(advised, func(f Finding) bool { return f.Severity == SeverityError }) {
		found = append(found, storeFinding(storeErr))
	}
	SortFindings(found)
	return found, err
}

// advise asks the store, if it is an Advisor. consumer may be empty, see
// AdviceRequest.
func (c *Consumer[Tx]) advise(ctx context.Context, consumer string) ([]Finding, error) {
	advisor, ok := c.store.(Advisor)
	if !ok {
		return nil, nil
	}
	r := AdviceRequest{
		Consumer: consumer, Workers: c.cfg.Workers, BatchSize: c.cfg.BatchSize,
		LockTimeout: c.cfg.LockTimeout, BatchTime: c.cfg.BatchTime, HandlerTimeout: c.cfg.HandlerTimeout,
	}
	if c.bulk {
		r.BatchSize = 1
	}
	found, err := advisor.Advise(ctx, r)
	if err != nil {
		return found, fmt.Errorf("inbox: consumer %q: look at the settings of the database: %w", c.name, err)
	}
	return found, nil
}

// storeFinding is for an error of Store.Check that only a person can mend.
func storeFinding(err error) Finding {
	f := Finding{
		Code: "store", Severity: SeverityError, Setting: "store", Value: err.Error(),
		Meaning: "The store cannot be used: Run does not start.", Advice: "See the error.",
	}
	switch {
	case errors.Is(err, ErrNoSchema):
		f.Code, f.Advice = "tables_missing", "Make the tables: ackafter migrate up."
	case errors.Is(err, ErrSchemaVersion):
		f.Code, f.Advice = "tables_version", "Bring the tables and this release together: ackafter migrate status, docs/operations.md."
	}
	return f
}

// ownFindings are those about the configuration alone.
func (c *Consumer[Tx]) ownFindings() []Finding {
	var found []Finding
	add := func(is bool, f Finding) {
		if is {
			found = append(found, f)
		}
	}
	cfg := c.cfg
	add(cfg.HandlerTimeout <= 0, Finding{
		Code: "handler_timeout", Severity: SeverityWarning, Setting: "Config.HandlerTimeout", Value: "none",
		Meaning: "Nothing ends a handler that hangs: its lane, a worker and its connection are held until the process ends, and the keys of a client that is gone until the database notices.",
		Advice:  "Give handlers a time, however long.",
	})
	add(cfg.MaxInFlight > 0 && cfg.MaxInFlight < cfg.Workers*cfg.BatchSize, Finding{
		Code: "max_in_flight", Severity: SeverityInfo, Setting: "Config.MaxInFlight", Value: strconv.Itoa(cfg.MaxInFlight),
		Meaning: fmt.Sprintf("%d workers with batches of %d never have full batches.", cfg.Workers, cfg.BatchSize),
		Advice:  fmt.Sprintf("Twice Workers x BatchSize (%d) keeps them busy; lower BatchSize instead if memory is the point.", 2*cfg.Workers*cfg.BatchSize),
	})
	add(cfg.Retry.MaxAttempts <= 0, Finding{
		Code: "max_attempts", Severity: SeverityInfo, Setting: "Config.Retry.MaxAttempts", Value: "no limit",
		Meaning: "A message that cannot succeed is tried for ever, unless its handler says Permanent, and its lane waits behind it.",
		Advice:  "Set a limit, and see to the dead letters.",
	})
	add(c.parker != nil && cfg.Parking.Poll <= 0, Finding{
		Code: "parking_poll", Severity: SeverityInfo, Setting: "Config.Parking.Poll", Value: "off",
		Meaning: "This process does not feed parked messages back and purges no dead letters.",
		Advice:  "See that another process of the consumer does; ackafter check --consumer tells when parked messages are overdue.",
	})
	add(c.parker == nil, Finding{
		Code: "parking_store", Severity: SeverityInfo, Setting: "store", Value: fmt.Sprintf("%T", c.store),
		Meaning: "The store does not give parked messages back: a failed message waits in its lane for each of its attempts.",
		Advice:  "Keep Retry.MaxBackoff short, or use a store that is an inbox.Parker.",
	})
	add(cfg.Retention <= 0, Finding{
		Code: "retention", Severity: SeverityInfo, Setting: "Config.Retention", Value: "for ever",
		Meaning: "Keys never expire: the inbox table only grows.",
		Advice:  "Choose a window that is longer than anybody retries.",
	})
	return found
}

// checkAtStart logs what there is to know about the settings, once for a consumer.
// It is no part of the start: nothing waits for it, and nothing fails by it.
func (r *runner[Tx]) checkAtStart() {
	if r.soft.Err() != nil || !r.c.advised.CompareAndSwap(false, true) {
		return
	}
	ctx, cancel := context.WithTimeout(r.soft, startCheckTimeout)
	defer cancel()
	// Messages that are overdue say nothing now: nobody may have been there to feed them.
	advised, err := r.c.advise(ctx, "")
	found := append(r.c.ownFindings(), advised...)
	SortFindings(found)
	for _, f := range found {
		level := slog.LevelWarn
		if f.Severity == SeverityInfo {
			level = slog.LevelInfo
		}
		r.c.cfg.Logger.LogAttrs(r.soft, level, "inbox: check",
			slog.String("consumer", r.c.name), slog.String("code", f.Code), slog.String("severity", string(f.Severity)),
			slog.String("setting", f.Setting), slog.String("value", f.Value),
			slog.String("meaning", f.Meaning), slog.String("advice", f.Advice))
	}
	if err != nil {
		r.c.cfg.Logger.LogAttrs(r.soft, slog.LevelDebug, "inbox: the settings could not be checked",
			slog.String("consumer", r.c.name), slog.Any("error", err))
	}
}
