// Package sqs receives messages from Amazon SQS queues, standard and FIFO. It is an
// adapter: [Source] implements broker.Source.
//
// # What it promises
//
// Every message is handed out until it is acked; an ack deletes its own message only.
// Messages of a group of a FIFO queue come in their order, those too that are given
// back: a message that is given back takes with it what was received of its group
// after it. A standard queue has no order, and its messages no lane.
//
// # Leases
//
// SQS hides a message that was received from others for [Config.VisibilityTimeout].
// A heartbeat renews that from the receive on, for as long as the message is here,
// buffered or handed out. When it cannot be renewed in time, or SQS's 12 hours are
// over, the delivery is lost: its context ends, settling it returns broker.ErrLost,
// and the message comes again.
//
// Deletes are sent in the background, ten in a call. A receipt handle that SQS does
// not accept any more means that the message was already redelivered: that is
// counted, and no failure. When a message comes again whose delete is still to be
// sent, it is deleted with its new handle, and not handed out.
//
// # Only what is wanted
//
// Messages are asked for only while Receive waits, and never more than its limit.
// One request waits at the queue; there are more, up to [Config.Pollers], while they
// come back full. What waits here while nobody receives for VisibilityTimeout is
// given back. SQS goes on with a request that is broken off, so [Source.Close] waits
// for those that are under way.
//
// # What is never silent
//
//   - SQS moves what is received too often to a dead letter queue, if the queue has a
//     redrive policy: [Open] says so, and [OnLastReceive] before it happens.
//   - The queue is deleted ([Config.OnQueueDeleted]): an event, then stop or wait.
//   - A lease ends ([OnLost]), a delete is refused ([OnRefusedAck]), SQS does not
//     answer ([OnReceiveError], [Source.Health]).
//
// # What a message carries
//
// Message.ID is the MessageId, Time the time of sending, Key the message group,
// Delivery.Attempt SQS's approximate count of receives. All message attributes are
// headers, sorted by name: String and Number as text, Binary as bytes. Of the
// system's attributes these are headers: [HeaderGroupID], [HeaderDeduplicationID],
// [HeaderSequenceNumber], [HeaderTrace], [HeaderDeadLetterFrom]. SNS notifications
// are taken off with [Config.UnwrapSNS]. An event of EventBridge stays as it is: paths
// of keys lead through its detail, keyfunc.JSON("detail.orderId", "detail-type").
//
// # Permissions
//
// sqs:GetQueueUrl (unless the URL is given), sqs:GetQueueAttributes,
// sqs:ReceiveMessage, sqs:DeleteMessage, sqs:ChangeMessageVisibility.
package sqs
