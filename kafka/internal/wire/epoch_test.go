package wire

import (
	"errors"
	"testing"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kfake"
	"github.com/twmb/franz-go/pkg/kmsg"
	"github.com/twmb/franz-go/pkg/kversion"
)

func TestEpochEncoding(t *testing.T) {
	t.Parallel()
	q := kmsg.NewOffsetForLeaderEpochRequest()
	q.Version = 3
	if err := q.ReadFrom(epochRequest("orders", 3, 7)); err != nil {
		t.Fatal(err)
	}
	p := q.Topics[0].Partitions[0]
	if q.ReplicaID != -1 || q.Topics[0].Topic != "orders" || p.Partition != 3 || p.CurrentLeaderEpoch != -1 || p.LeaderEpoch != 7 {
		t.Errorf("got %+v", q)
	}

	other := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
	mine := kmsg.NewOffsetForLeaderEpochResponseTopicPartition()
	mine.Partition, mine.LeaderEpoch, mine.EndOffset = 3, 6, 4711
	topic := kmsg.NewOffsetForLeaderEpochResponseTopic()
	topic.Topic, topic.Partitions = "orders", append(topic.Partitions, other, mine)
	r := kmsg.NewOffsetForLeaderEpochResponse()
	r.Version, r.ThrottleMillis, r.Topics = 3, 100_000_000, append(r.Topics, topic)
	whole := r.AppendTo(nil)
	if end, err := readEpochEnd(whole, "orders", 3); err != nil || end != 4711 {
		t.Errorf("got %d, %v", end, err)
	}
	for n := range whole {
		if _, err := readEpochEnd(whole[:n], "orders", 3); err == nil {
			t.Fatalf("no error with %d of %d bytes", n, len(whole))
		}
	}
	if _, err := readEpochEnd(whole, "orders", 4); err == nil {
		t.Error("no error for a response without the partition")
	}
	r.Topics[0].Partitions[1].ErrorCode = 74
	if _, err := readEpochEnd(r.AppendTo(nil), "orders", 3); !errors.Is(err, kafkago.FencedLeaderEpoch) {
		t.Errorf("got %v, want the broker's error", err)
	}
}

func TestEpochEnd(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name string
		opts []kfake.Opt
		want int64
	}{
		{"newest", nil, 0},
		{"too old", []kfake.Opt{kfake.MaxVersions(kversion.V2_2_0())}, -1},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			conn, err := newTestDialer(t, Options{}).Connect(t.Context(), newCluster(t, tc.opts...))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if end, err := conn.EpochEnd(t.Context(), "orders", 1, 0); err != nil || end != tc.want {
				t.Errorf("got %d, %v, want %d", end, err, tc.want)
			}
			if tc.want < 0 {
				return
			}
			if _, err := conn.EpochEnd(t.Context(), "orders", 9, 0); !errors.Is(err, kafkago.UnknownTopicOrPartition) {
				t.Errorf("got %v, want the broker's error", err)
			}
			if end, err := conn.EpochEnd(t.Context(), "orders", 1, 0); err != nil || end != 0 {
				t.Errorf("the connection is given up after an error of the broker: %v", err)
			}
		})
	}
}

func FuzzEpochEnd(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 1})
	f.Fuzz(func(_ *testing.T, in []byte) {
		_, _ = readEpochEnd(in, "orders", 3) // must not panic or take much memory
	})
}
