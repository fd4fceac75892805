package kafka

import "testing"

func TestFetchSize(t *testing.T) {
	t.Parallel()
	s := fetchSize{most: 1 << 20, share: 4 << 20, expand: guessExpand}
	if wire, memory := s.ask(); wire != 1<<19 || memory != 2<<20 {
		t.Errorf("asks for %d, expects %d", wire, memory)
	}
	s.learn(1000, 100_000) // packs well
	if wire, memory := s.ask(); wire != (2<<20)/100 || memory > 2<<20 {
		t.Errorf("factor 100: asks for %d, expects %d", wire, memory)
	}
	s.learn(1000, 10_000_000)
	if wire, _ := s.ask(); wire != minFetchBytes {
		t.Errorf("factor 10,000: asks for %d", wire)
	}
	s.learn(0, 0)
	for range 200 {
		s.learn(1000, 500) // a fetch from the middle of a batch
	}
	if wire, memory := s.ask(); wire != 1<<20 || memory < wire || memory > wire*11/10 {
		t.Errorf("factor 1: asks for %d, expects %d", wire, memory)
	}
}
