package inboxpgx

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/inbox/internal/column"
)

// maxText is how much of a broker's text is kept in a column.
const maxText = 1024

// storedKey is a key as it is in the table.
type storedKey struct{ tenant, consumer, key string }

func toStored(k inbox.Key) storedKey {
	return storedKey{k.Tenant, k.Consumer, column.Key(k.MessageKey)}
}

// claimKey is the key of a claim as it is in the table. That of a message which comes
// from the parked table may be that of its row, in its stored form.
func claimKey(c *inbox.Claim) storedKey {
	k := toStored(c.Key)
	if c.Parked.ID != 0 {
		k.key = column.Stored(c.MessageKey)
	}
	return k
}

func compareKeys(a, b storedKey) int {
	return cmp.Or(cmp.Compare(a.tenant, b.tenant), cmp.Compare(a.consumer, b.consumer), cmp.Compare(a.key, b.key))
}

// claimSet is the claims of a batch and the order in which they are taken: all
// transactions take keys in the same order, so that they cannot deadlock.
type claimSet struct {
	claims []inbox.Claim
	keys   []storedKey
	order  []int // indexes of claims, by key
	index  map[storedKey]int
	fed    []int // indexes of claims that come from the parked table
}

func newClaimSet(claims []inbox.Claim) (*claimSet, error) {
	set := &claimSet{
		claims: claims,
		keys:   make([]storedKey, len(claims)),
		order:  make([]int, len(claims)),
		index:  make(map[storedKey]int, len(claims)),
	}
	for i := range claims {
		k := claimKey(&claims[i])
		if claims[i].Parked.ID != 0 {
			set.fed = append(set.fed, i)
		}
		if first, twice := set.index[k]; twice {
			if claims[i].Parked.ID != 0 || claims[first].Parked.ID != 0 {
				// A message and its duplicate, which has its long key in another form.
				return nil, fmt.Errorf("%w: claims %d and %d are of the same message", inbox.ErrInFlight, first, i)
			}
			return nil, fmt.Errorf("claims %d and %d have the same key: the keys of a batch must be distinct", first, i)
		}
		set.keys[i], set.order[i], set.index[k] = k, i, i
	}
	set.sort(set.order)
	return set, nil
}

// sort brings some of the claims into claiming order.
func (c *claimSet) sort(of []int) {
	slices.SortFunc(of, func(a, b int) int { return compareKeys(c.keys[a], c.keys[b]) })
}

// keyArgs are the parameters $1 to $3 of statements over keys.
func (c *claimSet) keyArgs(of []int) []any {
	tenants, consumers, keys := make([]string, len(of)), make([]string, len(of)), make([]string, len(of))
	for n, i := range of {
		tenants[n], consumers[n], keys[n] = c.keys[i].tenant, c.keys[i].consumer, c.keys[i].key
	}
	return []any{tenants, consumers, keys}
}

// fingerprintArgs are keyArgs and the fingerprints as $4.
func (c *claimSet) fingerprintArgs(of []int) []any {
	fingerprints := make([][]byte, len(of))
	for n, i := range of {
		fingerprints[n] = c.claims[i].Fingerprint
	}
	return append(c.keyArgs(of), fingerprints)
}

// oneArgs are the parameters $1 to $4 of statements over one key.
func (c *claimSet) oneArgs(i int) []any {
	k := c.keys[i]
	return []any{k.tenant, k.consumer, k.key, orEmpty(c.claims[i].Fingerprint)}
}

// claimArgs are the parameters of the claim statements.
func (c *claimSet) claimArgs(of []int) []any {
	n := len(of)
	ids, sources, positions, times := make([]string, n), make([]string, n), make([]*int64, n), make([]*time.Time, n)
	workers, traces, attempts, kept := make([]string, n), make([]string, n), make([]int32, n), make([]*int64, n)
	for j, i := range of {
		cl := &c.claims[i]
		ids[j], sources[j] = column.Text(cl.MessageID, maxText), column.Text(cl.Source, maxText)
		workers[j], traces[j] = column.Text(cl.Worker, maxText), column.Text(cl.TraceID, maxText)
		positions[j], times[j] = toPosition(cl.Position), toTime(cl.EventTime)
		attempts[j], kept[j] = toInt32(cl.Attempt), microseconds(cl.Retention)
	}
	return append(c.fingerprintArgs(of), ids, sources, positions, times, workers, traces, attempts, kept)
}

func toInt32(n int) int32 {
	return int32(max(math.MinInt32, min(n, math.MaxInt32))) //nolint:gosec // In range by min and max.
}

// microseconds returns a retention as it is stored; nil for ever.
func microseconds(d time.Duration) *int64 {
	if d <= 0 {
		return nil
	}
	return new(max(d.Microseconds(), 1))
}

// The years that a timestamptz holds reach further, but nothing true does.
const minYear, maxYear = -4000, 100_000

// toTime returns t as it is stored; nil for an unknown or absurd time.
func toTime(t time.Time) *time.Time {
	if t.IsZero() || t.Year() < minYear || t.Year() > maxYear {
		return nil
	}
	return &t
}
