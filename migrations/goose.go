package migrations

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"
)

// The endings of the plain files.
const (
	upEnding   = ".up.sql"
	downEnding = ".down.sql"
)

// Goose returns files, which is [Postgres] or [SQLite], in the form that goose
// expects: one file a version (0001_inbox.sql) with an Up and a Down part. Each
// part is a single statement for goose, so that nothing has to be split at
// semicolons.
//
// The result is made on the fly and is read-only; it may be used concurrently.
// What is wrong with files (other ones than those of this package) is the error
// of opening a file or of listing the folder.
//
// Give goose a table of its own for the versions (goose.WithTableName), when it
// also runs migrations of yours: both count from 1. The command line uses
// [GooseTable].
func Goose(files fs.FS) fs.FS { return gooseFS{files} }

// gooseFS has one folder, ".".
type gooseFS struct{ files fs.FS }

var _ fs.ReadDirFS = gooseFS{}

// Open opens a file or the folder.
func (g gooseFS) Open(name string) (fs.File, error) {
	if !fs.ValidPath(name) {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrInvalid}
	}
	if name == "." {
		entries, err := g.ReadDir(name)
		if err != nil {
			return nil, err
		}
		return &gooseDir{entries: entries}, nil
	}
	content, err := g.content(name)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: name, Err: err}
	}
	return &gooseFile{Reader: bytes.NewReader(content), info: gooseInfo{name, int64(len(content))}}, nil
}

// ReadDir lists the folder, sorted by name.
func (g gooseFS) ReadDir(name string) ([]fs.DirEntry, error) {
	if name != "." {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: fs.ErrNotExist}
	}
	ups, err := fs.Glob(g.files, "*"+upEnding)
	if err != nil {
		return nil, &fs.PathError{Op: "readdir", Path: name, Err: err}
	}
	slices.Sort(ups)
	entries := make([]fs.DirEntry, 0, len(ups))
	for _, up := range ups {
		file := strings.TrimSuffix(up, upEnding) + ".sql"
		content, err := g.content(file)
		if err != nil {
			return nil, &fs.PathError{Op: "readdir", Path: file, Err: err}
		}
		entries = append(entries, fs.FileInfoToDirEntry(gooseInfo{file, int64(len(content))}))
	}
	return entries, nil
}

// content joins the two plain files of name into the form of goose.
func (g gooseFS) content(name string) ([]byte, error) {
	stem, ok := strings.CutSuffix(name, ".sql")
	if !ok || strings.Contains(stem, "/") {
		return nil, fs.ErrNotExist
	}
	up, err := fs.ReadFile(g.files, stem+upEnding)
	if err != nil {
		return nil, cause(err)
	}
	down, err := fs.ReadFile(g.files, stem+downEnding)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, cause(err)
	}
	var b bytes.Buffer
	writePart(&b, "Up", up)
	if len(down) > 0 {
		b.WriteByte('\n')
		writePart(&b, "Down", down)
	}
	return b.Bytes(), nil
}

func writePart(b *bytes.Buffer, name string, sql []byte) {
	b.WriteString("-- +goose " + name + "\n-- +goose StatementBegin\n")
	b.Write(bytes.TrimRight(sql, "\r\n"))
	// The end marker has to be a line of its own.
	b.WriteString("\n-- +goose StatementEnd\n")
}

// cause takes the path of the plain file off, which the caller did not name.
func cause(err error) error {
	var p *fs.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	return err
}

// gooseFile is one open file.
type gooseFile struct {
	*bytes.Reader
	info gooseInfo
}

func (f *gooseFile) Stat() (fs.FileInfo, error) { return f.info, nil }
func (f *gooseFile) Close() error               { return nil }

// gooseDir is the open folder.
type gooseDir struct {
	entries []fs.DirEntry
	read    int
}

func (d *gooseDir) Stat() (fs.FileInfo, error) { return gooseInfo{name: "."}, nil }
func (d *gooseDir) Close() error               { return nil }

func (d *gooseDir) Read([]byte) (int, error) {
	return 0, &fs.PathError{Op: "read", Path: ".", Err: errors.New("is a directory")}
}

// ReadDir follows fs.ReadDirFile: n <= 0 returns all the rest.
func (d *gooseDir) ReadDir(n int) ([]fs.DirEntry, error) {
	rest := d.entries[d.read:]
	if n > 0 {
		if len(rest) == 0 {
			return nil, io.EOF
		}
		rest = rest[:min(n, len(rest))]
	}
	d.read += len(rest)
	return slices.Clone(rest), nil
}

// gooseInfo describes a file, or the folder when the name is ".".
type gooseInfo struct {
	name string
	size int64
}

func (i gooseInfo) Name() string       { return i.name }
func (i gooseInfo) Size() int64        { return i.size }
func (i gooseInfo) ModTime() time.Time { return time.Time{} } // As with package embed.
func (i gooseInfo) IsDir() bool        { return i.name == "." }
func (i gooseInfo) Sys() any           { return nil }

func (i gooseInfo) Mode() fs.FileMode {
	if i.IsDir() {
		return fs.ModeDir | 0o555
	}
	return 0o444
}
