package kafka

import (
	"context"
	"errors"
	"time"

	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// deletedLooks is how often in a row a topic must be unknown before it counts
// as deleted: a broker that just started may not know it yet.
const deletedLooks = 2

// watcher looks at the topics while a generation lasts.
type watcher struct {
	*session
	partitions map[string]int // when the generation began
	unknown    map[string]int // looks in a row
}

// run looks until ctx ends. It returns true when the group has to be joined
// again, because a topic has other partitions than when the generation began.
func (w *watcher) run(ctx context.Context) bool {
	t := time.NewTicker(w.cfg.WatchInterval)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-t.C:
		}
		m, err := w.cluster.metadata(ctx, time.Now())
		if err != nil {
			w.log.DebugContext(ctx, "kafka: topics cannot be looked at", "error", err)
			continue
		}
		rejoin := false
		for _, name := range w.topics {
			if w.look(ctx, name, m.Topics[name]) {
				rejoin = true
			}
		}
		if rejoin {
			return true
		}
	}
}

// look compares a topic with what it was.
func (w *watcher) look(ctx context.Context, name string, topic wire.Topic) (rejoin bool) {
	if errors.Is(topic.Err, kafkago.UnknownTopicOrPartition) {
		w.unknown[name]++
		if w.unknown[name] == deletedLooks {
			w.ledger.setGone(name, true)
			w.reset(ctx, ResetError{Topic: name, Partition: -1, Reason: ResetDeleted, Offset: -1, End: -1})
		}
		return false
	}
	if topic.Err != nil {
		return false
	}
	w.unknown[name] = 0
	w.ledger.setGone(name, false)
	if w.ids.see(name, topic.ID) {
		if !w.reset(ctx, ResetError{Topic: name, Partition: -1, Reason: ResetRecreated, Offset: -1, End: -1}) {
			return false
		}
		w.restart(name)
	}
	if n := len(topic.Leaders); n != w.partitions[name] {
		w.log.InfoContext(ctx, "kafka: the topic has other partitions, joining the group again",
			"topic", name, "before", w.partitions[name], "now", n)
		return true
	}
	return false
}
