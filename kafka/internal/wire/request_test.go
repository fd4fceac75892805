package wire

import (
	"errors"
	"net"
	"testing"
	"time"

	kafkago "github.com/segmentio/kafka-go"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// The other side of the encoding here is another client's.
func TestFetchRequestEncoding(t *testing.T) {
	t.Parallel()
	q := &FetchRequest{Topic: "orders", Partition: 3, Offset: 4711, MaxBytes: 1 << 20, MaxWait: 1500 * time.Millisecond, Committed: true}
	for version := int16(4); version <= 11; version++ {
		r := kmsg.NewFetchRequest()
		r.Version = version
		if err := r.ReadFrom(q.encode(version)); err != nil {
			t.Fatalf("version %d: %v", version, err)
		}
		if r.ReplicaID != -1 || r.MaxWaitMillis != 1500 || r.MinBytes != 1 || r.MaxBytes != 1<<20 || r.IsolationLevel != 1 {
			t.Errorf("version %d: %+v", version, r)
		}
		if version >= 7 && r.SessionEpoch != -1 {
			t.Errorf("version %d: a fetch session is begun", version)
		}
		p := r.Topics[0].Partitions[0]
		if r.Topics[0].Topic != "orders" || p.Partition != 3 || p.FetchOffset != 4711 || p.PartitionMaxBytes != 1<<20 {
			t.Errorf("version %d: %+v", version, p)
		}
		if version >= 9 && p.CurrentLeaderEpoch != -1 {
			t.Errorf("version %d: leader epoch %d", version, p.CurrentLeaderEpoch)
		}
	}
}

func TestFetchResponseDecoding(t *testing.T) {
	t.Parallel()
	q := &FetchRequest{Topic: "orders", Partition: 3, Offset: 0, Committed: true}
	for version := int16(4); version <= 11; version++ {
		other := kmsg.NewFetchResponseTopicPartition()
		other.Partition = 2
		p := kmsg.NewFetchResponseTopicPartition()
		p.Partition, p.HighWatermark, p.LastStableOffset, p.LogStartOffset = 3, 30, 20, 0
		p.AbortedTransactions = []kmsg.FetchResponseTopicPartitionAbortedTransaction{{ProducerID: 5, FirstOffset: 0}}
		p.RecordBatches = encodeAll(t, inTransaction(5, plain(0, 0)), abortMark(1, 5), plain(0, 2))
		topic := kmsg.NewFetchResponseTopic()
		topic.Topic = "orders"
		topic.Partitions = append(topic.Partitions, other, p)
		r := kmsg.NewFetchResponse()
		r.Version = version
		r.Topics = append(r.Topics, topic)

		res, err := q.decode(version, r.AppendTo(nil))
		if err != nil {
			t.Fatalf("version %d: %v", version, err)
		}
		if len(res.Records) != 1 || res.Records[0].Offset != 2 || res.Next != 3 || res.HighWatermark != 30 || res.Err != nil {
			t.Errorf("version %d: %+v", version, res)
		}

		all, err := (&FetchRequest{Topic: "orders", Partition: 3}).decode(version, r.AppendTo(nil))
		if err != nil || len(all.Records) != 2 {
			t.Errorf("version %d, uncommitted too: %d records, %v", version, len(all.Records), err)
		}

		p.ErrorCode = 1
		r.Topics[0].Partitions[1] = p
		if res, err := q.decode(version, r.AppendTo(nil)); err != nil || !errors.Is(res.Err, kafkago.OffsetOutOfRange) || res.Next != 0 {
			t.Errorf("version %d, with an error: %+v, %v", version, res, err)
		}

		whole := r.AppendTo(nil)
		for n := range whole {
			if _, err := q.decode(version, whole[:n]); err == nil {
				t.Fatalf("version %d: no error with %d of %d bytes", version, n, len(whole))
			}
		}
	}
	if _, err := q.decode(11, kmsg.NewPtrFetchResponse().AppendTo(nil)); err == nil {
		t.Error("no error for a response without the partition")
	}
}

func TestMetadataEncoding(t *testing.T) {
	t.Parallel()
	for version := int16(10); version <= 12; version++ {
		r := kmsg.NewMetadataRequest()
		r.Version = version
		for _, operations := range []bool{false, true} {
			if err := r.ReadFrom(metadataRequest(version, []string{"orders", "refunds"}, operations)); err != nil {
				t.Fatalf("version %d: %v", version, err)
			}
			if len(r.Topics) != 2 || *r.Topics[0].Topic != "orders" || *r.Topics[1].Topic != "refunds" || r.AllowAutoTopicCreation ||
				r.IncludeTopicAuthorizedOperations != operations || r.IncludeClusterAuthorizedOperations {
				t.Errorf("version %d: %+v", version, r)
			}
		}
	}
}

func TestMetadataDecoding(t *testing.T) {
	t.Parallel()
	for version := int16(10); version <= 12; version++ {
		b := kmsg.NewMetadataResponseBroker()
		b.NodeID, b.Host, b.Port, b.Rack = 7, "::1", 9092, kmsg.StringPtr("r1")
		p := kmsg.NewMetadataResponseTopicPartition()
		p.Partition, p.Leader, p.Replicas, p.ISR = 3, 7, []int32{7, 8, 9}, []int32{7}
		known := kmsg.NewMetadataResponseTopic()
		known.Topic, known.TopicID = kmsg.StringPtr("orders"), [16]byte{1, 2, 3}
		known.Partitions, known.AuthorizedOperations = append(known.Partitions, p), 1<<kmsg.ACLOperationRead
		missing := kmsg.NewMetadataResponseTopic()
		missing.Topic, missing.ErrorCode = kmsg.StringPtr("refunds"), 3
		r := kmsg.NewMetadataResponse()
		r.Version, r.ClusterID = version, kmsg.StringPtr("c")
		r.Brokers = append(r.Brokers, b)
		r.Topics = append(r.Topics, known, missing)

		whole := r.AppendTo(nil)
		m, err := readMetadata(whole)
		if err != nil {
			t.Fatalf("version %d: %v", version, err)
		}
		if got, want := m.Brokers[7], net.JoinHostPort("::1", "9092"); got != want {
			t.Errorf("version %d: broker is %q, want %q", version, got, want)
		}
		if o := m.Topics["orders"]; o.ID != (TopicID{1, 2, 3}) || o.Err != nil || o.Leaders[3] != 7 || o.MayWrite() {
			t.Errorf("version %d: %+v", version, o)
		}
		if o := m.Topics["refunds"]; !o.MayWrite() {
			t.Errorf("version %d: %+v: not to know is not to forbid", version, o)
		}
		if !errors.Is(m.Topics["refunds"].Err, kafkago.UnknownTopicOrPartition) {
			t.Errorf("version %d: %+v", version, m.Topics["refunds"])
		}
		for n := range len(whole) - 8 {
			if _, err := readMetadata(whole[:n]); err == nil {
				t.Fatalf("version %d: no error with %d of %d bytes", version, n, len(whole))
			}
		}
	}
}

func FuzzResponses(f *testing.F) {
	f.Add([]byte{0, 0, 0, 0, 2, 0, 0, 0, 1}, int16(11))
	f.Fuzz(func(_ *testing.T, in []byte, version int16) {
		q := &FetchRequest{Topic: "orders"}
		_, _ = q.decode(4+(version&7), in) // must not panic or take much memory
		_, _ = readMetadata(in)
	})
}
