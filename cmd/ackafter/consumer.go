package main

import (
	"context"
	"errors"
	"fmt"
)

// consumer is what the database knows about one consumer.
type consumer struct{ name, definition string }

// consumers lists those that have run with this database, by name.
func (db *database) consumers(ctx context.Context) (_ []consumer, err error) {
	query := "select consumer, key_definition from " + db.table("inbox_consumers") + " order by consumer limit 50" //nolint:gosec // The name is quoted.
	rows, err := db.sql.QueryContext(ctx, query)
	if err != nil {
		return nil, fmt.Errorf("list the consumers: %w", err)
	}
	defer func() {
		if err = errors.Join(err, rows.Err(), rows.Close()); err != nil {
			err = fmt.Errorf("list the consumers: %w", err)
		}
	}()
	var all []consumer
	for rows.Next() {
		var c consumer
		if err := rows.Scan(&c.name, &c.definition); err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}
