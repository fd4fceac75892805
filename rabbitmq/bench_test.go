package rabbitmq_test

import (
	"context"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/rabbitmq"
)

// fill puts n messages of 200 bytes into the queue.
func (l *lab) fill(n int) {
	l.Helper()
	ctx, cancel := context.WithTimeout(l.Context(), 5*time.Minute)
	defer cancel()
	body := make([]byte, 200)
	var last *amqp.DeferredConfirmation
	for range n {
		c, err := l.ch.PublishWithDeferredConfirmWithContext(ctx, "", l.queue, true, false, amqp.Publishing{Body: body})
		if err != nil {
			l.Fatal(err)
		}
		last = c
	}
	if ok, err := last.WaitContext(ctx); !ok {
		l.Fatalf("not confirmed: %v", err)
	}
}

// Receiving and acking against the client by itself, with an ack for each message.
func BenchmarkReceive(b *testing.B) {
	for _, kind := range kinds {
		b.Run(kind+"/source", func(b *testing.B) {
			l := newLab(b).declare(kind, nil)
			l.fill(b.N)
			s := l.open(nil)
			b.ResetTimer()
			for done := 0; done < b.N; {
				ds, err := s.Receive(b.Context(), 50)
				if err != nil {
					b.Fatal(err)
				}
				l.ack(ds...)
				done += len(ds)
			}
			l.close(s)
		})
		b.Run(kind+"/client", func(b *testing.B) {
			l := newLab(b).declare(kind, nil)
			l.fill(b.N)
			ch := l.channel()
			if err := ch.Qos(200, 0, false); err != nil {
				b.Fatal(err)
			}
			deliveries, err := ch.Consume(l.queue, "", false, false, false, false, nil)
			if err != nil {
				b.Fatal(err)
			}
			b.ResetTimer()
			for range b.N {
				d := <-deliveries
				if err := d.Ack(false); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkPublish(b *testing.B) {
	l := newLab(b).declare("quorum", nil)
	p := l.publisher("", &rabbitmq.PublisherConfig{RoutingKey: l.queue})
	b.ResetTimer()
	for range b.N {
		if err := p.Publish(b.Context(), benchMessage); err != nil {
			b.Fatal(err)
		}
	}
}

var benchMessage = &broker.Message{Body: make([]byte, 200)}
