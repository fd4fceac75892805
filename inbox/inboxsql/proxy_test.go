package inboxsql_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"net"
	"strconv"
	"sync"
	"testing"
)

// cutCommits starts a proxy in front of PostgreSQL that breaks a connection when
// a COMMIT, or anything else with that word, comes along: before the server has
// it, or, reached, when the server
// has answered, and without the answer. It returns the proxy's address.
func cutCommits(tb testing.TB, server string, reached bool) (host string, port uint16) {
	tb.Helper()
	var lc net.ListenConfig
	l, err := lc.Listen(tb.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(tb.Context()))
	var wg sync.WaitGroup
	tb.Cleanup(func() {
		cancel()
		_ = l.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			client, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { proxy(ctx, client, server, reached) })
		}
	})
	host, p, err := net.SplitHostPort(l.Addr().String())
	if err != nil {
		tb.Fatal(err)
	}
	n, err := strconv.ParseUint(p, 10, 16)
	if err != nil {
		tb.Fatal(err)
	}
	return host, uint16(n)
}

func proxy(ctx context.Context, client net.Conn, address string, reached bool) {
	var d net.Dialer
	server, err := d.DialContext(ctx, "tcp", address)
	if err != nil {
		_ = client.Close()
		return
	}
	closeBoth := func() {
		_ = client.Close()
		_ = server.Close()
	}
	stop := context.AfterFunc(ctx, closeBoth)
	defer stop()
	defer closeBoth()
	var mu sync.Mutex
	cut := false
	var answers sync.WaitGroup
	defer answers.Wait()
	defer closeBoth()
	answers.Go(func() {
		defer closeBoth()
		buf := make([]byte, 32<<10)
		for {
			n, err := server.Read(buf)
			mu.Lock()
			stop := cut
			mu.Unlock()
			if err != nil || stop {
				return
			}
			if _, err := client.Write(buf[:n]); err != nil {
				return
			}
		}
	})
	for first := true; ; first = false {
		message, err := frontendMessage(client, first)
		if err != nil {
			return
		}
		if bytes.Contains(message, []byte("commit")) {
			if !reached {
				return
			}
			mu.Lock()
			cut = true
			mu.Unlock()
		}
		if _, err := server.Write(message); err != nil {
			return
		}
	}
}

// frontendMessage reads one message of a client; the first one has no type.
func frontendMessage(r io.Reader, first bool) ([]byte, error) {
	head := 5
	if first {
		head = 4
	}
	message := make([]byte, head)
	if _, err := io.ReadFull(r, message); err != nil {
		return nil, err
	}
	length := int(binary.BigEndian.Uint32(message[head-4:]))
	message = append(message, make([]byte, length-4)...)
	_, err := io.ReadFull(r, message[head:])
	return message, err
}
