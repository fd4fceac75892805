package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
)

// report is the outcome of a run.
type report struct {
	Go         string    `json:"go"`
	System     string    `json:"system"`
	CPUs       int       `json:"cpus"`
	LoadBefore string    `json:"load_before"` // of the machine, over 1, 5 and 15 minutes; empty: unknown
	LoadAfter  string    `json:"load_after"`
	Postgres   string    `json:"postgres"`
	Settings   []setting `json:"settings"`
	Partitions int       `json:"partitions"`
	Events     int       `json:"events"`
	BodyBytes  int       `json:"body_bytes"`
	Workers    int       `json:"workers"`
	Reps       int       `json:"reps"`
	Results    []*result `json:"results"`
}

// setting is a setting of PostgreSQL.
type setting struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// result is what one pass was measured at in all repetitions.
type result struct {
	Name     string `json:"name"`
	Title    string `json:"title"`
	Baseline string `json:"baseline"`
	// Median has the medians of each figure, Slowest and Fastest the bounds of
	// the messages a second.
	Median  figures `json:"median"`
	Slowest float64 `json:"slowest_per_second"`
	Fastest float64 `json:"fastest_per_second"`
	// Ratio is the median, over the repetitions, of the messages a second
	// divided by those of the baseline in the same repetition; 0 when the
	// baseline was not run.
	Ratio float64   `json:"ratio"`
	Runs  []figures `json:"runs"`
}

func newReport(o options) *report {
	return &report{
		Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH, CPUs: runtime.NumCPU(), LoadBefore: load(),
		Partitions: partitions, Events: o.events, BodyBytes: bodySize, Workers: workers, Reps: o.reps,
	}
}

// load returns the load of the machine where the system tells it as Linux does.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return ""
	}
	return strings.Join(strings.Fields(string(b))[:3], " ")
}

// add takes in the figures of one repetition.
func (r *report) add(p pass, f figures) {
	of := r.result(p.name)
	if of == nil {
		of = &result{Name: p.name, Title: p.title, Baseline: p.baseline}
		r.Results = append(r.Results, of)
	}
	of.Runs = append(of.Runs, f)
}

func (r *report) result(name string) *result {
	i := slices.IndexFunc(r.Results, func(of *result) bool { return of.Name == name })
	if i < 0 {
		return nil
	}
	return r.Results[i]
}

// conclude computes what follows from the runs: new messages first, then
// replays, each in the order of the contestants, of which some may not have run.
func (r *report) conclude(contestants []chain) {
	r.LoadAfter = load()
	names := passNames(contestants)
	slices.SortFunc(r.Results, func(a, b *result) int {
		if a.Baseline != b.Baseline {
			return slices.Index(names, a.Baseline) - slices.Index(names, b.Baseline)
		}
		return slices.Index(names, a.Name) - slices.Index(names, b.Name)
	})
	for _, of := range r.Results {
		over := func(value func(figures) float64) []float64 {
			var values []float64
			for _, f := range of.Runs {
				values = append(values, value(f))
			}
			return values
		}
		rates := over(func(f figures) float64 { return f.PerSecond })
		of.Slowest, of.Fastest = slices.Min(rates), slices.Max(rates)
		of.Median = figures{
			PerSecond:      median(rates),
			Seconds:        median(over(func(f figures) float64 { return f.Seconds })),
			PerTransaction: median(over(func(f figures) float64 { return f.PerTransaction })),
			CPUMicros:      median(over(func(f figures) float64 { return f.CPUMicros })),
			Allocs:         median(over(func(f figures) float64 { return f.Allocs })),
			AllocBytes:     median(over(func(f figures) float64 { return f.AllocBytes })),
		}
		if base := r.result(of.Baseline); base != nil {
			// Neighbours in time see the same machine: their ratio is steadier than
			// that of two medians.
			ratios := make([]float64, len(rates))
			for i, rate := range rates {
				ratios[i] = rate / base.Runs[i].PerSecond
			}
			of.Ratio = median(ratios)
		}
	}
}

// median returns the middle, or the mean of the two in the middle.
func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return 0
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func (r *report) writeJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

func (r *report) writeTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, %s, %d CPUs, load before %s, after %s\n", r.Go, r.System, r.CPUs, orUnknown(r.LoadBefore), orUnknown(r.LoadAfter))
	fmt.Fprintf(&b, "PostgreSQL %s:", r.Postgres)
	for _, s := range r.Settings {
		fmt.Fprintf(&b, " %s=%s", s.Name, s.Value)
	}
	fmt.Fprintf(&b, "\n%d messages of about %d bytes in %d partitions, %d transactions at once, medians of %d repetitions\n\n",
		r.Events, r.BodyBytes, r.Partitions, r.Workers, r.Reps)
	const row = "%-30s %9s %9s %9s %8s %8s %10s %10s %10s\n"
	fmt.Fprintf(&b, row, "contestant", "msg/s", "slowest", "fastest", "ratio", "msgs/tx", "CPU/msg", "allocs/msg", "bytes/msg")
	for _, of := range r.Results {
		ratio := "-"
		if of.Ratio > 0 {
			ratio = fmt.Sprintf("%.2fx", of.Ratio)
		}
		fmt.Fprintf(&b, row, of.Title, whole(of.Median.PerSecond), whole(of.Slowest), whole(of.Fastest), ratio,
			strconv.FormatFloat(of.Median.PerTransaction, 'f', 1, 64),
			fmt.Sprintf("%.1f us", of.Median.CPUMicros), whole(of.Median.Allocs), whole(of.Median.AllocBytes))
	}
	b.WriteString("\nratio: to the hand-written loop, of the same repetition, on the same input; CPU and memory: of this process\n")
	if _, err := io.WriteString(w, b.String()); err != nil {
		return fmt.Errorf("write the report: %w", err)
	}
	return nil
}

func whole(v float64) string { return strconv.FormatFloat(v, 'f', 0, 64) }

func orUnknown(s string) string {
	if s == "" {
		return "unknown"
	}
	return s
}
