// Package kafka receives messages from Kafka topics as a member of a consumer
// group. It is an adapter: [Source] implements broker.Source.
//
// # What it promises
//
// Every record of the topics is handed out until it is acked, in the order of
// its lane; nothing is skipped in silence. The committed offset of a partition
// is the first one that is not acked: it never overtakes work that is not done
// and never goes back, also when records of one partition are worked on in
// parallel and are acked in any order. Holes in the offsets (compaction, the
// marks of transactions) are no obstacle: when all is acked the lag is 0.
// Records of open and aborted transactions are not handed out.
//
// # Generations
//
// A delivery belongs to the group generation that handed it out. When the
// group rebalances, fetching stops, what is in flight gets a bounded time
// ([Config.DrainTimeout]) to be settled, what is done is committed, and then
// the deliveries that are left are lost: their contexts end and settling them
// returns broker.ErrLost. Heartbeats are sent in the background, during that time
// too, so a slow handler causes no rebalance and costs the member no place.
//
// # What goes wrong, and what happens then
//
//   - The committed offset is older than the log ([Config.OnGap]): an event with
//     the count of the missing offsets, then on or stop.
//   - The committed offset is beyond the log, the topic was deleted or created
//     anew, or an unclean leader election has cut the log back ([Config.OnReset]):
//     an event, then stop or begin anew.
//   - Brokers are gone: retried with backoff and jitter, for as long as it takes;
//     logged, counted, visible in [Source.Health].
//   - Offsets cannot be committed: retried, counted; handing out goes on.
//   - Nobody calls Receive: fetching pauses when the buffer is full
//     ([Config.BufferBytes]); the membership stays.
//
// # Writing
//
// [Publisher] writes messages to a topic, at least once, and waits until they are
// confirmed: dead letters, what handlers send on, tests.
//
// # The client library
//
// Group membership is kafka-go's ConsumerGroup, and writing is its Writer; records
// are read by this package's own code, because the readers of the library hand out
// aborted records and can stall on compacted batches.
package kafka
