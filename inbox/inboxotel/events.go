package inboxotel

import (
	"context"
	"time"

	"github.com/ackafter/ackafter/inbox"
)

// place returns where a message came from, within the bound of places.
func (t *Telemetry) place(source string) (p place, partition string) {
	p, partition = placeOf(source)
	return t.labels.bounded(p), partition
}

// OnOutcome counts a message that is done with.
func (t *Telemetry) OnOutcome(ctx context.Context, e inbox.OutcomeEvent) {
	p, _ := t.place(e.Message.Source)
	t.events.consumedMessages.Add(ctx, 1, t.labels.of(set{consumer: e.Consumer, place: p, kind: ofMessage}))
	t.events.outcomes.Add(ctx, 1, t.labels.of(set{consumer: e.Consumer, place: p, kind: ofOutcome, a: string(e.Outcome)}))
	t.events.messageDuration.Record(ctx, e.Duration.Seconds(), t.labels.of(set{consumer: e.Consumer, kind: ofDuration, a: string(e.Outcome)}))
	if e.Reason != "" && (e.Outcome == inbox.Dead || e.Outcome == inbox.Conflict) {
		t.events.deadLetters.Add(ctx, 1, t.labels.of(set{consumer: e.Consumer, place: p, kind: ofDeath, a: string(e.Reason)}))
	}
}

// OnRetry counts a failed attempt that is followed by another one.
func (t *Telemetry) OnRetry(ctx context.Context, e inbox.RetryEvent) {
	counted := ""
	if e.Counted {
		counted = "true"
	}
	p, _ := t.place(e.Message.Source)
	t.events.retries.Add(ctx, 1, t.labels.of(set{consumer: e.Consumer, place: p, kind: ofRetry, a: errorType(e.Err), b: counted}))
}

// OnStaleAck counts an ack that was dropped.
func (t *Telemetry) OnStaleAck(ctx context.Context, e inbox.StaleAckEvent) {
	p, _ := t.place(e.Message.Source)
	t.events.staleAcks.Add(ctx, 1, t.labels.of(set{consumer: e.Consumer, place: p, kind: ofConsumer}))
}

// OnPause counts pauses and their time.
func (t *Telemetry) OnPause(ctx context.Context, e inbox.PauseEvent) {
	if e.Paused {
		t.events.pauses.Add(ctx, 1, t.labels.of(set{consumer: e.Consumer, kind: ofPause, a: errorType(e.Err)}))
		return
	}
	t.events.pauseTime.Add(ctx, e.For.Seconds(), t.labels.of(set{consumer: e.Consumer, kind: ofConsumer}))
}

// OnBatch times the parts of a transaction. A part that was not reached is left
// out.
func (t *Telemetry) OnBatch(ctx context.Context, e inbox.BatchEvent) {
	failed := errorType(e.Err)
	t.events.transactionMessages.Record(ctx, int64(e.Size), t.labels.of(set{consumer: e.Consumer, kind: ofTransaction, b: failed}))
	for _, part := range [...]struct {
		phase string
		took  time.Duration
	}{{"claim", e.Claim}, {"handlers", e.Handlers}, {"commit", e.Commit}} {
		if part.took > 0 {
			t.events.transactionDuration.Record(ctx, part.took.Seconds(), t.labels.of(set{consumer: e.Consumer, kind: ofTransaction, a: part.phase, b: failed}))
		}
	}
}
