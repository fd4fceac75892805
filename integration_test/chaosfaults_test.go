package integration_test

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/ackafter/ackafter/integration_test/servers"
)

// chaosFaults breaks things until a time has come: some lines of faults go on beside
// one another, each by random numbers of its own, so that a seed gives the same ones.
type chaosFaults struct {
	t     *testing.T
	seed  uint64
	began time.Time
	until time.Time

	kills, stops, freezes, crashes, serverFreezes, cuts atomic.Int64
}

func (f *chaosFaults) logf(format string, a ...any) {
	f.t.Helper()
	f.t.Logf("%5.1f s: %s", time.Since(f.began).Seconds(), fmt.Sprintf(format, a...))
}

// line repeats a fault that heals in a while, until the time for that has come.
func (f *chaosFaults) line(number int, least, most, heals time.Duration, fault func(r *rand.Rand)) {
	r := rand.New(rand.NewPCG(f.seed, uint64(number)))
	for {
		pause(between(r, least, most))
		if !time.Now().Add(heals).Before(f.until) {
			return
		}
		fault(r)
	}
}

func pause(d time.Duration) { <-time.After(d) } // This is how long a fault lasts.

func between(r *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(r.Int64N(int64(most-least)))
}

// deck gives out all of some values in random order, and then again.
type deck[T any] struct{ all, left []T }

func (d *deck[T]) draw(r *rand.Rand) T {
	if len(d.left) == 0 {
		d.left = append(d.left, d.all...)
		r.Shuffle(len(d.left), func(i, j int) { d.left[i], d.left[j] = d.left[j], d.left[i] })
	}
	v := d.left[0]
	d.left = d.left[1:]
	return v
}

// run breaks everything, and returns when it is whole again.
func (f *chaosFaults) run(consumers []*chaosConsumer, database *servers.Own, parties []*chaosParty) {
	var lines sync.WaitGroup
	defer lines.Wait()
	lines.Go(func() {
		all := deck[*chaosConsumer]{all: consumers}
		f.line(1, time.Second, 4*time.Second, 0, func(r *rand.Rand) { f.hitConsumer(r, all.draw(r)) })
	})
	lines.Go(func() {
		hits := deck[serverHit]{all: []serverHit{{"PostgreSQL", database, true}, {"PostgreSQL", database, true}, {"PostgreSQL", database, false}}}
		f.line(2, 3*time.Second, 9*time.Second, 5*time.Second, func(r *rand.Rand) { f.hitServer(r, hits.draw(r)) })
	})
	lines.Go(func() {
		var hits deck[serverHit]
		for _, p := range parties {
			// ElasticMQ keeps its messages in memory.
			hits.all = append(hits.all, serverHit{p.name, p.broker.server(), p.name != "sqs"})
		}
		f.line(4, 2*time.Second, 5*time.Second, 10*time.Second, func(r *rand.Rand) { f.hitServer(r, hits.draw(r)) })
	})
	lines.Go(func() {
		hits := deck[networkHit]{all: networkHits(database, parties)}
		f.line(3, time.Second, 4*time.Second, 0, func(r *rand.Rand) { f.hitNetwork(r, hits.draw(r)) })
	})
}

// hitConsumer kills a process mostly; sometimes it stops it in order, or freezes it
// for longer than its leases and its session last.
func (f *chaosFaults) hitConsumer(r *rand.Rand, c *chaosConsumer) {
	dice, after := r.IntN(100), between(r, 0, 2*time.Second)
	frozen := between(r, time.Second, 9*time.Second)
	switch {
	case dice < 65:
		f.logf("kill -9 of %s", c.name)
		f.kills.Add(1)
		c.kill()
	case dice < 80:
		f.stops.Add(1)
		if took, killed := c.stop(chaosPatience); killed {
			f.logf("stop of %s, and kill -9 after %v", c.name, took)
		} else {
			f.logf("stop of %s took %v", c.name, took)
		}
	default:
		f.freezes.Add(1)
		f.logf("%s freezes for %v", c.name, frozen.Round(time.Millisecond))
		c.signal(syscall.SIGSTOP)
		pause(frozen)
		c.signal(syscall.SIGCONT)
		return
	}
	pause(after)
	c.process.start()
}

// serverHit is what happens to a server.
type serverHit struct {
	name  string
	own   *servers.Own
	crash bool
}

func (f *chaosFaults) hitServer(r *rand.Rand, h serverHit) {
	lasts := between(r, 0, 3*time.Second)
	if h.crash {
		f.crashes.Add(1)
		h.own.Crash(f.t)
		f.logf("%s is gone, for %v and its start", h.name, lasts.Round(time.Millisecond))
		pause(lasts)
		h.own.Start(f.t)
		f.logf("%s is back", h.name)
		return
	}
	lasts += time.Second
	f.serverFreezes.Add(1)
	f.logf("%s freezes for %v", h.name, lasts.Round(time.Millisecond))
	h.own.Freeze(f.t)
	pause(lasts)
	h.own.Thaw(f.t)
}

// networkHit is what happens to the network of the consumers of a broker.
type networkHit struct {
	party *chaosParty
	what  string
	to    string // the address
	begin func(n *proxies, addresses []string) (cure func() error, err error)
}

func networkHits(database *servers.Own, parties []*chaosParty) []networkHit {
	var hits []networkHit
	for _, p := range parties {
		for _, to := range []string{hostOf(database), p.broker.address()} {
			hits = append(hits, networkHit{p, "reset", to, reset}, networkHit{p, "a black hole", to, blackHole}, networkHit{p, "refused", to, (*proxies).refuse})
		}
		hits = append(hits, networkHit{p, "frozen", "", (*proxies).freeze})
	}
	return hits
}

func (f *chaosFaults) hitNetwork(r *rand.Rand, h networkHit) {
	lasts := between(r, time.Second/2, 5*time.Second)
	to, addresses := "everything", []string(nil)
	switch {
	case h.to == h.party.broker.address():
		to, addresses = "their broker", []string{h.to}
	case h.to != "":
		to, addresses = "the database", []string{h.to}
	}
	f.cuts.Add(1)
	f.logf("network of %s's consumers to %s: %s for %v", h.party.name, to, h.what, lasts.Round(time.Millisecond))
	cure, err := h.begin(h.party.network, addresses)
	if err != nil {
		f.t.Error(err)
		return
	}
	pause(lasts)
	if err := cure(); err != nil {
		f.t.Error(err)
	}
}
