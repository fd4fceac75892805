package rabbitmq

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/url"
	"slices"
	"strconv"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// address is one broker and how to log in there.
type address struct {
	host           string // "host:port"
	name           string // for the certificate
	tls            bool
	vhost          string
	user, password string
}

// parseAddresses reads AMQP URLs. Errors do not show them: they hold passwords.
func parseAddresses(urls []string) ([]address, error) {
	if len(urls) == 0 {
		return nil, errors.New("urls: there must be at least one")
	}
	addresses := make([]address, len(urls))
	for i, text := range urls {
		bad := func(rule string) error { return fmt.Errorf("urls[%d]: %s", i, rule) }
		u, err := url.Parse(text)
		if err != nil || u.Scheme != "amqp" && u.Scheme != "amqps" || u.Hostname() == "" || u.Fragment != "" || strings.Count(u.EscapedPath(), "/") > 1 {
			return nil, bad("must be amqp://user:password@host:port/vhost, or amqps://; what is special in a part must be written as %XX")
		}
		if u.RawQuery != "" {
			return nil, bad("must not have a query (?...): Config says what it could say")
		}
		uri, err := amqp.ParseURI(text)
		if err != nil || uri.Port < 1 || uri.Port > 65535 {
			return nil, bad("must be amqp://user:password@host:port/vhost, or amqps://; what is special in a part must be written as %XX")
		}
		addresses[i] = address{
			host: net.JoinHostPort(uri.Host, strconv.Itoa(uri.Port)), name: uri.Host, tls: uri.Scheme == "amqps",
			vhost: uri.Vhost, user: uri.Username, password: uri.Password,
		}
		if addresses[i].vhost != addresses[0].vhost {
			return nil, bad("must name the same virtual host as the first one")
		}
	}
	return addresses, nil
}

// shuffled returns the addresses in a random order, so that the clients of a
// cluster do not all go to one node.
func shuffled(addresses []address) []address {
	s := slices.Clone(addresses)
	rand.Shuffle(len(s), func(i, j int) { s[i], s[j] = s[j], s[i] })
	return s
}

func hosts(addresses []address) []string {
	names := make([]string, len(addresses))
	for i, a := range addresses {
		names[i] = a.host
	}
	return names
}
