package inboxpgx

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// reader reads the answers of one round trip in order and keeps the first
// error; after it, everything is skipped.
type reader struct {
	results pgx.BatchResults
	err     error
}

func newReader(results pgx.BatchResults) *reader { return &reader{results: results} }

// exec reads the answer to a statement without rows that matter.
func (r *reader) exec() pgconn.CommandTag {
	if r.err != nil {
		return pgconn.CommandTag{}
	}
	tag, err := r.results.Exec()
	r.err = err
	return tag
}

// row reads the one row of an answer.
func (r *reader) row(dest ...any) {
	if r.err == nil {
		r.err = r.results.QueryRow().Scan(dest...)
	}
}

// rows reads the rows of an answer; each is called after a row was scanned into
// dest.
func (r *reader) rows(each func(), dest ...any) {
	if r.err != nil {
		return
	}
	rows, err := r.results.Query()
	if err != nil {
		r.err = err
		return
	}
	_, r.err = pgx.ForEachRow(rows, dest, func() error { each(); return nil })
}

// skip ends the reading of answers that nobody waits for any more.
func (r *reader) skip() { _ = r.results.Close() }

// close skips the rest and returns the first error. It may be called again.
func (r *reader) close() error {
	err := r.results.Close()
	if r.err == nil {
		r.err = err
	}
	return r.err
}
