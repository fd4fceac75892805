// Package keyfunc derives the business key of a message: the text by which
// package inbox recognises that a message was handled before.
//
// # Which key to choose
//
// The key must name the event, not the delivery and not only the thing that the
// event is about:
//
//	keyfunc.JSON("orderId", "eventType")   // one order has several events: both fields
//	keyfunc.JSON("paymentId", "version")
//	keyfunc.Header("Event-Id")             // a strong id that the producer made once
//	keyfunc.CloudEvents()                  // source and id, as the specification says
//
// JSON("orderId") alone would take "order A1 shipped" for a repetition of "order
// A1 paid" and drop it. Ask of a candidate: does every producer retry send the
// same value, and does every new event send another one?
//
// [MessageID], the broker's own id, is the last resort. It is made by the broker
// or its client for each publication: a replayed topic, a move to another
// broker, a mirror or a retrying producer gives the same event a new id, and its
// handler runs again. It is good for logs.
//
// [Join] makes one key of several parts, [First] falls back to another part
// where one is absent, [Prefix] keeps keys of two kinds apart, [Unwrap] looks
// inside a framed or compressed body, [HMAC] hides a key that is personal data,
// and [Custom] takes your own code.
//
// # What is not trusted
//
// A key is never guessed. Where two readers of one message could see two
// different keys, or where several messages would share one, there is no key:
// Key returns an error that is [ErrInvalid], and the inbox dead-letters the
// message with the reason. Every component of a key
//
//   - must be there: absent is [ErrMissing], which is also ErrInvalid;
//   - must not be blank: empty, or made of nothing but white space, control and
//     invisible formatting characters (Unicode White_Space, Cc, Cf);
//   - must not hold a NUL character, which PostgreSQL cannot store;
//   - must be valid UTF-8; in JSON, a lone surrogate escape ("\ud800") is not. A
//     real U+FFFD is;
//   - must be a string, a number or a boolean where it comes from JSON: null,
//     objects and arrays are refused;
//   - must be there once: a repeated header, or a JSON name repeated on the path
//     (names are compared after unescaping), is refused;
//   - and a whole key is at most [MaxSize] bytes.
//
// Only what the key is made of is looked at. A NUL escape, invalid UTF-8 or a
// repeated name elsewhere in the body is not this package's matter, as long as
// the body is JSON at all: one value, with nothing but white space after it.
//
// # The canonical form
//
// A key is the text of a tuple of components: each component with a backslash
// put before every backslash and vertical bar in it, joined by vertical bars.
// ("A1", "paid") is
//
//	A1|paid
//
// and ("a|b", "c") is `a\|b|c`. No two tuples have the same text, whatever
// their lengths. Components are written like this:
//
//   - strings, headers and broker keys: unchanged. Case, surrounding spaces and
//     Unicode normalisation are kept: "A1", "a1" and "A1 " are three keys;
//   - JSON numbers: their exact value in plain decimal digits, without exponent,
//     superfluous zeros or a negative zero, never through a float. 1, 1.0 and 1e0
//     are `1`; 9007199254740992 and 9007199254740993 differ; 12345678 is
//     `12345678`; 2.50 is `2.5`. A number that would need more than 1,024
//     characters is refused;
//   - JSON booleans: `true` and `false`.
//
// The JSON number 1 and the JSON string "1" are the same component, because
// producers do switch between the two for one id. A string is not looked
// into, though: "1.0" is another key than "1".
//
// Join puts the components of its parts into one tuple. A part that can
// have a varying number of components (a First over alternatives of different
// lengths) goes in as a single, escaped component.
//
// # Definitions
//
// Keys are stored, and compared with keys that a later release of your program
// derives. So each [Func] tells its Definition, a text that says what the key
// is made of and in which version of the canonical form:
//
//	json:orderId,eventType;v1
//	join(header:tenant|json:order.id);v1
//	first(cloudevents|json:id);v1
//
// Two Funcs of this package with the same definition give the same keys. The
// inbox stores it for each consumer. Another definition gives other keys, so
// that everything handled before looks new: every message that comes again
// runs again. That is why a changed definition is an error at start, unless it
// is confirmed in the inbox's configuration. The forms of this page are fixed
// under the name v1; a change of them would be v2.
package keyfunc
