package rabbitmq

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	amqp "github.com/rabbitmq/amqp091-go"
)

// Declare is what a source creates when it is missing, on every (re)connect. What
// exists with other properties is an error (ErrMismatch), and is not changed.
type Declare struct {
	// Type is the queue's. Default QueueQuorum.
	Type QueueType

	// Transient makes a classic queue that does not survive the broker's end.
	// Quorum queues and streams always survive. Default false.
	Transient bool

	// SingleActiveConsumer lets one consumer at a time have the queue, so that the
	// order is kept over several processes, see LaneQueue. Not for streams.
	SingleActiveConsumer bool

	// DeliveryLimit is how often a message of a quorum queue may come back before
	// the broker takes it out of the queue. Default: the broker's own (none before
	// RabbitMQ 4.0, 20 since). Negative: none (RabbitMQ 4.0 and newer). Every loss
	// of a connection counts, so a limit without a DeadLetterExchange drops
	// messages that nobody ever handled: Open warns of it.
	DeliveryLimit int

	// DeadLetterExchange gets what the broker takes out of the queue: what came
	// back too often, or lived too long. Empty: it is dropped.
	DeadLetterExchange string
	// DeadLetterRoutingKey replaces the routing key of dead letters. Empty: it
	// stays.
	DeadLetterRoutingKey string

	// Arguments are further ones of the queue ("x-max-length", ...); they must not
	// repeat what the fields above say. Values are those of an AMQP table: string,
	// bool, whole numbers, float64, time.Time, tables and lists of them.
	Arguments map[string]any

	// Exchange is created, and the queue is bound to it. Empty: none.
	Exchange string
	// ExchangeType is the exchange's: "direct", "fanout", "topic", "headers", or
	// what a plug-in adds. Default "topic".
	ExchangeType string
	// BindingKeys are what the queue is bound to Exchange with. Nil, with an
	// Exchange: one empty key.
	BindingKeys []string
}

// QueueType is the type of a queue.
type QueueType string

// The types.
const (
	// QueueQuorum is replicated, and counts deliveries.
	QueueQuorum QueueType = "quorum"
	// QueueClassic is on one node.
	QueueClassic QueueType = "classic"
	// QueueStream is a log. It needs Config.Stream.
	QueueStream QueueType = "stream"
)

func (d *Declare) clone() *Declare {
	if d == nil {
		return nil
	}
	c := *d
	c.Arguments = maps.Clone(d.Arguments)
	c.BindingKeys = slices.Clone(d.BindingKeys)
	if c.Type == "" {
		c.Type = QueueQuorum
	}
	if c.Exchange != "" && c.ExchangeType == "" {
		c.ExchangeType = amqp.ExchangeTopic
	}
	if c.Exchange != "" && c.BindingKeys == nil {
		c.BindingKeys = []string{""}
	}
	return &c
}

func (d *Declare) validate(stream bool) error {
	if d == nil {
		return nil
	}
	switch {
	case d.Type != QueueQuorum && d.Type != QueueClassic && d.Type != QueueStream:
		return configError("Declare.Type", fmt.Sprintf("%q", string(d.Type)), "is not one of QueueQuorum, QueueClassic, QueueStream")
	case (d.Type == QueueStream) != stream:
		return configError("Declare.Type", fmt.Sprintf("%q", string(d.Type)), "does not fit: Config.Stream is for QueueStream, and must be set for it")
	case d.Transient && d.Type != QueueClassic:
		return configError("Declare.Transient", true, "is for QueueClassic only")
	case d.SingleActiveConsumer && d.Type == QueueStream:
		return configError("Declare.SingleActiveConsumer", true, "is not for QueueStream")
	case d.DeliveryLimit != 0 && d.Type != QueueQuorum:
		return configError("Declare.DeliveryLimit", d.DeliveryLimit, "is for QueueQuorum only")
	case d.DeadLetterExchange != "" && d.Type == QueueStream:
		return configError("Declare.DeadLetterExchange", d.DeadLetterExchange, "is not for QueueStream")
	case d.DeadLetterRoutingKey != "" && d.DeadLetterExchange == "":
		return configError("Declare.DeadLetterRoutingKey", d.DeadLetterRoutingKey, "needs a DeadLetterExchange")
	case d.Exchange == "" && (d.ExchangeType != "" || len(d.BindingKeys) > 0):
		return configError("Declare.Exchange", `""`, "must be set with ExchangeType or BindingKeys")
	}
	for name := range d.Arguments {
		if _, ours := d.ownArguments()[name]; ours || name == "x-queue-type" {
			return configError("Declare.Arguments", name, "is said by a field of Declare")
		}
	}
	if err := amqp.Table(d.Arguments).Validate(); err != nil {
		return configError("Declare.Arguments", slices.Sorted(maps.Keys(d.Arguments)), err.Error())
	}
	return nil
}

// ownArguments are the queue's arguments that fields speak of.
func (d *Declare) ownArguments() amqp.Table {
	t := amqp.Table{"x-queue-type": string(d.Type)}
	if d.SingleActiveConsumer {
		t["x-single-active-consumer"] = true
	}
	if d.DeliveryLimit != 0 {
		t["x-delivery-limit"] = int64(max(d.DeliveryLimit, -1))
	}
	if d.DeadLetterExchange != "" {
		t["x-dead-letter-exchange"] = d.DeadLetterExchange
	}
	if d.DeadLetterRoutingKey != "" {
		t["x-dead-letter-routing-key"] = d.DeadLetterRoutingKey
	}
	return t
}

// warning says what is dangerous about a queue; empty: nothing.
func (d *Declare) warning() string {
	if d == nil || d.Type != QueueQuorum || d.DeadLetterExchange != "" || d.DeliveryLimit < 0 {
		return ""
	}
	if _, ok := d.Arguments["x-dead-letter-exchange"]; ok {
		return ""
	}
	return "the queue has no dead letter exchange: the broker drops a message that comes back more often than the delivery limit (20 since RabbitMQ 4.0, unless set)"
}

// declare creates what is missing, or makes sure that the queue is there. An error
// names the step.
func declare(ch *amqp.Channel, queue string, d *Declare) error {
	if d == nil {
		if _, err := ch.QueueDeclarePassive(queue, true, false, false, false, nil); err != nil {
			return fmt.Errorf("look for queue %q: %w", queue, err)
		}
		return nil
	}
	arguments := d.ownArguments()
	maps.Copy(arguments, d.Arguments)
	if _, err := ch.QueueDeclare(queue, !d.Transient, false, false, false, arguments); err != nil {
		return fmt.Errorf("declare queue %q: %w", queue, err)
	}
	if d.Exchange == "" {
		return nil
	}
	if !strings.HasPrefix(d.Exchange, "amq.") { // The broker's own exist.
		if err := ch.ExchangeDeclare(d.Exchange, d.ExchangeType, true, false, false, false, nil); err != nil {
			return fmt.Errorf("declare exchange %q: %w", d.Exchange, err)
		}
	}
	for _, key := range d.BindingKeys {
		if err := ch.QueueBind(queue, key, d.Exchange, false, nil); err != nil {
			return fmt.Errorf("bind queue %q to exchange %q: %w", queue, d.Exchange, err)
		}
	}
	return nil
}
