// Command ackafter is the operator's command line of the inbox: it makes the
// tables, tells who handled a message key and what became a dead letter, and
// retries or discards dead letters.
//
//	ackafter migrate up
//	ackafter show 'A1|order.paid'
//	ackafter dead list --consumer billing
//	ackafter dead retry --failure 5f0c9a2be1d34c77 --rate 50/s
//
// "ackafter help" lists everything, with the exit codes that scripts can rely
// on.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// A second signal ends the process the hard way.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}
