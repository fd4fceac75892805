package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// get asks one of the endpoints.
func (s *shop) get(t *testing.T, target string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	s.endpoints.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, target, nil))
	return w.Code, w.Body.String()
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	ctx, stop := context.WithTimeout(t.Context(), time.Minute)
	defer stop()
	s, err := newShop(ctx, filepath.Join(t.TempDir(), "shop.db"))
	if err != nil {
		t.Fatal(err)
	}
	defer s.close(ctx)
	if code, body := s.get(t, "/readyz"); code != http.StatusServiceUnavailable {
		t.Errorf("before the start /readyz is %d: %s", code, body)
	}
	run, end := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- s.consumer.Run(run, s.queue.Source()) }()
	for n := 1; n <= 20; n++ {
		s.publish(n)
	}
	s.publish(3)
	if err := s.queue.Drained(ctx); err != nil {
		t.Fatal(err)
	}
	for _, target := range []string{"/livez", "/readyz"} {
		if code, body := s.get(t, target); code != http.StatusOK {
			t.Errorf("%s is %d: %s", target, code, body)
		}
	}
	if _, body := s.get(t, "/metrics"); !hasSeries(body, "ackafter_inbox_ready", `ackafter_consumer="billing"`, "1") {
		t.Errorf("not ready in\n%s", body)
	}
	end()
	if err := <-done; err != nil { // Everything is counted now.
		t.Error(err)
	}
	code, body := s.get(t, "/metrics")
	if code != http.StatusOK {
		t.Errorf("/metrics is %d: %s", code, body)
	}
	for _, row := range []struct{ name, labels, value string }{
		{"ackafter_inbox_outcomes_total", `ackafter_outcome="first_attempt"`, "19"},
		{"ackafter_inbox_outcomes_total", `ackafter_outcome="replay"`, "1"},
		{"ackafter_inbox_outcomes_total", `ackafter_outcome="dead"`, "1"},
		{"ackafter_inbox_parked_messages", `ackafter_state="dead"`, "1"},
		{"ackafter_inbox_ready", `ackafter_consumer="billing"`, "0"},
		{"messaging_process_duration_seconds_count", `error_type="permanent"`, "1"},
	} {
		if !hasSeries(body, row.name, row.labels, row.value) {
			t.Errorf("no %s with %s and the value %s in\n%s", row.name, row.labels, row.value, body)
		}
	}
	if strings.Contains(body, "order-") {
		t.Errorf("a key is in the metrics:\n%s", body)
	}
	if code, _ := s.get(t, "/livez"); code != http.StatusOK {
		t.Errorf("after a wanted stop /livez is %d", code)
	}
}

func hasSeries(body, name, labels, value string) bool {
	for line := range strings.Lines(body) {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, name+"{") && strings.Contains(line, labels) && strings.HasSuffix(line, " "+value) {
			return true
		}
	}
	return false
}
