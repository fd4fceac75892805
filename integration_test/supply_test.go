package integration_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"
	kafkago "github.com/segmentio/kafka-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/integration_test/servers"
	"github.com/ackafter/ackafter/kafka"
	"github.com/ackafter/ackafter/rabbitmq"
	"github.com/ackafter/ackafter/sqs"
)

// supply is where the messages of a test come from, on one of the brokers.
type supply interface {
	// at says where a subscriber gets what is produced after the first call with its
	// name.
	at(subscriber string) place
	// produce adds a message with each of the bodies, and waits for the broker to
	// have them.
	produce(bodies ...string)
	// drained tells whether there were messages of a subscriber that are not acked,
	// as the broker knew it a moment ago.
	drained(subscriber string) bool
}

// supplies are the kinds that there are.
var supplies = map[string]func(*testing.T) supply{
	"kafka":    func(t *testing.T) supply { return newKafkaSupply(t, 4) },
	"rabbitmq": func(t *testing.T) supply { return newRabbitSupply(t, "quorum") },
	"sqs":      func(t *testing.T) supply { return newSQSSupply(t, false) },
	"sqs-fifo": func(t *testing.T) supply { return newSQSSupply(t, true) },
}

// onEach runs a test on each kind of supply, without some.
func onEach(t *testing.T, test func(t *testing.T, s supply), without ...string) {
	t.Helper()
	for _, kind := range slices.Sorted(maps.Keys(supplies)) {
		if slices.Contains(without, kind) {
			continue
		}
		t.Run(kind, func(t *testing.T) {
			t.Parallel()
			test(t, supplies[kind](t))
		})
	}
}

// place is where a subscriber receives. It can be handed to a child process.
type place struct {
	Broker    string
	Addresses []string
	Name      string // of the topic or the queue
	Group     string // Kafka's
	// Lease is for how long a message of SQS's is hidden that was received; 0: for 30 s.
	Lease time.Duration
}

const envPlace = "CHILD_PLACE"

// environment is the variable for a child process.
func (p place) environment() string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // cannot be: there are only strings and a number
	}
	return envPlace + "=" + string(text)
}

// parsePlace reads the value of the variable.
func parsePlace(text string) (p place, err error) {
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		return place{}, fmt.Errorf("%s: %w", envPlace, err)
	}
	return p, nil
}

// open begins to receive; log may be nil.
func (p place) open(ctx context.Context, log *slog.Logger) (broker.Source, error) {
	switch p.Broker {
	case "kafka":
		return kafka.Open(ctx, p.Addresses, p.Group, []string{p.Name}, &kafka.Config{SessionTimeout: 6 * time.Second, Logger: log})
	case "rabbitmq":
		return rabbitmq.Open(ctx, p.Addresses, p.Name, &rabbitmq.Config{Logger: log})
	case "sqs":
		return sqs.Open(ctx, p.Name, &sqs.Config{Endpoint: p.Addresses[0], VisibilityTimeout: p.Lease, Logger: log})
	}
	return nil, fmt.Errorf("there is no broker %q", p.Broker)
}

// kafkaSupply is a topic; each subscriber is a group.
type kafkaSupply struct{ *topic }

func newKafkaSupply(t *testing.T, partitions int) supply {
	t.Helper()
	return kafkaSupply{newTopic(t, servers.Kafka(t), partitions)}
}

func (s kafkaSupply) at(subscriber string) place {
	return place{Broker: "kafka", Addresses: s.brokers, Name: s.name, Group: s.group(subscriber)}
}

func (s kafkaSupply) group(subscriber string) string { return s.name + "-" + subscriber }

func (s kafkaSupply) produce(bodies ...string) {
	s.t.Helper()
	w := &kafkago.Writer{
		Addr: kafkago.TCP(s.brokers...), Topic: s.name, RequiredAcks: kafkago.RequireAll, BatchTimeout: 5 * time.Millisecond,
	}
	defer w.Close()
	ms := make([]kafkago.Message, len(bodies))
	for i, body := range bodies {
		// Repeats have keys, so lanes, of their own.
		ms[i] = kafkago.Message{Key: fmt.Appendf(nil, "k%d", i), Value: []byte(body)}
	}
	if err := w.WriteMessages(s.t.Context(), ms...); err != nil {
		s.t.Fatal(err)
	}
}

func (s kafkaSupply) drained(subscriber string) bool { return s.lag(s.group(subscriber)) == 0 }

// rabbitSupply is an exchange; each subscriber has a queue of its own.
type rabbitSupply struct {
	t        *testing.T
	server   *servers.RabbitMQServer
	kind     string
	exchange string
	ch       *amqp.Channel
	queues   map[string]*rabbitLine
}

func newRabbitSupply(t *testing.T, kind string) supply {
	t.Helper()
	s := &rabbitSupply{t: t, server: servers.RabbitMQ(t), kind: kind, exchange: servers.Name(t), queues: make(map[string]*rabbitLine)}
	s.ch = (&rabbitLine{T: t, server: s.server}).channel()
	if err := s.ch.ExchangeDeclare(s.exchange, "fanout", true, false, false, false, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.ch.ExchangeDelete(s.exchange, false, false) })
	return s
}

func (s *rabbitSupply) at(subscriber string) place {
	s.t.Helper()
	r := s.queues[subscriber]
	if r == nil {
		r = newRabbitQueue(s.t, s.server, s.kind, nil, nil)
		if err := r.ch.QueueBind(r.queue, "", s.exchange, false, nil); err != nil {
			s.t.Fatal(err)
		}
		s.queues[subscriber] = r
	}
	return place{Broker: "rabbitmq", Addresses: []string{s.server.URL}, Name: r.queue}
}

func (s *rabbitSupply) produce(bodies ...string) {
	s.t.Helper()
	publishTo(s.t, s.ch, s.exchange, "", bodies...)
}

func (s *rabbitSupply) drained(subscriber string) bool {
	messages, unacked := s.queues[subscriber].depth()
	return messages == 0 && unacked == 0
}

// sqsSupply is a set of queues, one for each subscriber, as a topic of SNS fills them.
type sqsSupply struct {
	t      *testing.T
	fifo   bool
	queues map[string]*sqsQueue
}

func newSQSSupply(t *testing.T, fifo bool) supply {
	t.Helper()
	return &sqsSupply{t: t, fifo: fifo, queues: make(map[string]*sqsQueue)}
}

func (s *sqsSupply) at(subscriber string) place {
	s.t.Helper()
	q := s.queues[subscriber]
	if q == nil {
		q = newSQSQueue(s.t, s.fifo, nil)
		s.queues[subscriber] = q
	}
	return place{Broker: "sqs", Addresses: []string{q.address}, Name: q.name}
}

func (s *sqsSupply) produce(bodies ...string) {
	s.t.Helper()
	for _, q := range s.queues {
		q.send(inGroups(bodies...)...) // Repeats have groups of their own.
	}
}

func (s *sqsSupply) drained(subscriber string) bool { return s.queues[subscriber].drained() }
