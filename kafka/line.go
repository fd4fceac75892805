package kafka

import (
	"context"

	"github.com/segmentio/kafka-go/protocol"

	"github.com/ackafter/ackafter/kafka/internal/wire"
)

// line is a connection to one broker that is opened when it is needed, and again
// after it broke. One request is under way at a time; its methods may be called
// concurrently.
type line struct {
	dialer  *wire.Dialer
	address string
	turn    chan struct{} // holds one token: who has it uses conn
	conn    *wire.Conn
}

func newLine(dialer *wire.Dialer, address string) *line {
	l := &line{dialer: dialer, address: address, turn: make(chan struct{}, 1)}
	l.turn <- struct{}{}
	return l
}

func (l *line) roundTrip(ctx context.Context, req protocol.Message) (protocol.Message, error) {
	select {
	case <-l.turn:
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	defer func() { l.turn <- struct{}{} }()
	if l.conn == nil {
		conn, err := l.dialer.Connect(ctx, l.address)
		if err != nil {
			return nil, err
		}
		l.conn = conn
	}
	res, err := l.conn.RoundTrip(ctx, req)
	if err != nil {
		l.conn.Close()
		l.conn = nil
	}
	return res, err
}
