package brokertest

// rule is one thing that every source must do. Its number never changes.
type rule struct {
	name  string
	needs []Feature
	check func(*rig)
}

// rules in the order of the contract: receiving, settling, losing, closing,
// lanes, what a message carries, several sources.
var rules = []rule{
	{"01-receive-limit", nil, receiveLimit},
	{"02-receive-blocks-while-empty", nil, receiveBlocksWhileEmpty},
	{"03-receive-does-not-linger", nil, receiveDoesNotLinger},
	{"04-receive-ends-with-ctx", nil, receiveEndsWithCtx},
	{"05-receive-ctx-loses-nothing", nil, receiveCtxLosesNothing},
	{"06-receive-delivers-once", nil, receiveDeliversOnce},
	{"07-published-before-open", nil, publishedBeforeOpen},

	{"10-ack-is-final", nil, ackIsFinal},
	{"11-nack-comes-again", nil, nackComesAgain},
	{"12-nack-delay", []Feature{NackDelay}, nackDelay},
	{"13-ack-twice", nil, ackTwice},
	{"14-settled-delivery-is-not-lost", nil, settledDeliveryIsNotLost},
	{"15-acks-out-of-order", nil, acksOutOfOrder},
	{"16-acks-out-of-order-crash", []Feature{Crash}, acksOutOfOrderCrash},
	{"17-selective-ack", []Feature{SelectiveAck}, selectiveAck},
	{"18-committed-never-passes", []Feature{Committed, Positions}, committedNeverPasses},
	{"19-concurrent-acks", nil, concurrentAcks},

	{"20-lost-comes-again", []Feature{Lose}, lostComesAgain},
	{"21-ack-after-loss", []Feature{Lose}, ackAfterLoss},
	{"22-crash-comes-again", []Feature{Crash}, crashComesAgain},
	{"23-idle-keeps-deliveries", []Feature{IdleMembership}, idleKeepsDeliveries},
	{"24-cut-is-survived", []Feature{Cut}, cutIsSurvived},
	{"25-recall-asks-first", []Feature{Recall}, recallAsksFirst},

	{"30-receive-after-close", nil, receiveAfterClose},
	{"31-close-while-receiving", nil, closeWhileReceiving},
	{"32-close-twice", nil, closeTwice},
	{"33-close-is-bounded", nil, closeIsBounded},
	{"34-close-flushes-acks", nil, closeFlushesAcks},
	{"35-close-gives-back", nil, closeGivesBack},
	{"36-close-ends-goroutines", nil, closeEndsGoroutines},
	{"37-close-is-bounded-when-cut", []Feature{Cut}, closeIsBoundedWhenCut},
	{"38-health", nil, healthUntilClosed},

	{"40-lane-order", []Feature{Lanes}, laneOrder},
	{"41-lane-order-after-nack", []Feature{Lanes}, laneOrderAfterNack},
	{"42-lane-order-after-close", []Feature{Lanes}, laneOrderAfterClose},
	{"43-lane-order-after-loss", []Feature{Lanes, Lose}, laneOrderAfterLoss},
	{"44-lane-waits-for-delayed-nack", []Feature{Lanes, NackDelay}, laneWaitsForDelayedNack},
	{"45-lane-waits-for-recalled", []Feature{Lanes, Recall}, laneWaitsForRecalled},

	{"50-body", nil, bodySurvives},
	{"51-nil-body", []Feature{NilBody, EmptyBody}, nilBodySurvives},
	{"52-key", []Feature{Keys}, keySurvives},
	{"53-nil-key", []Feature{Keys, NilKey}, nilKeySurvives},
	{"54-headers", []Feature{Headers}, headersSurvive},
	{"55-repeated-headers", []Feature{Headers, RepeatedHeaders}, repeatedHeadersSurvive},
	{"56-time", []Feature{Times}, timeSurvives},
	{"57-positions", []Feature{Positions}, positionsGrow},
	{"58-attempts", []Feature{Attempts}, attemptsCount},
	{"59-messages-stay", nil, messagesStay},

	{"60-sources-compete", []Feature{Competing}, sourcesCompete},
	{"61-lane-has-one-source", []Feature{Competing, Lanes}, laneHasOneSource},
	{"62-closed-source-hands-over", []Feature{Competing}, closedSourceHandsOver},
}
