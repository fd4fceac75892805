package sqs

import (
	"context"
	"encoding/json"
	"log/slog"
	"strconv"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
)

// fewReceives is below what a redrive policy is warned about. Failed attempts of a
// handler are made within one receive; but every restart, lost lease and return
// takes one more, and a policy must leave room for those.
const fewReceives = 5

// lookedAt are the attributes of a queue that say what SQS does by itself.
var lookedAt = []types.QueueAttributeName{
	types.QueueAttributeNameQueueArn, types.QueueAttributeNameRedrivePolicy, types.QueueAttributeNameMessageRetentionPeriod,
}

// redrive is what SQS does by itself with messages that nobody acks.
type redrive struct {
	target string        // ARN of the dead letter queue; empty: there is none
	most   int           // receives; 0: not known
	keeps  time.Duration // a message, acked or not; 0: not known
	odd    string        // a policy that cannot be read
}

// readRedrive reads the attributes of a queue.
func readRedrive(attributes map[string]string) redrive {
	var r redrive
	if n, err := strconv.Atoi(attributes[string(types.QueueAttributeNameMessageRetentionPeriod)]); err == nil && n > 0 {
		r.keeps = time.Duration(n) * time.Second
	}
	text := attributes[string(types.QueueAttributeNameRedrivePolicy)]
	if text == "" {
		return r
	}
	var policy struct {
		Target string          `json:"deadLetterTargetArn"`
		Most   json.RawMessage `json:"maxReceiveCount"` // a number, or a string of one
	}
	err := json.Unmarshal([]byte(text), &policy)
	most, bad := strconv.Atoi(strings.Trim(string(policy.Most), `"`))
	if err != nil || bad != nil || most < 1 || policy.Target == "" {
		r.odd = text
		return r
	}
	r.target, r.most = policy.Target, most
	return r
}

// tell says in one line what SQS does with messages that nobody acks.
func (r redrive) tell(ctx context.Context, log *slog.Logger, heartbeat bool) {
	if r.keeps > 0 {
		log = log.With("kept_for", r.keeps)
	}
	if r.target != "" {
		log = log.With("max_receive_count", r.most, "dead_letter_queue", r.target)
	}
	switch {
	case r.odd != "":
		log.WarnContext(ctx, "sqs: the queue has a redrive policy that cannot be read: SQS may move messages that are not acked", "redrive_policy", r.odd)
	case r.target == "":
		log.InfoContext(ctx, "sqs: the queue has no dead letter queue: a message comes again until it is acked or too old")
	case r.most < fewReceives:
		log.WarnContext(ctx, "sqs: SQS moves a message to its dead letter queue, unhandled, after very few receives: "+
			"every restart, lost lease and return counts as one; set maxReceiveCount of the queue to 5 at least, better to 10", "least", fewReceives)
	case !heartbeat:
		log.WarnContext(ctx, "sqs: without a heartbeat every retry that outlasts VisibilityTimeout is a receive, and SQS moves a message to its dead letter queue, unhandled, "+
			"after max_receive_count of them: set maxReceiveCount above the attempts of the consumer, or turn the heartbeat on")
	default:
		log.InfoContext(ctx, "sqs: SQS moves a message to its dead letter queue that was received so often and not acked; failed attempts of a handler do not count, restarts and lost leases do")
	}
}

// noteLast tells of messages that SQS will not deliver again.
func (s *Source) noteLast(entries []*entry) {
	if s.redrive.most == 0 {
		return
	}
	n := 0
	for _, e := range entries {
		if e.attempt < s.redrive.most {
			continue
		}
		n++
		event := LastReceiveEvent{ID: e.id, Receives: e.attempt, DeadLetterQueue: s.redrive.target}
		emit(s.cfg.Hooks, func(h OnLastReceive) { h.OnLastReceive(hookContext, event) })
	}
	if n > 0 {
		s.counters.lastReceives.Add(int64(n))
		s.log.Warn("sqs: messages were received for the last time: SQS moves those that are not acked now to the dead letter queue",
			"messages", n, "max_receive_count", s.redrive.most, "dead_letter_queue", s.redrive.target)
	}
}
