package integration_test

import (
	kafkago "github.com/segmentio/kafka-go"
	"github.com/segmentio/kafka-go/protocol"
)

// deleteRecords makes partition 0 begin at an offset, as retention does.
func (p *pipeline) deleteRecords(before int64) {
	p.t.Helper()
	transport := &kafkago.Transport{}
	defer transport.CloseIdleConnections()
	res, err := transport.RoundTrip(p.t.Context(), p.topic.client.Addr, &deleteRecordsRequest{
		Topics: []deleteRecordsTopic{{Name: p.topic.name, Partitions: []deleteRecordsPartition{{Offset: before}}}}, TimeoutMs: 10_000,
	})
	if err != nil {
		p.t.Fatalf("delete records: %v", err)
	}
	if r := res.(*deleteRecordsResponse).Topics[0].Partitions[0]; r.ErrorCode != 0 || r.LowWatermark != before {
		p.t.Fatalf("delete records: %+v", r)
	}
}

// DeleteRecords, which the client does not have.
type (
	deleteRecordsRequest struct {
		Topics    []deleteRecordsTopic `kafka:"min=v0,max=v1"`
		TimeoutMs int32                `kafka:"min=v0,max=v1"`
	}
	deleteRecordsTopic struct {
		Name       string                   `kafka:"min=v0,max=v1"`
		Partitions []deleteRecordsPartition `kafka:"min=v0,max=v1"`
	}
	deleteRecordsPartition struct {
		Partition int32 `kafka:"min=v0,max=v1"`
		Offset    int64 `kafka:"min=v0,max=v1"`
	}
	deleteRecordsResponse struct {
		ThrottleTimeMs int32                       `kafka:"min=v0,max=v1"`
		Topics         []deleteRecordsTopicDeleted `kafka:"min=v0,max=v1"`
	}
	deleteRecordsTopicDeleted struct {
		Name       string                 `kafka:"min=v0,max=v1"`
		Partitions []deleteRecordsDeleted `kafka:"min=v0,max=v1"`
	}
	deleteRecordsDeleted struct {
		Partition    int32 `kafka:"min=v0,max=v1"`
		LowWatermark int64 `kafka:"min=v0,max=v1"`
		ErrorCode    int16 `kafka:"min=v0,max=v1"`
	}
)

func (*deleteRecordsRequest) ApiKey() protocol.ApiKey  { return protocol.DeleteRecords } //nolint:revive // The library's name.
func (*deleteRecordsResponse) ApiKey() protocol.ApiKey { return protocol.DeleteRecords } //nolint:revive // The library's name.

func init() { protocol.Register(&deleteRecordsRequest{}, &deleteRecordsResponse{}) }
