// Package inboxotel reports what an inbox consumer does as OpenTelemetry metrics
// and spans.
//
// [New] makes a [Telemetry], which is an inbox.Hook: put it into inbox.Config.Hooks.
// It counts messages by outcome, times the handlers and the parts of every
// transaction, and wraps each run of the handler in a span that belongs to the
// trace of its message. The handler's context carries the span.
//
// Some numbers are not events but states: [Telemetry.Watch] reports them from a
// consumer's health, [Telemetry.WatchParked] from the parked table, and
// [Telemetry.WatchLag] from a source.
//
// Names follow the semantic conventions for messaging where they have one, and begin
// with "ackafter." otherwise; docs/telemetry.md lists them all. Labels of metrics
// never hold a key, a tenant or anything else of a message, and are bounded in
// number. Spans hold keys and the texts of errors only if [Config] says so.
//
// The package needs the API of OpenTelemetry only. What is exported, and where to,
// is decided by the program that sets the providers.
package inboxotel
