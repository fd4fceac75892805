package rabbitmq_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
)

// fakeBroker speaks as much AMQP 0.9.1 as the examples need: it has one queue,
// which the default exchange puts messages into. It is no model of RabbitMQ; the
// tests have the real one.
type fakeBroker struct {
	queue    string
	listener net.Listener
	running  sync.WaitGroup

	mu       sync.Mutex
	bodies   []string // of the queue
	acked    int
	conns    map[net.Conn]bool
	consumer *fakeConn
}

// newFakeBroker starts one whose queue is called "billing".
func newFakeBroker(bodies ...string) (*fakeBroker, error) {
	listener, err := new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	b := &fakeBroker{queue: "billing", listener: listener, bodies: bodies, conns: map[net.Conn]bool{}}
	b.running.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			b.mu.Lock()
			b.conns[conn] = true
			b.mu.Unlock()
			b.running.Go(func() { (&fakeConn{broker: b, conn: conn, r: bufio.NewReader(conn)}).serve() })
		}
	})
	return b, nil
}

func (b *fakeBroker) url() string { return "amqp://guest:guest@" + b.listener.Addr().String() }

// counts are how many messages are in the queue, and how many were acked.
func (b *fakeBroker) counts() (queued, acked int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.bodies), b.acked
}

func (b *fakeBroker) close() {
	_ = b.listener.Close()
	b.mu.Lock()
	for conn := range b.conns {
		_ = conn.Close()
	}
	b.mu.Unlock()
	b.running.Wait()
}

// fakeConn is one connection. Its channel is whichever one is used.
type fakeConn struct {
	broker    *fakeBroker
	conn      net.Conn
	r         *bufio.Reader
	tag       string // of the consumer
	delivered uint64
	acked     uint64
	published uint64
	key       string // of the message that is coming
	size      uint64 // of its body
	header    []byte // its properties
	body      []byte
}

// The frames and methods.
const (
	frameMethod, frameHeader, frameBody = 1, 2, 3

	connectionStart, connectionStartOk = 10<<16 | 10, 10<<16 | 11
	connectionTune                     = 10<<16 | 30
	connectionOpen, connectionOpenOk   = 10<<16 | 40, 10<<16 | 41
	connectionClose, connectionCloseOk = 10<<16 | 50, 10<<16 | 51
	channelOpen, channelOpenOk         = 20<<16 | 10, 20<<16 | 11
	channelClose, channelCloseOk       = 20<<16 | 40, 20<<16 | 41
	queueDeclare, queueDeclareOk       = 50<<16 | 10, 50<<16 | 11
	basicQos, basicQosOk               = 60<<16 | 10, 60<<16 | 11
	basicConsume, basicConsumeOk       = 60<<16 | 20, 60<<16 | 21
	basicCancel, basicCancelOk         = 60<<16 | 30, 60<<16 | 31
	basicPublish, basicReturn          = 60<<16 | 40, 60<<16 | 50
	basicDeliver, basicAck             = 60<<16 | 60, 60<<16 | 80
	confirmSelect, confirmSelectOk     = 85<<16 | 10, 85<<16 | 11
)

func (c *fakeConn) serve() {
	defer func() { _ = c.conn.Close() }()
	var hello [8]byte
	if _, err := io.ReadFull(c.r, hello[:]); err != nil {
		return
	}
	c.send(0, connectionStart, []byte{0, 9}, long(0), longString("PLAIN"), longString("en_US"))
	for {
		var head [7]byte
		if _, err := io.ReadFull(c.r, head[:]); err != nil {
			return
		}
		payload := make([]byte, binary.BigEndian.Uint32(head[3:])+1) // and the end of the frame
		if _, err := io.ReadFull(c.r, payload); err != nil {
			return
		}
		channel := binary.BigEndian.Uint16(head[1:])
		c.broker.mu.Lock()
		err := c.frame(head[0], channel, payload[:len(payload)-1])
		c.broker.mu.Unlock()
		if err != nil {
			return
		}
	}
}

var errBye = errors.New("the client said good-bye")

// frame answers one frame; the broker's mutex is held.
func (c *fakeConn) frame(kind byte, channel uint16, p []byte) error {
	switch kind {
	case frameHeader:
		c.size, c.header, c.body = binary.BigEndian.Uint64(p[4:]), p[12:], nil
		c.complete(channel)
	case frameBody:
		c.body = append(c.body, p...)
		c.complete(channel)
	case frameMethod:
		return c.method(channel, int(binary.BigEndian.Uint32(p)), p[4:])
	}
	return nil
}

func (c *fakeConn) method(channel uint16, method int, p []byte) error {
	switch method {
	case connectionStartOk:
		c.send(0, connectionTune, short(0), long(128<<10), short(0))
	case connectionOpen:
		c.send(0, connectionOpenOk, shortString(""))
	case connectionClose:
		c.send(0, connectionCloseOk)
		return errBye
	case channelOpen:
		c.send(channel, channelOpenOk, long(0))
	case channelClose:
		c.send(channel, channelCloseOk)
	case queueDeclare:
		name, _ := readShortString(p[2:])
		if name != c.broker.queue {
			c.send(channel, channelClose, short(404), shortString("NOT_FOUND - no queue '"+name+"' in vhost '/'"), short(50), short(10))
			return nil
		}
		c.send(channel, queueDeclareOk, shortString(name), long(0), long(0))
	case basicQos:
		c.send(channel, basicQosOk)
	case confirmSelect:
		c.send(channel, confirmSelectOk)
	case basicConsume:
		_, rest := readShortString(p[2:])
		c.tag, _ = readShortString(rest)
		c.broker.consumer = c
		c.send(channel, basicConsumeOk, shortString(c.tag))
		c.deliver(channel)
	case basicCancel:
		c.broker.consumer = nil
		c.send(channel, basicCancelOk, shortString(c.tag))
	case basicAck:
		number := binary.BigEndian.Uint64(p)
		if p[8]&1 == 1 {
			c.broker.acked += int(number - c.acked)
			c.acked = number
		} else {
			c.broker.acked++
		}
	case basicPublish:
		_, rest := readShortString(p[2:])
		c.key, _ = readShortString(rest)
		c.published++
	}
	return nil
}

// complete takes in a published message when all of it is there.
func (c *fakeConn) complete(channel uint16) {
	if uint64(len(c.body)) < c.size {
		return
	}
	if c.key == c.broker.queue {
		c.broker.bodies = append(c.broker.bodies, string(c.body))
	} else {
		c.send(channel, basicReturn, short(312), shortString("NO_ROUTE"), shortString(""), shortString(c.key))
		c.content(channel, c.header, string(c.body))
	}
	c.send(channel, basicAck, longLong(c.published), []byte{0})
}

func (c *fakeConn) deliver(channel uint16) {
	for _, body := range c.broker.bodies {
		c.delivered++
		c.send(channel, basicDeliver, shortString(c.tag), longLong(c.delivered), []byte{0}, shortString(""), shortString(c.broker.queue))
		c.content(channel, short(0), body)
	}
	c.broker.bodies = nil
}

func (c *fakeConn) content(channel uint16, header []byte, body string) {
	c.write(frameHeader, channel, short(60), short(0), longLong(uint64(len(body))), header)
	if body != "" {
		c.write(frameBody, channel, []byte(body))
	}
}

func (c *fakeConn) send(channel uint16, method int, arguments ...[]byte) {
	c.write(frameMethod, channel, append([][]byte{long(method)}, arguments...)...)
}

func (c *fakeConn) write(kind byte, channel uint16, parts ...[]byte) {
	var payload []byte
	for _, p := range parts {
		payload = append(payload, p...)
	}
	frame := append([]byte{kind}, short(int(channel))...)
	frame = append(frame, long(len(payload))...)
	frame = append(frame, payload...)
	_, _ = c.conn.Write(append(frame, 0xce)) // who does not read is gone
}

func short(n int) []byte { return binary.BigEndian.AppendUint16(nil, uint16(n)) }

func long(n int) []byte { return binary.BigEndian.AppendUint32(nil, uint32(n)) }

func longLong(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

func shortString(s string) []byte { return append([]byte{byte(len(s))}, s...) }

func longString(s string) []byte { return append(long(len(s)), s...) }

func readShortString(p []byte) (s string, rest []byte) { return string(p[1 : 1+p[0]]), p[1+p[0]:] }
