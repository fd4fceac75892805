package main

import (
	"context"
	"slices"

	"github.com/jackc/pgx/v5/pgxpool"
)

// workers is how many transactions each contestant has open at once.
const workers = 8

// consumerName is the consumer under which every contestant keeps its keys.
const consumerName = "billing"

// chain is a contestant: one or more passes over the topic on the same tables,
// which are empty before the first. A second pass therefore meets duplicates
// only.
type chain struct {
	keys   string // its table of keys
	passes []pass
}

// pass reads the topic once, as a new consumer group.
type pass struct {
	name     string // for -only and JSON
	title    string // for the table
	baseline string // the name of the pass that it is compared with
	consume  func(ctx context.Context, j *job) error
}

// job is what a pass is to consume, and where to.
type job struct {
	topic *topic
	group string
	pool  *pgxpool.Pool
	meter *meter
}

// chains are all contestants, in the order of the table.
func chains() []chain {
	return []chain{
		{keys: "processed_messages", passes: []pass{
			{name: "loop", title: "hand-written loop, 8 readers", baseline: "loop", consume: consumeByHand},
			{name: "loop-replay", title: "replay: hand-written loop", baseline: "loop-replay", consume: consumeByHand},
		}},
		{keys: "inbox", passes: []pass{
			{name: "single", title: "ackafter single, 8 workers", baseline: "loop", consume: consumeSingly(1)},
		}},
		{keys: "inbox", passes: []pass{
			{name: "batch", title: "ackafter batch, default size", baseline: "loop", consume: consumeSingly(0)},
			{name: "batch-replay", title: "replay: ackafter batch", baseline: "loop-replay", consume: consumeSingly(0)},
		}},
		{keys: "inbox", passes: []pass{
			{name: "bulk", title: "ackafter bulk, default size", baseline: "loop", consume: consumeInBulk(0)},
		}},
		{keys: "inbox", passes: []pass{
			{name: "bulk500", title: "ackafter bulk, size 500", baseline: "loop", consume: consumeInBulk(500)},
		}},
	}
}

// passNames returns the names of all passes.
func passNames(cs []chain) []string {
	var names []string
	for _, c := range cs {
		for _, p := range c.passes {
			names = append(names, p.name)
		}
	}
	return names
}

// choose leaves out the passes that nobody asked for, but for those that an
// asked one has to follow.
func choose(cs []chain, only []string) []chain {
	if len(only) == 0 {
		return cs
	}
	var chosen []chain
	for _, c := range cs {
		last := -1
		for i, p := range c.passes {
			if slices.Contains(only, p.name) {
				last = i
			}
		}
		if last >= 0 {
			chosen = append(chosen, chain{keys: c.keys, passes: c.passes[:last+1]})
		}
	}
	return chosen
}
