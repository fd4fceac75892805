package inboxpgx

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/ackafter/ackafter/inbox"
	"github.com/ackafter/ackafter/migrations"
)

// Check implements inbox.Store.
func (s *Store) Check(ctx context.Context) error {
	var have int
	err := s.pool.QueryRow(ctx, s.sql.version).Scan(&have)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		// The table is there and empty: version 0.
	case err != nil:
		return fmt.Errorf("inboxpgx: check: %w", withoutSchema(markedByPool(err)))
	}
	if have != migrations.Version {
		return fmt.Errorf("inboxpgx: check: %w", &inbox.SchemaVersionError{Have: have, Need: migrations.Version})
	}
	return nil
}

// Register implements inbox.Store.
func (s *Store) Register(ctx context.Context, r inbox.Registration) error {
	if err := s.register(ctx, r); err != nil {
		return fmt.Errorf("inboxpgx: register consumer %q: %w", r.Consumer, err)
	}
	return nil
}

func (s *Store) register(ctx context.Context, r inbox.Registration) error {
	var replaces *string // Null equals nothing.
	if r.Replaces != "" {
		replaces = &r.Replaces
	}
	var err error
	for range maxBegins {
		var ok bool
		err = s.pool.QueryRow(ctx, s.sql.register, r.Consumer, r.KeyDefinition, microseconds(r.Retention), replaces).Scan(&ok)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, pgx.ErrNoRows):
			// Another definition is stored, unless the row has just been removed.
			def := &inbox.KeyDefinitionError{Consumer: r.Consumer, Now: r.KeyDefinition}
			if err = s.pool.QueryRow(ctx, s.sql.definition, r.Consumer).Scan(&def.Stored); err == nil {
				return def
			}
		}
		if !errors.Is(err, pgx.ErrNoRows) && state(err) != stateSerialization && state(err) != stateDeadlock {
			break
		}
	}
	return withoutSchema(markedByPool(err))
}
