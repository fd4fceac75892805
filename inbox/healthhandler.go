package inbox

import (
	"encoding/json"
	"net/http"
	"path"
	"time"
)

// maxShownHandlers is how many runs of the handler an answer lists, the longest
// first.
const maxShownHandlers = 20

// HealthConfig configures HealthHandler. Nil means all defaults.
type HealthConfig struct {
	// Details adds the keys of running handlers, and the texts of errors. Both may
	// hold personal data, and the addresses of servers: only where the endpoint is
	// reached by operators alone. Default: neither is shown.
	Details bool
}

// HealthHandler answers probes about this consumer alone, without details; see the
// function HealthHandler.
func (c *Consumer[Tx]) HealthHandler() http.Handler { return HealthHandler(nil, c) }

// HealthHandler answers the probes of an orchestrator about some consumers.
//
// A request whose path ends with /livez (or /live) asks whether the process should
// live: 503 when a Run has ended with an error, else 200. Every other path asks
// whether it is ready: 200 when each consumer runs, has seen its tables, can use
// its database, and its sources are well, else 503. So a database that is away, a
// start and a stop are "not ready but live", and a stuck handler is a warning.
//
// The answer is the same for both: a JSON object with "live", "ready", "problems",
// "warnings" and "consumers", which holds neither keys nor errors without
// HealthConfig.Details. It asks neither databases nor brokers, so that it can be
// called often. Methods other than GET and HEAD get 405. Without a consumer nothing
// is ready.
func HealthHandler(cfg *HealthConfig, consumers ...HealthReporter) http.Handler {
	details := cfg != nil && cfg.Details
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
			return
		}
		a := answer(consumers, details)
		ok := a.Ready
		if last := path.Base(r.URL.Path); last == "livez" || last == "live" {
			ok = a.Live
		}
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Cache-Control", "no-store")
		if !ok {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		// An error means that the client is gone.
		_ = json.NewEncoder(w).Encode(a)
	})
}

// healthAnswer is the body of an answer. Its names do not change between releases.
type healthAnswer struct {
	Live      bool             `json:"live"`
	Ready     bool             `json:"ready"`
	Problems  []string         `json:"problems"`
	Warnings  []string         `json:"warnings"`
	Consumers []consumerAnswer `json:"consumers"`
}

type consumerAnswer struct {
	Consumer      string          `json:"consumer"`
	State         State           `json:"state"`
	Runs          int             `json:"runs"`
	Paused        bool            `json:"paused"`
	PausedSeconds float64         `json:"paused_seconds,omitempty"`
	InFlight      int             `json:"in_flight"`
	InFlightBytes int64           `json:"in_flight_bytes"`
	OldestSeconds float64         `json:"oldest_seconds,omitempty"`
	Running       int             `json:"running_handlers"`
	Handlers      []handlerAnswer `json:"handlers,omitempty"`
	LastSuccess   *time.Time      `json:"last_success,omitempty"`
	LastError     *time.Time      `json:"last_error,omitempty"`
	LastErrorKind ErrorKind       `json:"last_error_kind,omitempty"`

	Error       string `json:"error,omitempty"`
	PauseError  string `json:"pause_error,omitempty"`
	SourceError string `json:"source_error,omitempty"`
}

type handlerAnswer struct {
	Seconds    float64 `json:"seconds"`
	Attempt    int     `json:"attempt"`
	Messages   int     `json:"messages"`
	Stuck      bool    `json:"stuck"`
	LeftBehind bool    `json:"left_behind"`

	Tenant     string `json:"tenant,omitempty"`
	MessageKey string `json:"message_key,omitempty"`
	MessageID  string `json:"message_id,omitempty"`
	Source     string `json:"source,omitempty"`
}

func answer(consumers []HealthReporter, details bool) healthAnswer {
	a := healthAnswer{Live: true, Ready: len(consumers) > 0, Problems: []string{}, Warnings: []string{}, Consumers: []consumerAnswer{}}
	for _, c := range consumers {
		h := c.Health()
		a.Live = a.Live && h.Live()
		a.Ready = a.Ready && h.Ready()
		for _, p := range h.Problems() {
			a.Problems = append(a.Problems, h.Consumer+": "+p)
		}
		for _, p := range h.Warnings() {
			a.Warnings = append(a.Warnings, h.Consumer+": "+p)
		}
		a.Consumers = append(a.Consumers, consumerHealth(h, details))
	}
	return a
}

func consumerHealth(h Health, details bool) consumerAnswer {
	c := consumerAnswer{
		Consumer: h.Consumer, State: h.State, Runs: h.Runs,
		Paused: h.Paused, PausedSeconds: secondsSince(h.PausedSince),
		InFlight: h.InFlight, InFlightBytes: h.InFlightBytes, OldestSeconds: secondsSince(h.OldestInFlight),
		Running: len(h.Handlers), LastSuccess: known(h.LastSuccess), LastError: known(h.LastError), LastErrorKind: h.LastErrorKind,
	}
	for _, r := range h.Handlers[:min(len(h.Handlers), maxShownHandlers)] {
		one := handlerAnswer{Seconds: secondsSince(r.Since), Attempt: r.Attempt, Messages: r.Messages, Stuck: r.Stuck, LeftBehind: r.LeftBehind}
		if details {
			one.Tenant, one.MessageKey, one.MessageID, one.Source = r.Tenant, r.MessageKey, r.MessageID, r.Source
		}
		c.Handlers = append(c.Handlers, one)
	}
	if details {
		c.Error, c.PauseError, c.SourceError = text(h.Err), text(h.PauseErr), text(h.SourceErr)
	}
	return c
}

func secondsSince(t time.Time) float64 {
	if t.IsZero() {
		return 0
	}
	return time.Since(t).Seconds()
}

func known(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

func text(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}
