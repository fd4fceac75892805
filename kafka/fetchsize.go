package kafka

// fetchSize decides how much to ask for. What comes takes more memory than it
// took on the wire, by compression and by what goes with every record; how much
// more is learned from one fetch to the next, so that the buffer's bound holds.
type fetchSize struct {
	most   int     // what a fetch asks for at most, on the wire
	share  int     // what the partition may hold, in memory
	expand float64 // bytes in memory for a byte on the wire
}

// guessExpand is the factor before anything has come.
const guessExpand = 4

// ask returns how much to ask for, and how much memory that will take.
func (s *fetchSize) ask() (wire, memory int) {
	wire = min(s.most, int(float64(s.share)/2/s.expand))
	wire = max(wire, minFetchBytes)
	return wire, int(float64(wire) * s.expand)
}

// learn notes what came. The factor rises at once and falls slowly: asking for
// too little costs a round trip, for too much memory.
func (s *fetchSize) learn(wire, memory int) {
	if wire == 0 {
		return
	}
	now := max(float64(memory)/float64(wire), 1)
	if now < s.expand {
		now = s.expand*0.9 + now*0.1
	}
	s.expand = now
}
