//go:build race

package keyfunc

// raceEnabled: the race detector makes sync.Pool drop items at random.
const raceEnabled = true
