package integration_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	toxiclient "github.com/Shopify/toxiproxy/v2/client"
	"github.com/rs/zerolog"
)

// proxies is a bad network between a client and some servers: toxiproxy, in a
// process of its own, so that what it keeps of broken connections is not taken
// for a leak of the client, and so that it can be frozen as a whole.
type proxies struct {
	command *exec.Cmd
	input   io.Closer // the process ends when this is closed
	dials   atomic.Int64
	proxies map[string]*toxiclient.Proxy // by the server's address
	routes  map[string]string            // where they listen
}

// newProxies starts a proxy for each address.
func newProxies(t *testing.T, addresses ...string) *proxies {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &proxies{
		command: exec.Command(self), //nolint:noctx // close ends it
		proxies: make(map[string]*toxiclient.Proxy), routes: make(map[string]string),
	}
	p.command.Env = append(os.Environ(), "ACKAFTER_CHILD=toxiproxy")
	input, err := p.command.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.input = input
	output, err := p.command.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.command.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	api, err := bufio.NewReader(output).ReadString('\n')
	if err != nil {
		t.Fatalf("toxiproxy did not start: %v", err)
	}
	c := toxiclient.NewClient(strings.TrimSpace(api))
	for _, address := range addresses {
		proxy, err := c.CreateProxy(address, "127.0.0.1:0", address)
		if err != nil {
			t.Fatal(err)
		}
		p.proxies[address], p.routes[address] = proxy, proxy.Listen
	}
	return p
}

// close ends the process and all connections through it.
func (p *proxies) close() {
	_ = p.command.Process.Kill()
	_ = p.input.Close()
	_ = p.command.Wait()
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
}

// dial connects to a server through its proxy.
func (p *proxies) dial(ctx context.Context, network, address string) (net.Conn, error) {
	p.dials.Add(1)
	route, ok := p.routes[address]
	if !ok {
		return nil, fmt.Errorf("there is no way to %s", address)
	}
	return new(net.Dialer).DialContext(ctx, network, route)
}

// poison makes all connections to some servers sick, those that are there too,
// and returns how to cure them.
func (p *proxies) poison(kind string, attributes toxiclient.Attributes, addresses []string) (cure func() error, err error) {
	for _, address := range addresses {
		for _, way := range []string{"upstream", "downstream"} {
			if _, err := p.proxies[address].AddToxic(way, kind, way, 1, attributes); err != nil {
				return nil, fmt.Errorf("%s %s: %w", kind, address, err)
			}
		}
	}
	return func() error {
		for _, address := range addresses {
			for _, way := range []string{"upstream", "downstream"} {
				if err := p.proxies[address].RemoveToxic(way); err != nil {
					return fmt.Errorf("end of %s %s: %w", kind, address, err)
				}
			}
		}
		return nil
	}, nil
}

// refuse breaks the connections to some servers and takes no new ones.
func (p *proxies) refuse(addresses []string) (cure func() error, err error) {
	for _, address := range addresses {
		if err := p.proxies[address].Disable(); err != nil {
			return nil, err
		}
	}
	return func() error {
		for _, address := range addresses {
			if err := p.proxies[address].Enable(); err != nil {
				return err
			}
		}
		return nil
	}, nil
}

// freeze stops the process: nothing arrives and nothing breaks, and in the end all
// that was sent arrives late.
func (p *proxies) freeze([]string) (cure func() error, err error) {
	return func() error { return p.command.Process.Signal(syscall.SIGCONT) }, p.command.Process.Signal(syscall.SIGSTOP)
}

// toxiproxyChild is the main function of the process: it prints the address of
// its API and serves until its input ends.
func toxiproxyChild(ctx context.Context) error {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	server := &http.Server{Handler: api.Routes(), ReadHeaderTimeout: time.Minute}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	if _, err := fmt.Fprintln(os.Stdout, listener.Addr()); err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	_ = server.Close()
	<-failed
	return nil
}
