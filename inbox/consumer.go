package inbox

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync/atomic"

	"github.com/ackafter/ackafter/keyfunc"
)

// Consumer handles the messages of one subscriber. Its name scopes the keys:
// two consumers of one event both handle it, two instances of one consumer
// handle it once. Make one with New or NewBulk. All methods may be called
// concurrently.
type Consumer[Tx any] struct {
	store  Store[Tx]
	parker Parker // nil when the store is none
	name   string
	key    keyfunc.Func
	run    BulkHandler[Tx]
	bulk   bool
	cfg    *Config

	// preparing holds a token while somebody prepares; ready is guarded by it.
	preparing chan struct{}
	ready     atomic.Bool
	advised   atomic.Bool // the first Run has looked at the settings

	vitals vitals
}

// New returns a consumer that runs handler for every message whose key is new.
// name, key and handler are required. A nil cfg means all defaults.
//
// It returns an error that names the argument or field and the rule, for an
// empty name, a missing or misconfigured key function, a nil handler, and a
// configuration that cannot work, such as more Workers than the store has
// connections. It does not touch the database: Run and Process do, and check
// the tables then.
func New[Tx any](store Store[Tx], name string, key keyfunc.Func, handler Handler[Tx], cfg *Config) (*Consumer[Tx], error) {
	if handler == nil {
		return nil, errors.New("inbox: handler: must not be nil (if it was made by Router or JSON: these return nil when their arguments are missing or cannot be used)")
	}
	one := func(ctx context.Context, tx Tx, ms []*Message) error { return handler(ctx, tx, ms[0]) }
	return newConsumer(store, name, key, one, false, cfg)
}

// NewBulk returns a consumer that runs handler once for all new messages of a
// batch. Everything else is as for New.
func NewBulk[Tx any](store Store[Tx], name string, key keyfunc.Func, handler BulkHandler[Tx], cfg *Config) (*Consumer[Tx], error) {
	if handler == nil {
		return nil, errors.New("inbox: handler: must not be nil")
	}
	return newConsumer(store, name, key, handler, true, cfg)
}

func newConsumer[Tx any](store Store[Tx], name string, key keyfunc.Func, run BulkHandler[Tx], bulk bool, cfg *Config) (*Consumer[Tx], error) {
	if isNil(store) {
		return nil, errors.New("inbox: store: must not be nil")
	}
	if err := validateName("consumer", name); err != nil {
		return nil, err
	}
	if isNil(key) {
		return nil, errors.New("inbox: key function: must not be nil")
	}
	if err := keyfunc.Validate(key); err != nil {
		return nil, fmt.Errorf("inbox: key function: %w", err)
	}
	poolSize := 0
	if p, ok := store.(PoolSizer); ok {
		poolSize = p.PoolSize()
	}
	c := cfg.withDefaults(poolSize)
	if err := c.validate(poolSize); err != nil {
		return nil, err
	}
	parker, _ := store.(Parker)
	return &Consumer[Tx]{
		store: store, parker: parker, name: name, key: key, run: run, bulk: bulk, cfg: c, preparing: make(chan struct{}, 1),
	}, nil
}

// isNil tells nil pointers in an interface from values, so that they are an
// error at New and not a panic later.
func isNil(v any) bool {
	if v == nil {
		return true
	}
	r := reflect.ValueOf(v)
	return (r.Kind() == reflect.Pointer || r.Kind() == reflect.Func || r.Kind() == reflect.Map) && r.IsNil()
}

// Name returns the consumer's name.
func (c *Consumer[Tx]) Name() string { return c.name }

// prepare checks the tables and registers the consumer, until that has
// succeeded once.
func (c *Consumer[Tx]) prepare(ctx context.Context) error {
	if c.ready.Load() {
		return nil
	}
	select {
	case c.preparing <- struct{}{}:
		defer func() { <-c.preparing }()
	case <-ctx.Done():
		return fmt.Errorf("inbox: consumer %q: check the store: %w", c.name, context.Cause(ctx))
	}
	if c.ready.Load() {
		return nil
	}
	if err := c.store.Check(ctx); err != nil {
		return fmt.Errorf("inbox: consumer %q: check the store: %w", c.name, err)
	}
	err := c.store.Register(ctx, Registration{
		Consumer:      c.name,
		KeyDefinition: c.key.Definition(),
		Replaces:      c.cfg.ReplacesKey,
		Retention:     c.cfg.Retention,
	})
	if err != nil {
		return fmt.Errorf("inbox: consumer %q: register: %w", c.name, err)
	}
	c.ready.Store(true)
	return nil
}

// isSetup tells errors of prepare that only a person can mend.
func isSetup(err error) bool {
	var definition *KeyDefinitionError
	return errors.Is(err, ErrNoSchema) || errors.Is(err, ErrSchemaVersion) || errors.As(err, &definition)
}
