package sqs

import (
	"fmt"
	"net/url"
	"strings"
)

// maxName is how long the name of a queue may be.
const maxName = 80

// fifoSuffix ends the name of every FIFO queue, and of no other one.
const fifoSuffix = ".fifo"

// address is what a queue's name, URL or ARN says.
type address struct {
	name     string
	url      string // empty: has to be asked for
	region   string // empty: not said
	account  string // empty: the caller's
	endpoint string // of a URL that is not AWS's public one; empty: AWS's of the region
}

func (a address) fifo() bool { return strings.HasSuffix(a.name, fifoSuffix) }

// parseQueue takes a name, a URL or an ARN apart.
func parseQueue(queue string) (address, error) {
	switch {
	case strings.HasPrefix(queue, "arn:"):
		return parseARN(queue)
	case strings.Contains(queue, "://"):
		return parseURL(queue)
	}
	if err := checkName(queue); err != nil {
		return address{}, fmt.Errorf("%w: queue %q: %w", ErrMalformed, queue, err)
	}
	return address{name: queue}, nil
}

// parseARN takes "arn:PARTITION:sqs:REGION:ACCOUNT:NAME" apart.
func parseARN(arn string) (address, error) {
	parts := strings.Split(arn, ":")
	bad := func(why string) (address, error) {
		return address{}, fmt.Errorf("%w: ARN %q: %s; it must be arn:PARTITION:sqs:REGION:ACCOUNT:NAME", ErrMalformed, arn, why)
	}
	switch {
	case len(parts) != 6:
		return bad(fmt.Sprintf("has %d parts, not 6", len(parts)))
	case parts[1] == "":
		return bad("names no partition")
	case parts[2] != "sqs":
		return bad(fmt.Sprintf("is of the service %q, not sqs", parts[2]))
	case parts[3] == "":
		return bad("names no region")
	case !isRegion(parts[3]):
		return bad("the region " + regionRule)
	case len(parts[4]) != 12 || strings.Trim(parts[4], "0123456789") != "":
		return bad("names no account of 12 digits")
	}
	if err := checkName(parts[5]); err != nil {
		return bad("the name " + err.Error())
	}
	return address{name: parts[5], region: parts[3], account: parts[4]}, nil
}

// parseURL takes "https://sqs.REGION.amazonaws.com/ACCOUNT/NAME" apart; another host
// says nothing about the region, and is where the requests go.
func parseURL(text string) (address, error) {
	bad := func(why string) (address, error) {
		return address{}, fmt.Errorf("%w: URL of a queue: %s; it must be https://HOST/ACCOUNT/NAME", ErrMalformed, why)
	}
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "https" && u.Scheme != "http" || u.Host == "" {
		return bad("is not an http(s) URL with a host")
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return bad("has more than a host and a path")
	}
	parts := strings.Split(strings.Trim(u.Path, "/"), "/")
	if len(parts) < 2 {
		return bad("has no account or no name in its path")
	}
	name := parts[len(parts)-1]
	if err := checkName(name); err != nil {
		return bad("the name " + err.Error())
	}
	a := address{name: name, url: text}
	switch labels := strings.Split(u.Hostname(), "."); {
	case len(labels) >= 4 && labels[0] == "sqs" && labels[2] == "amazonaws":
		a.region = labels[1]
	case len(labels) >= 4 && labels[1] == "queue" && labels[2] == "amazonaws":
		a.region = labels[0] // an old form
	default:
		a.endpoint = u.Scheme + "://" + u.Host
	}
	return a, nil
}

// regionRule is what isRegion checks.
const regionRule = "must be the name of a region, of letters, digits and -"

// isRegion tells whether a text can be the name of a region: it becomes a part of a
// host's name.
func isRegion(region string) bool {
	return len(region) <= 63 && strings.Trim(region, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") == ""
}

// checkName tells what is wrong with the name of a queue.
func checkName(name string) error {
	base := strings.TrimSuffix(name, fifoSuffix)
	switch {
	case base == "":
		return fmt.Errorf("must not be empty")
	case len(name) > maxName:
		return fmt.Errorf("has %d characters, at most %d are allowed", len(name), maxName)
	}
	for _, c := range base {
		allowed := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
		if !allowed {
			return fmt.Errorf("has %q: letters, digits, - and _ are allowed, and .fifo at the end", c)
		}
	}
	return nil
}
