package kafka

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// group keeps the source in its consumer group: it joins, serves one generation
// after the other, and stays until it is closed.
type group struct {
	*Source
	members *kafkago.ConsumerGroup
	shared  *shared
	member  string // of the last generation
	trouble retry.Trouble
	told    bool // of the trouble, to OnReconnect
	backoff retry.Backoff
	flaps   retry.Backoff // between generations that end at once
}

// joinGroup starts the membership; the connections are those of dialer, which
// can be ended on their own.
func (s *Source) joinGroup() (*group, error) {
	last := &shared{}
	dial := func(ctx context.Context, network, address string) (net.Conn, error) {
		nc, err := s.groupDialer.DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return wire.NeverCreate(nc), nil
	}
	members, err := kafkago.NewConsumerGroup(kafkago.ConsumerGroupConfig{
		ID: s.name, Brokers: s.brokers, Topics: s.topics,
		Dialer:            &kafkago.Dialer{ClientID: s.cfg.ClientID, DialFunc: dial, Timeout: s.cfg.DialTimeout},
		GroupBalancers:    s.assigners(last),
		HeartbeatInterval: s.cfg.HeartbeatInterval,
		SessionTimeout:    s.cfg.SessionTimeout,
		RebalanceTimeout:  s.cfg.RebalanceTimeout,
		JoinGroupBackoff:  retry.MinBackoff, // what is between two attempts is decided in run
		StartOffset:       kafkago.FirstOffset,
		Timeout:           s.cfg.RequestTimeout,
	})
	if err != nil {
		return nil, fmt.Errorf("kafka: join group %q: %w", s.name, err)
	}
	return &group{
		Source: s, members: members, shared: last,
		trouble: newTrouble(s.log, "join the group"),
		backoff: retry.Backoff{Most: s.cfg.MaxBackoff},
		flaps:   retry.Backoff{Most: s.cfg.MaxBackoff},
	}, nil
}

// run serves generations until ctx ends, which is when the source closes.
func (g *group) run(ctx context.Context) {
	for {
		// The library waits in Next's absence: its next attempt comes after the
		// next call.
		gen, err := g.members.Next(ctx)
		switch {
		case ctx.Err() != nil || errors.Is(err, kafkago.ErrGroupClosed):
			if gen != nil {
				g.member = gen.MemberID
			}
			return
		case err != nil:
			g.failed(ctx, err)
			continue
		}
		if g.told {
			g.reconnected(ctx, &g.trouble, "group")
		}
		g.trouble.Over(ctx)
		g.told = false
		g.backoff.Reset()
		g.member = gen.MemberID
		served := make(chan struct{})
		gen.Start(func(revoked context.Context) {
			defer close(served)
			if revoked.Err() == nil {
				g.serve(ctx, revoked, gen)
			}
		})
		<-served
	}
}

// serve has a generation. The library joins the group again when it returns.
func (g *group) serve(ctx, revoked context.Context, gen *kafkago.Generation) {
	se := newSession(g.Source, gen, assignment(gen))
	se.shared = g.shared.take()
	g.enter(se)
	began := time.Now()
	se.run(ctx, revoked)
	g.leave()
	if se.over.given() && time.Since(began) < time.Second {
		g.flaps.Sleep(ctx) // a coordinator that refuses whom it let in must not make a hot loop
	} else {
		g.flaps.Reset()
	}

	// If the generation ended because the coordinator is gone, the member waits
	// here until there is one: joining without would cost the member its id, and
	// the group would wait for the old one until its session times out.
	for ctx.Err() == nil {
		err := g.coordinator.alive(ctx, se.id)
		if err == nil {
			se.commitLate(ctx)
		}
		if err == nil || ctx.Err() != nil {
			return
		}
		g.note(ctx, err)
		g.backoff.Sleep(ctx)
	}
}

// failed handles a failed attempt to join.
func (g *group) failed(ctx context.Context, err error) {
	g.note(ctx, err)
	g.shared.take() // what it shared out came to nothing
	if errors.Is(err, kafkago.InvalidSessionTimeout) {
		g.fail(fmt.Errorf("kafka: config: SessionTimeout = %v: the broker's group.min.session.timeout.ms and group.max.session.timeout.ms do not allow it: %w", g.cfg.SessionTimeout, err))
	}
	if g.member != "" && !errors.Is(err, kafkago.RebalanceInProgress) {
		// The library has forgotten this id; so that the group does not wait for
		// it, it leaves.
		if g.coordinator.leave(ctx, g.member) == nil {
			g.member = ""
		}
	}
	g.backoff.Sleep(ctx)
}

// note takes one more failure to be in the group. A permission that is missing for
// too long ends the source.
func (g *group) note(ctx context.Context, err error) {
	n := g.trouble.Note(ctx, err)
	g.setGroupError(err)
	if g.trouble.Lasts() > accessGrace {
		if denied := g.forbidden(ctx, err); denied != nil {
			g.fail(denied)
		}
	}
	if errors.Is(err, kafkago.RebalanceInProgress) {
		return // others come and go: the brokers are there
	}
	g.told = true
	emit(g.cfg.Hooks, func(h OnReconnect) {
		h.OnReconnect(hookContext(ctx), ReconnectEvent{What: "group", Attempt: n, Err: err})
	})
}

// close leaves the group. When hard ends first, it ends the connections; the
// error then says that the group may not know.
func (g *group) close(hard context.Context) error {
	left := make(chan struct{})
	go func() {
		_ = g.members.Close() // never returns an error
		close(left)
	}()
	select {
	case <-left:
		return nil
	case <-hard.Done():
	}
	g.groupDialer.Shut()
	<-left
	return fmt.Errorf("leave the group: %w", context.Cause(hard))
}
