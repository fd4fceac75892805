// Bench measures ackafter against the loop that people write by hand: one
// Kafka, one durable PostgreSQL, all contestants in one run, several times in
// turn, the same messages and the same work for each. What counts are the
// ratios.
//
//	go -C bench run .
//	go -C bench run . -events 200000 -reps 9 -json
//
// The servers are those that ACKAFTER_TEST_POSTGRES_DURABLE and
// ACKAFTER_TEST_KAFKA name, else those of integration_test/services. See
// README.md.
package main
