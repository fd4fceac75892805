// Package servers gives integration tests the servers that they need. A test
// asks for one in its first line:
//
//	dsn := servers.Postgres(t) // a database of its own, dropped at the end
//	brokers := servers.Kafka(t)
//
// Where a server comes from, in this order:
//
//  1. its environment variable ([EnvPostgres], [EnvKafka], ...), as printed by
//     integration_test/services/env or set by hand;
//  2. a container, when a Docker daemon answers: one per test binary, shared by
//     its tests, removed by testcontainers' reaper;
//  3. the scripts of integration_test/services, when this machine can run them.
//     They install what is missing and leave the server running for the next
//     test binary; integration_test/services/down stops it.
//
// When all of these fail the test is skipped with the reasons, or, with
// ACKAFTER_TEST_REQUIRE=1, failed. A server that is named by the environment and
// does not answer always fails the test.
//
// All functions may be called concurrently, from parallel tests too. They must
// be called from the test's own goroutine, as they may end the test.
package servers
