package inbox

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"time"
)

// observe writes the line of a message that is done with and tells the hooks.
func (c *Consumer[Tx]) observe(ctx context.Context, w *work) {
	c.vitals.succeed()
	if w.fate.err != nil {
		c.vitals.fail(c.errorKind(w.fate.err))
	}
	e := OutcomeEvent{
		Consumer:   c.name,
		Tenant:     w.claim.Tenant,
		MessageKey: w.claim.MessageKey,
		Message:    w.message,
		Outcome:    w.fate.outcome,
		Duration:   time.Since(w.start),
		TraceID:    w.claim.TraceID,
		Reason:     w.fate.reason,
		Err:        w.fate.err,
	}
	switch {
	case w.fate.outcome == Dead, w.fate.reason == ReasonFailed:
		e.Attempt = w.failed
	case w.fate.ran:
		e.Attempt = w.failed + 1
	}
	c.logOutcome(ctx, w, e)
	for _, h := range c.cfg.Hooks {
		if h, ok := h.(OnOutcome); ok {
			h.OnOutcome(hookCtx(ctx), e)
		}
	}
}

func (c *Consumer[Tx]) logOutcome(ctx context.Context, w *work, e OutcomeEvent) {
	level := slog.LevelInfo
	switch e.Outcome {
	case Conflict:
		level = slog.LevelWarn
	case Dead:
		if e.Reason != "" { // Otherwise a duplicate of one.
			level = slog.LevelError
		}
	}
	if !c.cfg.Logger.Enabled(ctx, level) {
		return
	}
	attrs := append(c.attrs(w),
		slog.String("outcome", string(e.Outcome)),
		slog.Int("attempt", e.Attempt),
		slog.Duration("duration", e.Duration))
	if w.fate.skipped != "" {
		attrs = append(attrs, slog.String("skipped", w.fate.skipped))
	}
	if e.Reason != "" {
		attrs = append(attrs, slog.String("reason", string(e.Reason)))
	}
	if e.Err != nil && e.Reason != ReasonFailed { // That one has a line of its own.
		attrs = append(attrs, errorAttrs(e.Err)...)
	}
	if w.fate.first != nil {
		attrs = append(attrs, slog.Time("first_handled", w.fate.first.ProcessedAt))
	}
	c.cfg.Logger.LogAttrs(ctx, level, "inbox: message", attrs...)
}

// errorAttrs are an error, and the stack of a panic.
func errorAttrs(err error) []slog.Attr {
	attrs := []slog.Attr{slog.Any("error", err)}
	var panicked *PanicError
	if errors.As(err, &panicked) && len(panicked.Stack) > 0 {
		attrs = append(attrs, slog.String("stack", string(panicked.Stack)))
	}
	return attrs
}

// refused writes the line of a message that Process did not handle.
func (c *Consumer[Tx]) refused(ctx context.Context, w *work, err error) {
	c.vitals.fail(c.errorKind(err))
	if c.cfg.Logger.Enabled(ctx, slog.LevelWarn) {
		c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "inbox: message not handled", append(c.attrs(w), errorAttrs(err)...)...)
	}
}

// attrs name a message in a log line.
func (c *Consumer[Tx]) attrs(w *work) []slog.Attr {
	attrs := make([]slog.Attr, 0, 12)
	attrs = append(attrs,
		slog.String("consumer", c.name),
		slog.String("key", w.storedKey()),
		slog.String("message_id", w.message.ID),
		slog.String("source", w.message.Source))
	if w.message.Position.Known {
		attrs = append(attrs, slog.Int64("position", w.message.Position.Offset))
	}
	if w.claim.Tenant != "" {
		attrs = append(attrs, slog.String("tenant", w.claim.Tenant))
	}
	if w.claim.TraceID != "" {
		attrs = append(attrs, slog.String("trace_id", w.claim.TraceID))
	}
	return attrs
}

func (c *Consumer[Tx]) onRetry(ctx context.Context, w *work, counted bool, delay time.Duration, err error) {
	c.vitals.fail(c.errorKind(err))
	attempt := w.failed
	if !counted {
		attempt++
	}
	c.cfg.Logger.LogAttrs(ctx, slog.LevelWarn, "inbox: attempt failed", append(append(c.attrs(w),
		slog.Int("attempt", attempt),
		slog.Bool("counted", counted),
		slog.Duration("retry_in", delay)), errorAttrs(err)...)...)
	e := RetryEvent{
		Consumer: c.name, Tenant: w.claim.Tenant, MessageKey: w.claim.MessageKey, Message: w.message,
		Attempt: attempt, Delay: delay, Counted: counted, Err: err,
	}
	for _, h := range c.cfg.Hooks {
		if h, ok := h.(OnRetry); ok {
			h.OnRetry(hookCtx(ctx), e)
		}
	}
}

func (c *Consumer[Tx]) onStaleAck(ctx context.Context, w *work) {
	c.cfg.Logger.LogAttrs(ctx, slog.LevelInfo, "inbox: ack dropped: the delivery is lost, the message comes again", c.attrs(w)...)
	for _, h := range c.cfg.Hooks {
		if h, ok := h.(OnStaleAck); ok {
			h.OnStaleAck(hookCtx(ctx), StaleAckEvent{Consumer: c.name, Message: w.message})
		}
	}
}

func (c *Consumer[Tx]) onPause(ctx context.Context, e PauseEvent) {
	e.Consumer = c.name
	if e.Paused {
		c.vitals.fail(KindUnavailable)
	}
	for _, h := range c.cfg.Hooks {
		if h, ok := h.(OnPause); ok {
			h.OnPause(hookCtx(ctx), e)
		}
	}
}

func (c *Consumer[Tx]) onBatch(ctx context.Context, e BatchEvent) {
	for _, h := range c.cfg.Hooks {
		if h, ok := h.(OnBatch); ok {
			h.OnBatch(hookCtx(ctx), e)
		}
	}
}

// onHandle returns the context of a run of the handler, and what to call when it
// has ended.
func (c *Consumer[Tx]) onHandle(ctx context.Context, ms []*Message) (run context.Context, ended func(err error)) {
	var ends []func(error)
	for _, h := range c.cfg.Hooks {
		h, ok := h.(OnHandle)
		if !ok {
			continue
		}
		derived, end := h.OnHandle(ctx, HandleEvent{Consumer: c.name, Messages: ms})
		if derived != nil {
			ctx = derived
		}
		if end != nil {
			ends = append(ends, end)
		}
	}
	return ctx, func(err error) {
		for _, end := range slices.Backward(ends) {
			end(err)
		}
	}
}
