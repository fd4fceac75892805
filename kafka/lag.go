package kafka

import (
	"context"
	"sync"
	"time"

	"github.com/ackafter/ackafter/internal/retry"
	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// lagMeter tells the hooks how far the partitions of a generation are behind. The
// ends of logs from which nothing is fetched at the moment it asks for, so that a
// source that is paused does not look as if nothing came.
type lagMeter struct {
	*session
	conns   map[string]*wire.Conn // by address; those of the last time
	stale   time.Time             // what is known about leaders must be newer
	trouble retry.Trouble
}

func newLagMeter(se *session) *lagMeter {
	return &lagMeter{session: se, trouble: newTrouble(se.log, "ask for the ends of the logs")}
}

// run works until ctx ends.
func (m *lagMeter) run(ctx context.Context) {
	defer m.keep(nil)
	t := time.NewTicker(m.cfg.LagInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-t.C:
		}
		if err := m.refresh(ctx); err != nil && ctx.Err() == nil {
			m.stale = time.Now()
			m.trouble.Note(ctx, err)
		} else if err == nil {
			m.trouble.Over(ctx)
		}
		if ctx.Err() != nil {
			return
		}
		if m.cfg.LagInterval > idleConn {
			m.keep(nil) // the broker would, without telling
		}
		for _, p := range m.ledger.stats() {
			e := LagEvent{
				Topic: p.Topic, Partition: p.Partition, Lag: p.Lag,
				Committed: p.Committed, End: p.End, EndAt: p.EndAt, Oldest: p.Oldest,
			}
			emit(m.cfg.Hooks, func(h OnLag) { h.OnLag(hookContext(ctx), e) })
		}
	}
}

// refresh asks the leaders, all at once, for the ends that no fetch has told for
// half an interval, so that none is older than an interval when it is told.
func (m *lagMeter) refresh(ctx context.Context) error {
	type answer struct {
		address string
		conn    *wire.Conn
		err     error
	}
	var failed error
	asked := make(map[string][]*partition)
	for _, p := range m.ledger.staleEnds(time.Now().Add(-m.cfg.LagInterval / 2)) {
		address, err := m.cluster.leader(ctx, p.topicPartition, m.stale)
		if err != nil {
			failed = err
			continue
		}
		asked[address] = append(asked[address], p)
	}
	answers := make(chan answer, len(asked))
	var wg sync.WaitGroup
	for address, parts := range asked {
		conn := m.conns[address]
		wg.Go(func() {
			conn, err := m.ask(ctx, conn, address, parts)
			answers <- answer{address, conn, err}
		})
	}
	wg.Wait()
	close(answers)
	conns := make(map[string]*wire.Conn)
	for a := range answers {
		if a.conn != nil {
			conns[a.address] = a.conn
		}
		if a.err != nil {
			failed = a.err
		}
	}
	m.keep(conns)
	return failed
}

// ask asks one leader, and returns the connection if it can be used again.
func (m *lagMeter) ask(ctx context.Context, conn *wire.Conn, address string, parts []*partition) (*wire.Conn, error) {
	if conn == nil {
		var err error
		if conn, err = m.cluster.dialer.Connect(ctx, address); err != nil {
			return nil, err
		}
	}
	tps := make([]topicPartition, len(parts))
	for i, p := range parts {
		tps[i] = p.topicPartition
	}
	ends, err := listOffsets(ctx, conn, tps, latest, ReadUncommitted)
	for _, p := range parts {
		if end, ok := ends[p.topicPartition]; ok {
			m.ledger.setEnd(p, end)
		}
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

// keep replaces the connections; those that were not used are closed.
func (m *lagMeter) keep(conns map[string]*wire.Conn) {
	for address, conn := range m.conns {
		if conns[address] != conn {
			conn.Close()
		}
	}
	m.conns = conns
}
