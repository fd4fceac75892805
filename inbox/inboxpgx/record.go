package inboxpgx

import (
	"time"

	"github.com/ackafter/ackafter/broker"
	"github.com/ackafter/ackafter/inbox"
)

// recordScan reads one row of recordColumns.
type recordScan struct {
	record               inbox.Record
	position             *int64
	eventTime, expiresAt *time.Time
}

func (r *recordScan) dest() []any {
	x := &r.record
	return []any{
		&x.Tenant, &x.Consumer, &x.MessageKey, &x.Status, &x.Fingerprint, &x.MessageID, &x.Source, &r.position,
		&r.eventTime, &x.Worker, &x.TraceID, &x.Attempts, &x.Result, &x.ProcessedAt, &r.expiresAt,
	}
}

// done fills in what needs more than a scan; key is the key that was asked for,
// since long ones are stored in another form, or "" to leave what is stored.
func (r *recordScan) done(key string) *inbox.Record {
	x := &r.record
	x.Position, x.EventTime, x.ExpiresAt, x.ProcessedAt = fromPosition(r.position), fromTime(r.eventTime), fromTime(r.expiresAt), x.ProcessedAt.UTC()
	if key != "" {
		x.MessageKey = key
	}
	return x
}

func toPosition(p broker.Position) *int64 {
	if !p.Known {
		return nil
	}
	return &p.Offset
}

func fromPosition(n *int64) broker.Position {
	if n == nil {
		return broker.Position{}
	}
	return broker.At(*n)
}

func fromTime(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}
