package inbox

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"time"
)

// abandonGrace is how long a handler whose context has ended may take to
// return before it is left behind.
const abandonGrace = time.Second

// Causes of the end of a handler's context, beside ErrHandlerTimeout.
var (
	errHardStop = errors.New("inbox: shutting down")
	errLost     = errors.New("inbox: delivery lost")
)

// call is one run of the handler.
type call struct {
	err error
	// cause is why the handler's context had ended when it returned; nil when
	// it had not.
	cause error
	// abandoned says that the handler has not returned: the transaction cannot
	// be used any more.
	abandoned bool
}

// invoke runs the handler for ms in a goroutine of its own, so that one that
// ignores its context can be left behind. handlers counts the running ones.
func (c *Consumer[Tx]) invoke(ctx context.Context, handlers *sync.WaitGroup, works []*work, tx Tx, ms []*Message) call {
	hctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	for _, w := range works {
		if w.delivery != nil {
			defer context.AfterFunc(w.delivery.Context(), func() { cancel(errLost) })() //nolint:contextcheck // The delivery's own end, beside the caller's.
		}
	}
	if c.cfg.HandlerTimeout > 0 {
		var stop context.CancelFunc
		hctx, stop = context.WithTimeoutCause(hctx, c.cfg.HandlerTimeout, ErrHandlerTimeout)
		defer stop()
	}
	done := make(chan error, 1)
	handlers.Add(1)
	running := c.vitals.handle(ms)
	go func() {
		defer handlers.Done()
		defer c.vitals.handled(running)
		// What is sent when the handler ends its goroutine, as t.FailNow does.
		var err error = &PanicError{Value: "the handler called runtime.Goexit"}
		defer func() { done <- err }()
		err = protect(func() error { return c.run(hctx, tx, ms) })
	}()
	select {
	case err := <-done:
		return call{err: err, cause: context.Cause(hctx)}
	case <-hctx.Done():
	}
	grace := time.NewTimer(abandonGrace)
	defer grace.Stop()
	select {
	case err := <-done:
		return call{err: err, cause: context.Cause(hctx)}
	case <-grace.C:
		c.vitals.leaveBehind(running)
		return call{err: context.Cause(hctx), cause: context.Cause(hctx), abandoned: true}
	}
}

// protect turns a panic of fn into an error.
func protect(fn func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = &PanicError{Value: p, Stack: debug.Stack()}
		}
	}()
	return fn()
}

// resultError returns the error of a result that could not be encoded.
func resultError(ms []*Message) error {
	for _, m := range ms {
		if m.resultErr != nil {
			return fmt.Errorf("%w (the handler ignored this error)", m.resultErr)
		}
	}
	return nil
}
