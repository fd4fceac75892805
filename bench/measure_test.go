package main

import (
	"context"
	"strings"
	"testing"

	"github.com/ackafter/ackafter/integration_test/servers"
)

// A contestant that does not do its work, or does more, ends the run.
func TestCheckNotices(t *testing.T) {
	t.Parallel()
	s := addresses{postgres: servers.PostgresDurable(t), brokers: servers.Kafka(t)}
	// then does the work with a consumer that is fine, and spoils it.
	then := func(spoil func(ctx context.Context, j *job) error) func(context.Context, *job) error {
		return func(ctx context.Context, j *job) error {
			if err := consumeInBulk(0)(ctx, j); err != nil {
				return err
			}
			return spoil(ctx, j)
		}
	}
	sql := func(statement string) func(context.Context, *job) error {
		return then(func(ctx context.Context, j *job) error {
			_, err := j.pool.Exec(ctx, statement)
			return err
		})
	}
	for _, row := range []struct {
		name    string
		consume func(context.Context, *job) error
		want    string
	}{
		{"lost", sql(`delete from bookings where id = 1`), "399 bookings of 399 events, 400 keys"},
		{"twice", sql(`insert into bookings (order_id, event_type, amount, customer) select order_id, event_type, amount, customer from bookings limit 1`), "401 bookings of 400 events"},
		{"other", sql(`update bookings set order_id = 'x', event_type = 'y' where id < 3`), "400 bookings of 399 events"},
		{"key", sql(`delete from inbox where message_key = (select min(message_key) from inbox)`), "399 keys"},
		{"dead", sql(`insert into inbox_parked (consumer, message_key, state, reason) values ('x', 'x', 'dead', 'x')`), "1 dead letters"},
		{"offsets", then(func(ctx context.Context, j *job) error {
			j.topic.forget(ctx, j.group)
			return nil
		}), "the offsets of 400 messages were not committed"},
		{"message twice", then(func(_ context.Context, j *job) error {
			j.meter.done()
			return nil
		}), "401 messages were handled, 400 are in the topic"},
		{"nothing", func(context.Context, *job) error { return nil }, "0 bookings of 0 events, 0 keys"},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Parallel()
			cs := []chain{{keys: "inbox", passes: []pass{{name: row.name, title: row.name, baseline: row.name, consume: row.consume}}}}
			r, err := measure(t.Context(), s, options{events: minEvents, reps: 1}, cs, t.Output())
			if err == nil || !strings.Contains(err.Error(), row.want) || !strings.HasPrefix(err.Error(), row.name+", repetition 1: ") {
				t.Errorf("measure: %v, want %q", err, row.want)
			}
			if r != nil {
				t.Error("there is a report all the same")
			}
		})
	}
}
