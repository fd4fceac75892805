package inbox

import "github.com/ackafter/ackafter/broker"

// traceID returns the trace id of a W3C traceparent header, or "" when there is
// none that is well formed.
func traceID(h broker.Headers) string {
	v, ok := h.Get("traceparent")
	const version, id = 3, 32
	if !ok || len(v) < version+id+1 || v[2] != '-' || v[version+id] != '-' {
		return ""
	}
	zero := true
	for _, c := range v[version : version+id] {
		switch {
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f':
			zero = zero && c == '0'
		default:
			return ""
		}
	}
	if zero {
		return ""
	}
	return string(v[version : version+id])
}
