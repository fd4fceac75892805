package migrations_test

import (
	"errors"
	"io/fs"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/ackafter/ackafter/migrations"
)

// Two versions; the SQL has semicolons where a splitter would stumble.
var twoVersions = fstest.MapFS{
	"0001_first.up.sql":    {Data: []byte("-- a; b\ncreate table a (x text default ';');\ncreate table b (y int);\n")},
	"0001_first.down.sql":  {Data: []byte("drop table b;\ndrop table a;")},
	"0002_second.up.sql":   {Data: []byte("alter table a add z int;\r\n")},
	"0002_second.down.sql": {Data: []byte("alter table a drop z;\n\n\n")},
	"0003_noway.up.sql":    {Data: []byte("select 1;\n")},
	"README.md":            {Data: []byte("not SQL")},
}

func TestGooseIsAFileSystem(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]fs.FS{
		"postgres": migrations.Postgres(), "sqlite": migrations.SQLite(), "two": twoVersions,
	} {
		want := []string{"0001_inbox.sql", "0002_parking.sql"}
		if name == "two" {
			want = []string{"0001_first.sql", "0002_second.sql", "0003_noway.sql"}
		}
		if err := fstest.TestFS(migrations.Goose(files), want...); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestGooseJoinsUpAndDown(t *testing.T) {
	t.Parallel()
	const want = `-- +goose Up
-- +goose StatementBegin
-- a; b
create table a (x text default ';');
create table b (y int);
-- +goose StatementEnd

-- +goose Down
-- +goose StatementBegin
drop table b;
drop table a;
-- +goose StatementEnd
`
	got, err := fs.ReadFile(migrations.Goose(twoVersions), "0001_first.sql")
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != want {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
	got, err = fs.ReadFile(migrations.Goose(twoVersions), "0003_noway.sql")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(got), "Down") {
		t.Errorf("a version without a way down has one:\n%s", got)
	}
}

func TestGooseOpensNothingElse(t *testing.T) {
	t.Parallel()
	goose := migrations.Goose(twoVersions)
	for name, want := range map[string]error{
		"0001_first.up.sql": fs.ErrNotExist,
		"0004_none.sql":     fs.ErrNotExist,
		"README.md":         fs.ErrNotExist,
		"sub/0001.sql":      fs.ErrNotExist,
		"":                  fs.ErrInvalid,
		"/0001_first.sql":   fs.ErrInvalid,
		"../0001_first.sql": fs.ErrInvalid,
	} {
		_, err := goose.Open(name)
		var p *fs.PathError
		if !errors.Is(err, want) || !errors.As(err, &p) || p.Path != name {
			t.Errorf("open %q: %v, want %v for that path", name, err, want)
		}
	}
	if _, err := fs.ReadDir(goose, "sub"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("readdir sub: %v", err)
	}
}

// What is wrong with the files is told when they are read, not by a panic.
func TestGooseReportsUnreadableFiles(t *testing.T) {
	t.Parallel()
	broken := fstest.MapFS{
		"0001_x.up.sql":   {Data: []byte("select 1;")},
		"0001_x.down.sql": {Mode: fs.ModeDir},
	}
	if _, err := fs.ReadDir(migrations.Goose(broken), "."); err == nil {
		t.Error("no error for a folder in place of a file")
	}
	if _, err := migrations.Goose(broken).Open("0001_x.sql"); err == nil {
		t.Error("no error for a folder in place of a file")
	}
}

// The numbers of the files are 1..Version, each can be taken back, and the last
// one says its version in inbox_schema.
func TestVersionIsTheLastFile(t *testing.T) {
	t.Parallel()
	for name, files := range map[string]fs.FS{"postgres": migrations.Postgres(), "sqlite": migrations.SQLite()} {
		ups, err := fs.Glob(files, "*.up.sql")
		if err != nil {
			t.Fatal(err)
		}
		if len(ups) != migrations.Version {
			t.Errorf("%s: %d files, Version is %d", name, len(ups), migrations.Version)
		}
		for i, up := range ups {
			if !strings.HasPrefix(up, numbered(i+1)) {
				t.Errorf("%s: file %d is %s", name, i+1, up)
			}
			if _, err := fs.Stat(files, strings.Replace(up, ".up.", ".down.", 1)); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}
