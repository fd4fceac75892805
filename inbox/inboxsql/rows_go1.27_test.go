//go:build go1.27

package inboxsql_test

import (
	"slices"
	"testing"
)

// From Go 1.27 on drivers scan into the destination themselves.
func TestArrays(t *testing.T) {
	t.Parallel()
	store, _ := postgresStore(t)
	b := begin(t, store, "k")
	tx := start(t, b, 0)
	var got []int64
	if err := tx.QueryRowContext(t.Context(), "select '{1,2,3}'::bigint[]").Scan(&got); err != nil || !slices.Equal(got, []int64{1, 2, 3}) {
		t.Errorf("an array: %v, %v", got, err)
	}
	finish(t, b, 0)
}
