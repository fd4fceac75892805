package main

import (
	"context"
	"errors"

	"github.com/ackafter/ackafter/inbox"
)

// reader is a store that can only be looked at.
type reader interface {
	inbox.Inspector
	Check(ctx context.Context) error
}

// asKeeper returns store as a keeper.
func asKeeper(store reader) keeper {
	if k, ok := store.(keeper); ok {
		return k
	}
	return readOnly{store}
}

// readOnly is a store whose parked messages cannot be changed.
type readOnly struct{ reader }

var errReadOnly = errors.New("parked messages cannot be changed in this database")

func (readOnly) RetryParked(context.Context, []int64) (int, error) { return 0, errReadOnly }

func (readOnly) DiscardParked(context.Context, []int64, string) (int, error) { return 0, errReadOnly }

func (readOnly) GroupParked(context.Context, inbox.ParkedFilter) ([]inbox.ParkedGroup, error) {
	return nil, errReadOnly
}
