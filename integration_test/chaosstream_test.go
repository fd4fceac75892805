package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"time"
)

// chaosMessage is a message on its way to a broker.
type chaosMessage struct {
	number int // of the sending: no two have the same
	entry  entryID
	lane   string
	body   []byte
}

// chaosStream makes up what is sent to one broker; the same seed makes the same.
type chaosStream struct {
	random   *rand.Rand
	consumer string
	lanes    int // how many there are, and accounts
	messages []chaosMessage
	orders   []chaosOrder // those that are distinct, conflicts included
	bodies   []chaosMessage
	sent     map[entryID]bool // whether it is poison

	duplicates, strays, conflicts, failing, poison int
}

func newChaosStream(seed uint64, number int, consumer string, lanes int) *chaosStream {
	return &chaosStream{random: rand.New(rand.NewPCG(seed, uint64(number))), consumer: consumer, lanes: lanes, sent: map[entryID]bool{}}
}

// next makes up some messages. A tenth repeats one of the last, some any, some in
// another lane; some have the key of another.
func (s *chaosStream) next(n int) []chaosMessage {
	const few, recent = 20, 100
	some := make([]chaosMessage, 0, n)
	for range n {
		var m chaosMessage
		switch dice := s.random.IntN(1000); {
		case len(s.bodies) < few || dice >= 160:
			m = s.make("", s.random.IntN(s.lanes))
		case dice < 100: // twins, and duplicates in a while
			m = s.bodies[len(s.bodies)-1-s.random.IntN(min(recent, len(s.bodies)))]
			s.duplicates++
		case dice < 130: // a replay
			m = s.bodies[s.random.IntN(len(s.bodies))]
			s.duplicates++
		case dice < 140:
			m = s.bodies[s.random.IntN(len(s.bodies))]
			m.lane = laneName(s.random.IntN(s.lanes))
			s.duplicates++
			s.strays++
		default:
			like := s.orders[len(s.orders)-1-s.random.IntN(min(recent, len(s.orders)))]
			m = s.make(like.ID, like.Account)
			s.conflicts++
		}
		m.number = len(s.messages)
		s.messages = append(s.messages, m)
		some = append(some, m)
	}
	return some
}

func laneName(n int) string { return fmt.Sprintf("l%d", n) }

// make makes up a distinct message; without an id, with one of its own.
func (s *chaosStream) make(id string, account int) chaosMessage {
	o := chaosOrder{ID: id, Account: account, Note: s.random.Int64()}
	if id == "" {
		o.ID = fmt.Sprintf("o-%d", len(s.orders))
	}
	all := []string{byError, bySQL, bySwallow, byPanic}
	const poisonEvery, failingEvery = 200, 20
	switch {
	case len(s.bodies)%poisonEvery == poisonEvery/4:
		o.Fails, o.How = -1, append(all, byPermanent)[s.random.IntN(len(all)+1)]
		s.poison++
	case s.random.IntN(failingEvery) == 0:
		o.Fails, o.How = 1+s.random.IntN(chaosFailures), all[s.random.IntN(len(all))]
		s.failing++
	}
	body, err := json.Marshal(o)
	if err != nil {
		panic(err) // cannot be
	}
	m := chaosMessage{entry: entryID{s.consumer, o.ID, fingerprintOf(body)}, lane: laneName(account), body: body}
	s.orders = append(s.orders, o)
	s.bodies = append(s.bodies, m)
	s.sent[m.entry] = o.Fails < 0
	return m
}

// chaosBeat is the time between two sendings.
const chaosBeat = 100 * time.Millisecond

// produce sends messages until stop is closed, and returns when the broker has them.
func (s *chaosStream) produce(ctx context.Context, stop <-chan struct{}, rate int, b chaosBroker) error {
	beat := time.NewTicker(chaosBeat)
	defer beat.Stop()
	for {
		select {
		case <-beat.C:
		case <-stop:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := b.send(ctx, s.next(rate*int(chaosBeat/time.Millisecond)/1000)); err != nil {
			return fmt.Errorf("send to %s: %w", s.consumer, err)
		}
	}
}
