package integration_test

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/ackafter/ackafter/integration_test/orders"
)

// A member is frozen in the middle of its transactions, for longer than the
// group waits for it, as by a pause of its machine. The other one takes over all
// partitions and goes on past the keys that the frozen one still holds. When it
// wakes up it finishes what it had begun, for a generation that is over, and
// joins again. Every key has one effect, in order.
func TestFrozenMember(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	stream, err := orders.Generate(orders.Config{Events: sized(6_000, 20_000), Repeats: 0.2, Seed: seed})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("seed %d, %d messages, %d distinct keys", seed, len(stream.Lines), stream.Distinct)
	s := newStorm(t, stream)
	frozen, other := s.join(), s.join()
	shared := func(m *stormMember) bool {
		return slices.ContainsFunc(m.events(), func(e stormEvent) bool {
			return e.Msg == "assigned" && e.Partitions == stormPartitions/2
		})
	}
	eventually(t, time.Minute, "both have partitions", func() bool { return shared(frozen) && shared(other) })
	produced := s.produce(stream.Lines, 3*stormSession)
	eventually(t, time.Minute, "both work", func() bool { return count(t, s.pool, "select count(distinct worker) from effects") == 2 })

	open := s.freeze(frozen)
	if open == 0 {
		t.Fatal("it has no transaction open")
	}
	handled := func() int { return count(t, s.pool, "select count(*) from effects where worker = $1", other.name) }
	generation := func(m *stormMember) (last stormEvent) {
		for _, e := range m.events() {
			if e.Msg == "assigned" {
				last = e
			}
		}
		return last
	}
	eventually(t, time.Minute, "the other one has all partitions", func() bool { return generation(other).Partitions == stormPartitions })
	over, before := generation(other).Generation, handled()
	eventually(t, time.Minute, "the other one goes on", func() bool { return handled() >= before+100 })
	frozen.signal(syscall.SIGCONT)
	eventually(t, time.Minute, "it is in the group again", func() bool { return generation(frozen).Generation > over })
	if err := <-produced; err != nil {
		t.Fatal(err)
	}
	eventually(t, 2*time.Minute, "lag 0", func() bool { return s.lag() == 0 })
	s.stop(frozen)
	s.stop(other)
	s.leaving.Wait()
	s.tp.checkOffsets(s.tp.name)
	s.checkEffects(stream)
	t.Logf("frozen with %d open transactions; %d stale acks, %d failed commits, %d effects by it",
		open, len(s.events("stale ack")), len(s.events("commit error")), count(t, s.pool, "select count(*) from effects where worker = $1", frozen.name))
}
