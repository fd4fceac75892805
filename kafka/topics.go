package kafka

import (
	"encoding/hex"
	"strings"
	"sync"

	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// notePrefix marks the note that is kept beside a committed offset: the id of
// the topic that the offset belongs to.
const notePrefix = "topic-id="

// topicIDs knows which topics the source reads, not only by their names. Its
// methods may be called concurrently.
type topicIDs struct {
	mu    sync.Mutex
	seen  map[string][]wire.TopicID // the current one last
	sizes map[string]int            // partitions, when the source was opened
}

func newTopicIDs() *topicIDs {
	return &topicIDs{seen: make(map[string][]wire.TopicID), sizes: make(map[string]int)}
}

// opened notes how many partitions a topic has when the source is opened.
func (t *topicIDs) opened(topic string, partitions int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.sizes[topic] = partitions
}

// added tells whether a partition was added since. All of it was written since, too.
func (t *topicIDs) added(tp topicPartition) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	size, ok := t.sizes[tp.topic]
	return ok && int(tp.id) >= size
}

// see is told what the cluster says. It tells whether the topic was created
// anew. A broker that lags behind and still tells an old id is no re-creation.
func (t *topicIDs) see(topic string, id wire.TopicID) (recreated bool) {
	if id == (wire.TopicID{}) {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	seen := t.seen[topic]
	for _, s := range seen {
		if s == id {
			return false
		}
	}
	t.seen[topic] = append(seen, id)
	return len(seen) > 0
}

// current returns the newest id of the topic; zero when there is none.
func (t *topicIDs) current(topic string) wire.TopicID {
	t.mu.Lock()
	defer t.mu.Unlock()
	if seen := t.seen[topic]; len(seen) > 0 {
		return seen[len(seen)-1]
	}
	return wire.TopicID{}
}

// note returns what to keep beside an offset of the topic.
func (t *topicIDs) note(topic string) string {
	id := t.current(topic)
	if id == (wire.TopicID{}) {
		return ""
	}
	return notePrefix + hex.EncodeToString(id[:])
}

// owner tells what topic of the name an offset belongs to.
type owner int

const (
	unknown owner = iota // there is no note, or somebody else's
	ours                 // the one that the source reads
	theirs               // another one, that is gone
)

// owner reads the note beside an offset.
func (t *topicIDs) owner(topic, note string) owner {
	current := t.current(topic)
	text, ok := strings.CutPrefix(note, notePrefix)
	if !ok || current == (wire.TopicID{}) {
		return unknown
	}
	var id wire.TopicID
	b, err := hex.DecodeString(text)
	if err != nil || len(b) != len(id) {
		return unknown
	}
	copy(id[:], b)
	if id == current {
		return ours
	}
	return theirs
}
