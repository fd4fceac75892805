// Package rabbitmq receives messages from RabbitMQ queues over AMQP 0.9.1, and
// publishes to exchanges. It is an adapter: [Source] implements broker.Source.
//
// # What it promises
//
// Every message of the queue is handed out until it is acked; an ack speaks for its
// own message only. Messages that come back keep the order of their lane, where
// there are lanes ([Config.Lanes]) and one consumer at a time has the queue. Nothing
// is requeued in a hot loop: what is given back with a delay waits here.
//
// # Epochs
//
// The broker knows a delivery by a number that means something on one channel only.
// So a delivery belongs to the channel that it came on, which is called an epoch.
// When the channel ends, because the connection broke, say, what is out is lost: its
// contexts end, settling it returns broker.ErrLost, and the broker delivers the
// messages again. No ack ever reaches another channel, where it would remove a
// message that nobody handled. Acks that come too late are dropped and counted.
//
// Acks are sent in the background, several at a time when it is safe, and when the
// channel breaks, some of them may not have arrived. Then these messages come again,
// as they do after a crash between the commit and the ack.
//
// # What goes wrong, and what happens then
//
//   - Connection or channel ends: opened anew with backoff and jitter, for as long
//     as it takes; logged, counted, visible in [Source.Health]. When only the channel
//     ends, the connection stays.
//   - The queue is deleted ([Config.OnQueueDeleted]): an event, then stop or wait.
//   - The broker refuses login or access: an error from Open; later tried again for
//     30 s, then an error from Receive.
//   - Messages wait for so long that the broker's consumer_timeout comes near
//     ([Config.AckTimeout]): they go back in time, and fewer are fetched.
//   - Nobody calls Receive for long: consuming stops, and begins again with the next
//     call.
//   - The broker has an alarm: consuming goes on; publishing returns an error when
//     its time is over.
//
// # Kinds of queues
//
// Quorum queues count deliveries (broker.Delivery.Attempt) and may drop messages
// that came back too often: give them a dead letter exchange. Classic queues do not
// count. For streams see [Stream].
package rabbitmq
