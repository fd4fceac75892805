package main

import (
	"fmt"
	"io"
	"runtime/debug"

	"github.com/spf13/cobra"

	"github.com/ackafter/ackafter/migrations"
)

func (p *program) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "version",
		Short:   "Print the version of this program and of the tables that it works with",
		Example: "  ackafter version\n  ackafter version --json",
		Args:    arguments(),
		RunE: func(*cobra.Command, []string) error {
			info, _ := debug.ReadBuildInfo()
			return p.show(newVersionView(info))
		},
	}
}

// versionView is what "version" shows.
type versionView struct {
	Version  string `json:"version"`
	Revision string `json:"revision,omitempty"`
	Modified bool   `json:"modified,omitempty"`
	Go       string `json:"go,omitempty"`
	Tables   int    `json:"tables"`
}

// newVersionView reads info; nil when the program was built without it.
func newVersionView(info *debug.BuildInfo) *versionView {
	v := &versionView{Version: "unknown", Tables: migrations.Version}
	if info == nil {
		return v
	}
	if info.Main.Version != "" {
		v.Version = info.Main.Version
	}
	v.Go = info.GoVersion
	for _, s := range info.Settings {
		switch s.Key {
		case "vcs.revision":
			v.Revision = s.Value
		case "vcs.modified":
			v.Modified = s.Value == "true"
		}
	}
	return v
}

func (v *versionView) data() any { return v }

func (v *versionView) text(w io.Writer) {
	_, _ = fmt.Fprintf(w, "ackafter %s\n", v.Version)
	if v.Revision != "" {
		changed := ""
		if v.Modified {
			changed = ", with changes"
		}
		_, _ = fmt.Fprintf(w, "revision %s%s\n", v.Revision, changed)
	}
	if v.Go != "" {
		_, _ = fmt.Fprintf(w, "built with %s\n", v.Go)
	}
	_, _ = fmt.Fprintf(w, "tables version %d\n", v.Tables)
}
