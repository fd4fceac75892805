package inbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"

	"github.com/ackafter/ackafter/keyfunc"
)

// Handler does the work for one message. What it writes through tx is committed
// together with the message's key, or not at all. It must not end tx, not even by
// a deferred Rollback (it is refused, and the message becomes a dead letter), and
// must not keep tx or m after it has returned, and should obey ctx, which ends at
// Config.HandlerTimeout, when the delivery is lost, and at the end of a
// shutdown's grace.
//
// It returns nil when the work is done, or a verdict: a plain error (retry with
// backoff), Permanent (dead letter), RetryAfter, Skip (done, nothing to do). A
// panic is a failed attempt.
type Handler[Tx any] func(ctx context.Context, tx Tx, m *Message) error

// BulkHandler does the work for several messages at once, with set-based SQL.
// All of them are new, their keys are distinct, and those of one lane are in
// order. The rules of Handler hold. An error fails the whole set; its messages
// are then run one by one, so that the others do not suffer from the one that
// cannot be handled. A Skip is about the whole set.
type BulkHandler[Tx any] func(ctx context.Context, tx Tx, ms []*Message) error

// JSON makes a Handler of a function that takes the decoded body. A body that
// does not decode into T is a permanent error, and so is data after the JSON
// value. Unknown fields are ignored. It decodes as encoding/json does, which
// matches field names without regard to case and takes the last of repeated
// names; keyfunc.JSON does neither.
func JSON[T, Tx any](fn func(ctx context.Context, tx Tx, m *Message, v T) error) Handler[Tx] {
	if fn == nil {
		return nil
	}
	return func(ctx context.Context, tx Tx, m *Message) error {
		var v T
		if len(m.Body) == 0 {
			return Permanent(fmt.Errorf("inbox: decode body as %T: the message has no body", v))
		}
		if err := json.Unmarshal(m.Body, &v); err != nil {
			return Permanent(fmt.Errorf("inbox: decode body as %T: %w", v, withoutValue(err)))
		}
		return fn(ctx, tx, m, v)
	}
}

// withoutValue keeps pieces of the body out of a decoder's error, which goes
// into logs and the parked table.
func withoutValue(err error) error {
	var typeErr *json.UnmarshalTypeError
	if errors.As(err, &typeErr) {
		return fmt.Errorf("field %q at byte %d does not fit %v", typeErr.Field, typeErr.Offset, typeErr.Type)
	}
	var syntaxErr *json.SyntaxError
	if errors.As(err, &syntaxErr) {
		return fmt.Errorf("not valid JSON at byte %d", syntaxErr.Offset)
	}
	return errors.New("the value was refused by its decoder")
}

// Routes are the handlers of a Router by event type. The route "" takes every
// type that has no route of its own.
type Routes[Tx any] map[string]Handler[Tx]

// Router makes one Handler of several: eventType reads the event's type from
// the message (keyfunc.JSON("eventType"), keyfunc.Header("ce_type")) and picks
// the route by it, in the canonical form of a key: a backslash comes before each
// "|" and "\" of a type. A type without a route is a permanent error, unless there is a
// route "". A message whose type cannot be read goes to the route "" as well, or
// is a permanent error. A nil route is skipped as done.
//
// Router returns nil, which New refuses, when eventType or routes is missing.
func Router[Tx any](eventType keyfunc.Func, routes Routes[Tx]) Handler[Tx] {
	if eventType == nil || len(routes) == 0 || keyfunc.Validate(eventType) != nil {
		return nil
	}
	routes = maps.Clone(routes)
	return func(ctx context.Context, tx Tx, m *Message) error {
		name, err := eventType.Key(&m.Message)
		if err != nil {
			name = ""
		}
		h, ok := routes[name]
		if !ok {
			h, ok = routes[""]
		}
		switch {
		case !ok && err != nil:
			return Permanent(fmt.Errorf("inbox: router: read event type: %w", err))
		case !ok:
			return Permanent(errors.New("inbox: router: no route for the message's event type"))
		case h == nil:
			return Skip("router: nothing to do for this event type")
		}
		return h(ctx, tx, m)
	}
}
