package wire

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/segmentio/kafka-go/protocol"
	"github.com/segmentio/kafka-go/protocol/findcoordinator"
	"github.com/segmentio/kafka-go/protocol/heartbeat"
	"github.com/segmentio/kafka-go/protocol/leavegroup"
	"github.com/segmentio/kafka-go/protocol/listoffsets"
	"github.com/segmentio/kafka-go/protocol/offsetcommit"
	"github.com/segmentio/kafka-go/protocol/offsetfetch"
	"github.com/twmb/franz-go/pkg/kmsg"
)

// What another client encodes as an answer with an error, the library decodes as
// one, in each version that is used of it.
func TestLibraryReadsErrors(t *testing.T) {
	t.Parallel()
	const code, throttle = 22, 100_000_000 // whose halves are neither 0 nor the code
	for _, tc := range []struct {
		key  protocol.ApiKey
		from int16 // the first version in question
		res  kmsg.Response
		read func(protocol.Message) int16
	}{
		{protocol.Heartbeat, 0, &kmsg.HeartbeatResponse{ThrottleMillis: throttle, ErrorCode: code},
			func(m protocol.Message) int16 { return m.(*heartbeat.Response).ErrorCode }},
		{protocol.LeaveGroup, 0, &kmsg.LeaveGroupResponse{ThrottleMillis: throttle, ErrorCode: code},
			func(m protocol.Message) int16 { return m.(*leavegroup.Response).ErrorCode }},
		{protocol.FindCoordinator, 0, &kmsg.FindCoordinatorResponse{ThrottleMillis: throttle, ErrorCode: code},
			func(m protocol.Message) int16 { return m.(*findcoordinator.Response).ErrorCode }},
		{protocol.OffsetFetch, 2, &kmsg.OffsetFetchResponse{ThrottleMillis: throttle, ErrorCode: code},
			func(m protocol.Message) int16 { return m.(*offsetfetch.Response).ErrorCode }},
		{protocol.OffsetCommit, 0, &kmsg.OffsetCommitResponse{ThrottleMillis: throttle, Topics: []kmsg.OffsetCommitResponseTopic{{
			Topic: "orders", Partitions: []kmsg.OffsetCommitResponseTopicPartition{{Partition: 3, ErrorCode: code}},
		}}}, func(m protocol.Message) int16 { return m.(*offsetcommit.Response).Topics[0].Partitions[0].ErrorCode }},
		{protocol.ListOffsets, 1, &kmsg.ListOffsetsResponse{ThrottleMillis: throttle, Topics: []kmsg.ListOffsetsResponseTopic{{
			Topic: "orders", Partitions: []kmsg.ListOffsetsResponseTopicPartition{{Partition: 3, ErrorCode: code, Offset: 7}},
		}}}, func(m protocol.Message) int16 { return m.(*listoffsets.Response).Topics[0].Partitions[0].ErrorCode }},
	} {
		for version := tc.from; version <= libraryMax[tc.key]; version++ {
			tc.res.SetVersion(version)
			body := tc.res.AppendTo(nil)
			b := binary.BigEndian.AppendUint32(nil, uint32(4+len(body)))
			b = binary.BigEndian.AppendUint32(b, 1) // correlation id
			_, m, err := protocol.ReadResponse(bytes.NewReader(append(b, body...)), tc.key, version)
			if err != nil {
				t.Errorf("%s version %d: %v", tc.key, version, err)
				continue
			}
			if got := tc.read(m); got != code {
				t.Errorf("%s version %d: error %d, want %d", tc.key, version, got, code)
			}
		}
	}
}
