package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// A victim is this program again, as a process of its own that kills itself at
// a point of the path of one order. These variables tell it where.
const (
	envFile  = "QUICKSTART_FILE"
	envPoint = "QUICKSTART_POINT"
	envOrder = "QUICKSTART_ORDER"
)

// The points.
const (
	beforeCommit = "before commit"
	beforeAck    = "before ack"
)

// kill runs a victim and returns what it reported before it died.
func kill(ctx context.Context, file, point, orderID string) (numbers, error) {
	self, err := os.Executable()
	if err != nil {
		return numbers{}, err
	}
	cmd := exec.CommandContext(ctx, self) //nolint:gosec // G204: it is this program itself.
	cmd.Env = append(os.Environ(), envFile+"="+file, envPoint+"="+point, envOrder+"="+orderID)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, os.Stderr
	var exit *exec.ExitError
	if err := cmd.Run(); !errors.As(err, &exit) {
		return numbers{}, fmt.Errorf("the process that should have died %s ended with: %w", point, err)
	}
	var n numbers
	for lines := bufio.NewScanner(&out); lines.Scan(); {
		switch inbox.Outcome(lines.Text()) {
		case inbox.FirstAttempt:
			n.first++
		case inbox.Replay:
			n.replays++
		}
	}
	return n, nil
}

// victim consumes until it dies.
func victim(ctx context.Context, file string) error {
	db, err := open(ctx, file)
	if err != nil {
		return err
	}
	defer func() { _ = db.Close() }()
	queue := deliveries()
	_, err = consume(ctx, db, queue, &mortal{queue.Source()})
	return err
}

// mortal is a source whose process dies instead of acking one order.
type mortal struct{ broker.Source }

// Receive wraps the deliveries.
func (s *mortal) Receive(ctx context.Context, limit int) ([]*broker.Delivery, error) {
	ds, err := s.Source.Receive(ctx, limit)
	for i, d := range ds {
		ds[i] = broker.NewDelivery(d.Context(), d.Message, d.Lane, through{d}) //nolint:contextcheck // The delivery keeps its own.
	}
	return ds, err
}

// through settles the delivery that it wraps.
type through struct{ d *broker.Delivery }

func (t through) Ack(ctx context.Context, _ *broker.Delivery) error {
	crash(beforeAck, string(t.d.Message.Key))
	return t.d.Ack(ctx)
}

func (t through) Nack(ctx context.Context, _ *broker.Delivery, delay time.Duration) error {
	return t.d.Nack(ctx, delay)
}

// crash kills this process, as kill -9 does, if it is a victim and this is its
// point.
func crash(point, orderID string) {
	if os.Getenv(envPoint) != point || os.Getenv(envOrder) != orderID {
		return
	}
	if p, err := os.FindProcess(os.Getpid()); err == nil {
		_ = p.Kill()
	}
	select {} // The signal is on its way.
}

// report tells the parent of a victim what happened; the parent reads lines.
func report(e inbox.OutcomeEvent) {
	if os.Getenv(envFile) != "" {
		fmt.Println(e.Outcome)
	}
}
