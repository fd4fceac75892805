package inboxpgx

import (
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// rows are a run's rows: their error is noted, and they are closed with the run.
type rows struct {
	run  *run
	in   pgx.Rows // nil when err is set from the start
	sql  string
	args []any
	own  bool  // of a statement with these arguments, not of a pgx.Batch
	err  error // of the run itself: over, or in use

	// results are what the rows came with, when the savepoint travelled in
	// front of them.
	results pgx.BatchResults
}

var _ pgx.Rows = (*rows)(nil)

// use takes the connection for one call on the rows.
func (s *rows) use() bool {
	if s.in == nil {
		return false
	}
	if err := s.run.enter(); err != nil {
		if s.err == nil {
			s.err = err
		}
		return false
	}
	return true
}

// Close implements pgx.Rows.
func (s *rows) Close() {
	if s.use() {
		s.finish()
		s.run.mu.Unlock()
	}
}

// finish closes the rows; the caller has the connection.
func (s *rows) finish() {
	s.in.Close()
	s.noted()
}

func (s *rows) noted() {
	if s.results != nil {
		_ = s.results.Close() // Its error is that of the rows.
		s.results = nil
	}
	if s.own && s.in.Err() == nil {
		s.run.saw(s.sql, s.args)
	}
	_ = s.run.note(s.sql, s.in.Err())
	if s.run.open == closer(s) {
		s.run.open = nil
	}
}

// Err implements pgx.Rows.
func (s *rows) Err() error {
	if s.in == nil || s.err != nil {
		return s.err
	}
	return marked(s.run.conn, s.in.Err())
}

// CommandTag implements pgx.Rows.
func (s *rows) CommandTag() pgconn.CommandTag {
	if s.in == nil {
		return pgconn.CommandTag{}
	}
	return s.in.CommandTag()
}

// FieldDescriptions implements pgx.Rows.
func (s *rows) FieldDescriptions() []pgconn.FieldDescription {
	if s.in == nil {
		return nil
	}
	return s.in.FieldDescriptions()
}

// Next implements pgx.Rows.
func (s *rows) Next() bool {
	if !s.use() {
		return false
	}
	defer s.run.mu.Unlock()
	if s.in.Next() {
		return true
	}
	s.noted()
	return false
}

// Scan implements pgx.Rows.
func (s *rows) Scan(dest ...any) error {
	if !s.use() {
		return s.Err()
	}
	defer s.run.mu.Unlock()
	err := s.in.Scan(dest...)
	if err != nil {
		s.noted() // pgx has closed the rows.
	}
	return err
}

// Values implements pgx.Rows.
func (s *rows) Values() ([]any, error) {
	if !s.use() {
		return nil, s.Err()
	}
	defer s.run.mu.Unlock()
	return s.in.Values()
}

// RawValues implements pgx.Rows.
func (s *rows) RawValues() [][]byte {
	if !s.use() {
		return nil
	}
	defer s.run.mu.Unlock()
	return s.in.RawValues()
}

// Conn implements pgx.Rows.
func (s *rows) Conn() *pgx.Conn { return s.run.Conn() }

// TypeMap implements pgx.Rows.
func (s *rows) TypeMap() *pgtype.Map {
	if s.in == nil {
		return nil
	}
	return s.in.TypeMap()
}

// row is the answer of QueryRow.
type row struct{ rows pgx.Rows }

// Scan implements pgx.Row.
func (r row) Scan(dest ...any) error {
	defer r.rows.Close()
	for _, d := range dest {
		if _, ok := d.(*pgtype.DriverBytes); ok {
			return errors.New("inboxpgx: *pgtype.DriverBytes is only valid until the row is closed: it cannot be scanned from QueryRow")
		}
	}
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}

// batchResults are the results of a run's pgx.Batch.
type batchResults struct {
	run   *run
	in    pgx.BatchResults
	batch *pgx.Batch
	at    int // the query whose answer is being read
	read  int // how many answers were asked for
}

var _ pgx.BatchResults = (*batchResults)(nil)

// newBatchResults prepares the batch so that each answer is known by its query.
func newBatchResults(r *run, b *pgx.Batch) *batchResults {
	s := &batchResults{run: r, batch: b}
	for i, q := range b.QueuedQueries {
		fn := q.Fn
		q.Fn = func(br pgx.BatchResults) error {
			s.at = i
			if fn != nil {
				return fn(br)
			}
			_, err := br.Exec()
			return err
		}
	}
	return s
}

// next moves on to the answer of the next query.
func (s *batchResults) next() {
	s.at = s.read
	s.read++
}

func (s *batchResults) sql(err error) string {
	var early pgx.ErrPreprocessingBatch
	switch {
	case errors.As(err, &early):
		return early.SQL()
	case s.at < len(s.batch.QueuedQueries):
		return s.batch.QueuedQueries[s.at].SQL
	}
	return "batch"
}

// Exec implements pgx.BatchResults.
func (s *batchResults) Exec() (pgconn.CommandTag, error) {
	if err := s.run.enter(); err != nil {
		return pgconn.CommandTag{}, err
	}
	s.next()
	tag, err := s.in.Exec()
	return tag, s.run.leave(s.sql(err), err)
}

// Query implements pgx.BatchResults.
func (s *batchResults) Query() (pgx.Rows, error) {
	if err := s.run.enter(); err != nil {
		return &rows{run: s.run, err: err}, err
	}
	s.next()
	in, err := s.in.Query()
	sql := s.sql(err)
	return &rows{run: s.run, in: in, sql: sql}, s.run.leave(sql, err)
}

// QueryRow implements pgx.BatchResults.
func (s *batchResults) QueryRow() pgx.Row {
	out, _ := s.Query()
	return row{out}
}

// Close implements pgx.BatchResults.
func (s *batchResults) Close() error {
	if err := s.run.enter(); err != nil {
		return err
	}
	defer s.run.mu.Unlock()
	return s.done()
}

// Tx implements pgx.BatchResults: a batch of a run begins no transaction.
func (s *batchResults) Tx() pgx.Tx { return nil }

// finish closes the results; the caller has the connection.
func (s *batchResults) finish() { _ = s.done() }

func (s *batchResults) done() error {
	err := s.in.Close()
	if s.run.open == closer(s) {
		s.run.open = nil
	}
	return s.run.note(s.sql(err), err)
}
