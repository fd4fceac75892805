package inboxpgx

import (
	"strings"
	"testing"
)

var controlCases = []struct{ sql, want string }{
	{"", ""},
	{"select 1", ""},
	{"begin", "begin"},
	{"BEGIN ISOLATION LEVEL SERIALIZABLE", "begin"},
	{"start transaction", "start"},
	{"COMMIT", "commit"},
	{"Commit And Chain", "commit"},
	{"commit prepared 'x'", "commit"},
	{"end", "end"},
	{"end;", "end"},
	{"abort", "abort"},
	{"rollback", "rollback"},
	{"rollback work", "rollback"},
	{"rollback transaction", "rollback"},
	{"rollback prepared 'x'", "rollback"},
	{"rollback and chain", "rollback"},
	{"rollback to x", ""},
	{"rollback to savepoint x", ""},
	{"rollback work to savepoint x", ""},
	{"rollback /* a */ to -- b\n x", ""},
	{"rollback to ackafter_run", "rollback to ackafter_run"},
	{"rollback to savepoint ACKAFTER_RUN", "rollback to ackafter_run"},
	{`rollback transaction to savepoint "ackafter_run"`, "rollback to ackafter_run"},
	{`rollback to "ACKAFTER_RUN"`, ""},
	{"rollback to savepoint", ""},
	{"savepoint x", ""},
	{"savepoint ackafter_run", "savepoint ackafter_run"},
	{"savepoint savepoint", ""},
	{"release x", ""},
	{"release savepoint Ackafter_Run", "release ackafter_run"},
	{"release ackafter_run", "release ackafter_run"},
	{"prepare transaction 'x'", "prepare transaction"},
	{"prepare p as select 1", ""},
	{"set transaction isolation level serializable", "set transaction"},
	{"set local transaction read only", "set transaction"},
	{"set session transaction read only", "set transaction"},
	{"set session characteristics as transaction read only", ""},
	{"set local search_path = x", ""},
	{"set constraints all immediate", ""},
	{"committed", ""},
	{"commit_log", ""},
	{`"commit"`, ""},
	{"  \t\r\n\f commit", "commit"},
	{"; ;; commit", "commit"},
	{"select 1; commit", "commit"},
	{"select 1;commit;select 2", "commit"},
	{"-- commit\nselect 1", ""},
	{"-- x\ncommit", "commit"},
	{"--\rcommit", "commit"},
	{"/* commit */ select 1", ""},
	{"/* /* */ commit */ select 1", ""},
	{"/* /* */ x */ commit", "commit"},
	{"/* ; commit", ""},
	{"select 1 /* x */; /* y */ commit", "commit"},
	{"select '; commit'", ""},
	{"select 'a''; commit'", ""},
	{"select 'a'; commit", "commit"},
	{"select ''; commit", "commit"},
	{`select 'a\'; commit`, "commit"},
	{`select e'a\'; commit'`, ""},
	{`select E'a\'; commit'`, ""},
	{`select e'a\\'; commit`, "commit"},
	{`select name'a\'; commit`, "commit"},
	{`select b'0'; commit`, "commit"},
	{`select "a;" ";commit"; commit`, "commit"},
	{`select "a"";commit"`, ""},
	{"do $$ begin commit; end $$", ""},
	{"do $x$ ; commit; $$ ; commit $x$", ""},
	{"do $x$ a $x$; commit", "commit"},
	{"select $1; commit", "commit"},
	{"select $1$; commit", "commit"},
	{"select a$$; commit; $$", "commit"},
	{"select $é$ ; commit $é$", ""},
	{"select $$ commit", ""},
	{"create rule r as on insert to t do also (insert into u values (1); delete from v)", ""},
	{"create rule r as on insert to t do also (select 1; select 2); commit", "commit"},
	{"create function f() returns int begin atomic select 1; select case when true then 1 end; end", ""},
	{"create function f() returns int begin atomic select 1; end; commit", "commit"},
	{"create procedure p() language plpgsql as $$ begin commit; end $$; end", "end"},
	{"insert into t (begin) values (1)", ""},
	{"select case when a then b end; select 1", ""},
	{"with x as (select 1) select * from x; end", "end"},
	{"explain commit", ""},
	{"1commit", ""},
	{"declare c cursor for select 1; fetch c; close c", ""},
	{"select U&'\\0441' ; commit", "commit"},
	{"commit/**/", "commit"},
	{"commit--", "commit"},
	{"\ufeffcommit", ""}, // The server does not take it for a statement either.
	{"do $e$ raise $e$ ;\n\n commit ; select 1", "commit"},
}

func TestControlIn(t *testing.T) {
	t.Parallel()
	for _, c := range controlCases {
		if got := controlIn(c.sql); got != c.want {
			t.Errorf("controlIn(%q) = %q, want %q", c.sql, got, c.want)
		}
	}
}

// FuzzControl: nothing panics, a text that is whole lets a COMMIT behind it be
// seen, and quoting a text hides what is in it.
func FuzzControl(f *testing.F) {
	for _, c := range controlCases {
		f.Add(c.sql)
	}
	f.Fuzz(func(t *testing.T, sql string) {
		word, whole := control(sql)
		// Open brackets and function bodies keep a semicolon from ending a
		// statement; the server refuses such a text as a whole.
		plain := !strings.ContainsAny(sql, "()") && !strings.Contains(strings.ToLower(sql), "atomic")
		if whole && plain && word == "" && controlIn(sql+"\n; commit") == "" {
			t.Errorf("a COMMIT behind %q is not seen", sql)
		}
		if got := controlIn("select '" + strings.ReplaceAll(sql, "'", "''") + "'"); got != "" {
			t.Errorf("%q is found in the string %q", got, sql)
		}
		if !strings.Contains(sql, "$q$") && !strings.HasSuffix(sql, "$q") && !strings.HasPrefix(sql, "q$") {
			if got := controlIn("do $q$" + sql + "$q$"); got != "" {
				t.Errorf("%q is found in the dollar-quoted %q", got, sql)
			}
		}
		if got := controlIn("-- " + strings.NewReplacer("\n", " ", "\r", " ").Replace(sql) + "\nselect 1"); got != "" {
			t.Errorf("%q is found in the comment %q", got, sql)
		}
		if got := controlIn("commit; " + sql); got != "commit" {
			t.Errorf("a COMMIT in front of %q: %q", sql, got)
		}
	})
}

func TestSettings(t *testing.T) {
	t.Parallel()
	for sql, want := range map[string]bool{
		"set local search_path = x":               true,
		"  -- a comment\nSET search_path = x":     true,
		"select 1; reset all":                     true,
		"select set_config('a', 'b', true)":       true,
		"discard all":                             true,
		"update t set a = 1":                      false,
		"insert into t values ('set local x')":    false,
		"select 'set_config'":                     false,
		"insert into set_config_log values (1)":   false,
		"":                                        false,
		"delete from t where a = $1 returning id": false,
	} {
		if got := settingsIn(sql); got != want {
			t.Errorf("settingsIn(%q) = %v, want %v", sql, got, want)
		}
	}
}
