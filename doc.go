// Package ackafter is the root of an inbox framework for Go services that
// consume messages: the handler's database writes happen exactly once, however
// often the message is delivered.
//
// Start with package inbox; see the README for a run without any set-up.
package ackafter
