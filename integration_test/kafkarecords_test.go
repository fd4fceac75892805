package integration_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/keyfunc"
)

// kcat runs kcat as a producer of what it reads.
func kcat(t *testing.T, tp *topic, in string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), kcatPath(t), append([]string{"-P", "-b", strings.Join(tp.brokers, ","), "-t", tp.name, "-X", "acks=all"}, args...)...)
	cmd.Stdin = strings.NewReader(in)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("kcat: %v\n%s", err, out)
	}
}

// case K8: offsets with holes, of transactions.
func TestTransactionalProducer(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	for i := range 10 {
		kcat(t, p.topic, fmt.Sprintf(`{"id":"m-%d"}`, i), "-X", "transactional.id="+p.topic.name)
	}
	c := p.start(keyfunc.JSON("id"), effect, nil, nil)
	p.lag0()
	if at := p.committed(); at != 20 {
		t.Errorf("committed offset %d, want 20", at)
	}
	eventually(t, time.Minute, "the source sees no lag", func() bool { return c.source.Stats().Partitions[0].Lag == 0 })
	c.stop(t)
	p.once(10)
	for i, e := range c.outcomes {
		if at := e.Message.Position.Offset; at != int64(2*i) {
			t.Errorf("message %d is at offset %d, want %d", i, at, 2*i)
		}
	}
}

// case K8: offsets with holes, of compaction.
func TestCompactedTopic(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	p.topic = newCompactedTopic(t, p.topic.brokers)
	var ms []kafkago.Message
	for i := range 51 {
		key := "same"
		if i == 3 || i == 7 {
			key = fmt.Sprint(i)
		}
		ms = append(ms, kafkago.Message{Key: []byte(key), Value: fmt.Appendf(nil, `{"id":"m-%d"}`, i)})
	}
	p.write(0, ms...)
	// Offsets 3, 7 and 50 are left. The cleaner only looks at segments that are
	// closed, which the next record after a while does.
	var offsets []int64
	for n := 0; ; n++ {
		p.write(0, kafkago.Message{Key: []byte("last"), Value: fmt.Appendf(nil, `{"id":"last-%d"}`, n)})
		if offsets = p.offsets(); slices.Equal(offsets[:min(3, len(offsets))], []int64{3, 7, 50}) {
			break
		}
		if n > 300 {
			t.Fatalf("not compacted: %v", offsets)
		}
		<-time.After(200 * time.Millisecond) // segment.ms
	}
	c := p.start(keyfunc.JSON("id"), effect, nil, nil)
	p.lag0()
	c.stop(t)
	for _, want := range []string{"m-3", "m-7", "m-50"} {
		if n := count(t, p.pool, "select count(*) from effects where key = $1", want); n != 1 {
			t.Errorf("%d effects of %s, want 1", n, want)
		}
	}
	if n := count(t, p.pool, "select count(*) from effects where key like 'm-%'"); n != 3 {
		t.Errorf("%d effects of what was compacted, want 3", n)
	}
	if got, want := p.effects(), count(t, p.pool, "select count(distinct key) from effects"); got != want {
		t.Errorf("%d effects of %d keys", got, want)
	}
}

func newCompactedTopic(t *testing.T, brokers []string) *topic {
	t.Helper()
	tp := newTopicOf(t, brokers, kafkago.TopicConfig{
		NumPartitions: 1, ReplicationFactor: 1, ConfigEntries: []kafkago.ConfigEntry{
			{ConfigName: "cleanup.policy", ConfigValue: "compact"}, {ConfigName: "segment.ms", ConfigValue: "100"},
			{ConfigName: "min.cleanable.dirty.ratio", ConfigValue: "0.001"}, {ConfigName: "min.compaction.lag.ms", ConfigValue: "0"},
		},
	})
	return tp
}

// offsets returns those of the records that kcat finds in partition 0.
func (p *pipeline) offsets() []int64 {
	p.t.Helper()
	cmd := exec.CommandContext(p.t.Context(), kcatPath(p.t), "-C", "-e", "-q", "-b", strings.Join(p.topic.brokers, ","), "-t", p.topic.name, "-p", "0", "-f", "%o\n")
	out, err := cmd.Output()
	if err != nil {
		p.t.Fatalf("kcat: %v", err)
	}
	var offsets []int64
	for _, line := range strings.Fields(string(out)) {
		var o int64
		if _, err := fmt.Sscan(line, &o); err != nil {
			p.t.Fatalf("kcat says %q", line)
		}
		offsets = append(offsets, o)
	}
	return offsets
}

// framed is a body with the prefix of a schema registry's serializer.
func framed(body string) []byte { return append([]byte{0, 0, 0, 0, 12}, body...) }

func gzipped(t *testing.T, body string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, err := w.Write([]byte(body))
	if err = errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// case K9: bodies that no key can be read from become dead letters, whose reason
// names the first byte, and the next offset goes on.
func TestOddBodies(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	for _, row := range []struct {
		name string
		body []byte
		says string
	}{
		{"nil", nil, "no body"},
		{"empty", []byte{}, "empty"},
		{"framed", framed(`{"id":"framed"}`), "0x00"},
		{"gzip", gzipped(t, `{"id":"gzip"}`), "0x1f"},
		{"xml", []byte(`<id>1</id>`), "0x3c"},
	} {
		// One key, so that what follows is in the same lane.
		p.write(0, kafkago.Message{Key: []byte("k"), Value: row.body, Headers: []kafkago.Header{{Key: "case", Value: []byte(row.name + ": " + row.says)}}},
			kafkago.Message{Key: []byte("k"), Value: fmt.Appendf(nil, `{"id":"after-%s"}`, row.name)})
	}
	runs := make(chan string, 100)
	c := p.start(keyfunc.JSON("id"), func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		runs <- m.MessageKey
		return effect(ctx, tx, m)
	}, nil, nil)
	p.lag0()
	c.stop(t)
	if len(runs) != 5 || p.effects() != 5 {
		t.Errorf("the handler ran %d times, %d effects, want 5", len(runs), p.effects())
	}
	if len(c.outcomes) != 10 {
		t.Fatalf("%d outcomes, want 10: %+v", len(c.outcomes), c.outcomes)
	}
	for i, e := range c.outcomes {
		if i%2 == 1 {
			if e.Outcome != inbox.FirstAttempt || e.Message.Position.Offset != int64(i) {
				t.Errorf("outcome %d: %v at %v", i, e.Outcome, e.Message.Position)
			}
			// Within a second, and more where the machine is busy.
			if took := c.at[i].Sub(c.at[i-1]); took > 5*time.Second {
				t.Errorf("offset %d went on after %v", i, took)
			}
			continue
		}
		info, _ := e.Message.Headers.Get("case")
		name, want, _ := strings.Cut(string(info), ": ")
		if e.Outcome != inbox.Dead || e.Reason != inbox.ReasonInvalidKey || e.Err == nil || !says(e.Err, want) {
			t.Errorf("%s: %v, %q: %v, want a dead letter that says %q", name, e.Outcome, e.Reason, e.Err, want)
		}
		t.Logf("%s: %v", name, e.Err)
	}
	var errs []string
	rows, err := p.pool.Query(t.Context(), "select error from inbox_parked where state = 'dead' order by id")
	if err != nil {
		t.Fatal(err)
	}
	if errs, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil || len(errs) != 5 {
		t.Fatalf("%d dead letters: %v, %v", len(errs), errs, err)
	}
}

// case K9: the same bodies with a declared policy: frames are looked into, a
// tombstone is skipped.
func TestOddBodiesByPolicy(t *testing.T) {
	t.Parallel()
	p := newPipeline(t)
	p.write(0,
		kafkago.Message{Key: []byte("1"), Value: framed(`{"id":"framed"}`)},
		kafkago.Message{Key: []byte("2"), Value: gzipped(t, `{"id":"gzip"}`)},
		kafkago.Message{Key: []byte("3"), Value: framed(string(gzipped(t, `{"id":"both"}`)))},
		kafkago.Message{Key: []byte("4")},
		kafkago.Message{Key: []byte("5"), Value: []byte(`{"id":"plain"}`)})
	id := keyfunc.JSON("id")
	key := keyfunc.First(
		keyfunc.Unwrap(keyfunc.ConfluentFrame(), keyfunc.First(keyfunc.Unwrap(keyfunc.Gzip(0), id), id)),
		keyfunc.Unwrap(keyfunc.Gzip(0), id), id, keyfunc.BrokerKey())
	c := p.start(key, func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
		if m.Body == nil {
			return inbox.Skip("tombstone")
		}
		return effect(ctx, tx, m)
	}, nil, nil)
	p.lag0()
	c.stop(t)
	if n, all := count(t, p.pool, "select count(*) from effects where key in ('framed', 'gzip', 'both', 'plain')"), p.effects(); n != 4 || all != 4 {
		t.Errorf("%d effects of the four, %d in all", n, all)
	}
	if n := c.count(inbox.FirstAttempt); n != 5 {
		t.Errorf("%d first attempts, want 5: %+v", n, c.outcomes)
	}
}

// What a foreign producer writes arrives as it was written: with every codec,
// repeated headers, tombstones and times.
func TestForeignProducer(t *testing.T) {
	t.Parallel()
	for _, codec := range []string{"none", "gzip", "snappy", "lz4", "zstd"} {
		t.Run(codec, func(t *testing.T) {
			t.Parallel()
			const messages = 500
			p := newPipeline(t)
			var in strings.Builder
			for i := range messages {
				// kcat -Z makes a null value of an empty one.
				body := fmt.Sprintf(`{"id":"m-%d","more":"%s"}`, i, strings.Repeat("x", 200))
				if i%100 == 99 {
					body = ""
				}
				fmt.Fprintf(&in, "k%d\t%s\n", i, body)
			}
			began := time.Now()
			kcat(t, p.topic, in.String(), "-K", "\t", "-Z", "-z", codec, "-H", "trace=1", "-H", "trace=2", "-H", "empty=", "-H", "other=ä")
			var mu sync.Mutex
			seen := map[string]bool{}
			c := p.start(keyfunc.BrokerKey(), func(ctx context.Context, tx pgx.Tx, m *inbox.Message) error {
				mu.Lock()
				defer mu.Unlock()
				seen[string(m.Key)] = true
				i := int(m.Position.Offset)
				body := fmt.Sprintf(`{"id":"m-%d","more":"%s"}`, i, strings.Repeat("x", 200))
				if i%100 == 99 {
					body = ""
				}
				if string(m.Key) != fmt.Sprintf("k%d", i) || string(m.Body) != body || (m.Body == nil) != (i%100 == 99) {
					t.Errorf("offset %d: key %q, body %q, nil %v", i, m.Key, m.Body, m.Body == nil)
				}
				var headers []string
				for _, h := range m.Headers {
					headers = append(headers, h.Name+"="+string(h.Value))
				}
				if !slices.Equal(headers, []string{"trace=1", "trace=2", "empty=", "other=ä"}) || len(m.Headers.Values("trace")) != 2 {
					t.Errorf("offset %d: headers %q", i, headers)
				}
				if m.Time.Before(began.Add(-time.Second)) || m.Time.After(time.Now().Add(time.Second)) {
					t.Errorf("offset %d: time %v, produced after %v", i, m.Time, began)
				}
				return effect(ctx, tx, m)
			}, nil, nil)
			p.lag0()
			c.stop(t)
			p.once(messages)
			if len(seen) != messages {
				t.Errorf("%d messages, want %d", len(seen), messages)
			}
		})
	}
}
