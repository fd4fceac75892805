package rabbitmq

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	amqp "github.com/rabbitmq/amqp091-go"

	"github.com/ackafter/ackafter/broker"
)

// case R1, case R4 (a): a delivery is acked at most once; when the broker closes the
// channel anyway, only the channel is opened anew, and all messages end with one
// effect.
func TestChannelDeath(t *testing.T) {
	t.Parallel()
	for _, kind := range []QueueType{QueueClassic, QueueQuorum} {
		t.Run(string(kind), func(t *testing.T) {
			t.Parallel()
			name := newName("death")
			ch := client(t, serverURL(t))
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			s, err := Open(ctx, []string{serverURL(t)}, name, &Config{Declare: &Declare{Type: kind}, Logger: quiet()})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := s.Close(context.WithoutCancel(ctx)); err != nil {
					t.Error(err)
				}
				_, _ = ch.QueueDelete(name, false, false, false)
			}()
			for i := range 3 {
				if err := ch.PublishWithContext(ctx, "", name, true, false, amqp.Publishing{Body: fmt.Append(nil, i)}); err != nil {
					t.Fatal(err)
				}
			}
			effects := map[string]int{}
			receive := func(n int) (got []*broker.Delivery) {
				for len(got) < n {
					ds, err := s.Receive(ctx, n-len(got))
					if err != nil {
						t.Fatal(err)
					}
					got = append(got, ds...)
				}
				return got
			}
			first := receive(3)
			for range 2 {
				err := first[0].Ack(ctx)
				if err == nil {
					effects[string(first[0].Message.Body)]++
				} else if !errors.Is(err, broker.ErrSettled) {
					t.Errorf("second ack: %v", err)
				}
			}
			before := s.current()
			for s.Stats().Acks < 1 {
				<-time.After(time.Millisecond)
			}
			// What a double ack does.
			if err := before.ch.Ack(first[0].Tag.(*entry).tag, false); err != nil {
				t.Fatal(err)
			}
			<-first[1].Context().Done()
			began := time.Now()
			for _, d := range receive(2) {
				if err := d.Ack(ctx); err != nil {
					t.Error(err)
				}
				effects[string(d.Message.Body)]++
			}
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("the channel was open again after %v", took)
			}
			after := s.current()
			if after.conn != before.conn || after.ch == before.ch {
				t.Error("want another channel on the same connection")
			}
			for i := range 3 {
				if n := effects[fmt.Sprint(i)]; n != 1 {
					t.Errorf("message %d has %d effects", i, n)
				}
			}
		})
	}
}
