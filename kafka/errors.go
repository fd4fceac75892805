package kafka

import (
	"errors"
	"fmt"
)

// Errors of this package. Test with errors.Is and errors.As.
var (
	// ErrNoTopic is returned by Open and OpenPublisher when a topic does not exist,
	// and by Publish when it does not any more. The error names all that are
	// missing.
	ErrNoTopic = errors.New("topic does not exist")

	// ErrForbidden is returned by Open, and by Receive when it lasts, when the
	// login may not read a topic or use the group, and by OpenPublisher and Publish
	// when it may not write to the topic. The error names it.
	ErrForbidden = errors.New("permission is missing")

	// ErrTooLarge is returned by Publish when a message is larger than
	// PublisherConfig.MaxMessageBytes (the error names it by its place in the call),
	// or when messages that traveled together are larger than the topic allows.
	ErrTooLarge = errors.New("message is too large")

	// ErrPublisherClosed is returned by Publish after Publisher.Close, and by calls
	// that Close cut off.
	ErrPublisherClosed = errors.New("publisher is closed")
)

// GapError is returned by Receive when offsets that were not handled are gone
// from the log and the policy is GapStop.
type GapError struct {
	Topic     string
	Partition int32
	// From is the first offset that is gone, To the first that the log has.
	From, To int64
}

// Count is how many offsets are gone. It is at least the number of messages.
func (e *GapError) Count() int64 { return e.To - e.From }

// Error implements error.
func (e *GapError) Error() string {
	return fmt.Sprintf("kafka: %s/%d: offsets %d to %d (%d) are gone before they were handled: the log begins at %d",
		e.Topic, e.Partition, e.From, e.To-1, e.Count(), e.To)
}

// PublishError is returned by Publish when not all messages were confirmed.
type PublishError struct {
	Topic string
	// Failed are the messages that were not confirmed, by their places in the
	// call, ascending. They may be in the topic or not.
	Failed []int
	// Of is how many messages there were in the call.
	Of int
	// Err is why; the first reason when there are several.
	Err error
}

// Error implements error.
func (e *PublishError) Error() string {
	return fmt.Sprintf("kafka: publish to %q: %d of %d messages are not confirmed: %v", e.Topic, len(e.Failed), e.Of, e.Err)
}

// Unwrap returns the reason.
func (e *PublishError) Unwrap() error { return e.Err }

// ResetReason tells why an offset makes no sense any more.
type ResetReason string

// The reasons.
const (
	// ResetCut: the log was cut back to before the offset, as a leader does that was
	// elected uncleanly or has lost data, and may have grown again since. Records
	// that were handled are gone, and others have taken their places. End is the
	// offset up to which the log is the one that was read.
	ResetCut ResetReason = "log was cut back before the offset"
	// ResetBeyondEnd: the log ends before the offset. It was truncated, or the
	// topic was created anew.
	ResetBeyondEnd ResetReason = "offset is beyond the end of the log"
	// ResetRecreated: the topic has another id than the one that the offset
	// belongs to.
	ResetRecreated ResetReason = "topic was deleted and created anew"
	// ResetDeleted: the topic does not exist any more.
	ResetDeleted ResetReason = "topic was deleted"
)

// ResetError is returned by Receive when the offset of a partition makes no
// sense in its log and the policy is ResetStop.
type ResetError struct {
	Topic string
	// Partition is -1 when it is about the whole topic.
	Partition int32
	Reason    ResetReason
	// Offset is the one that makes no sense; -1 when unknown.
	Offset int64
	// End is the end of the log, or of the part of it that is as it was; -1 when
	// unknown.
	End int64
}

// Error implements error.
func (e *ResetError) Error() string {
	where := e.Topic
	if e.Partition >= 0 {
		where = topicPartition{e.Topic, e.Partition}.String()
	}
	text := fmt.Sprintf("kafka: %s: %s", where, e.Reason)
	if e.Offset >= 0 {
		text += fmt.Sprintf(": the group is at offset %d", e.Offset)
	}
	switch {
	case e.End >= 0 && e.Reason == ResetCut:
		text += fmt.Sprintf(", the log is as it was up to %d", e.End)
	case e.End >= 0:
		text += fmt.Sprintf(", the log ends at %d", e.End)
	}
	return text + "; set the group's offsets, or Config.OnReset to ResetRestart"
}
