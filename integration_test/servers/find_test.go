package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
)

// recorder is a test that notes how it was ended and goes on. Skipf and Fatalf
// of a real test do not return; the code under test returns after them.
type recorder struct {
	ctx             context.Context
	fatals, skipped []string
	errors          []string
}

func (r *recorder) Helper()                  {}
func (r *recorder) Name() string             { return "TestRecorder" }
func (r *recorder) Logf(string, ...any)      {}
func (r *recorder) Cleanup(func())           {}
func (r *recorder) Context() context.Context { return r.ctx }
func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}
func (r *recorder) Fatalf(format string, args ...any) {
	r.fatals = append(r.fatals, fmt.Sprintf(format, args...))
}
func (r *recorder) Skipf(format string, args ...any) {
	r.skipped = append(r.skipped, fmt.Sprintf(format, args...))
}

func says(messages []string, words ...string) bool {
	if len(messages) != 1 {
		return false
	}
	for _, word := range words {
		if !strings.Contains(messages[0], word) {
			return false
		}
	}
	return true
}

func gives(address string, err error) starter {
	return func() (string, error) { return address, err }
}

func absent(why string) starter {
	return gives("", fmt.Errorf("%w: %s", ErrUnavailable, why))
}

func broken(why string) starter { return gives("", errors.New(why)) }

func untouched(t *testing.T) starter {
	return func() (string, error) {
		t.Error("a starter ran although an earlier way gave the server")
		return "", nil
	}
}

const testVariable = "ACKAFTER_TEST_SOMETHING"

func TestFindOrder(t *testing.T) {
	t.Setenv(EnvRequire, "")
	for _, row := range []struct {
		name              string
		variable          string
		container, native starter
		want              string
		skip, fatal       []string
	}{
		{name: "environment first", variable: "from-env", container: untouched(t), native: untouched(t), want: "from-env"},
		{name: "container second", container: gives("from-container", nil), native: untouched(t), want: "from-container"},
		{name: "native third", container: absent("no docker"), native: gives("from-script", nil), want: "from-script"},
		{name: "native without an image", native: gives("from-script", nil), want: "from-script"},
		{
			name: "nothing", container: absent("no docker"), native: absent("no apt"),
			skip: []string{testVariable + " is not set", "no docker", "no apt"},
		},
		{name: "container fails", container: broken("pull denied"), native: untouched(t), fatal: []string{"pull denied"}},
		{name: "native fails", container: absent("no docker"), native: broken("port taken"), fatal: []string{"port taken"}},
	} {
		t.Run(row.name, func(t *testing.T) {
			t.Setenv(testVariable, row.variable)
			r := &recorder{ctx: t.Context()}
			got := find(r, &server{name: "something", variable: testVariable, container: row.container, native: row.native})
			if got != row.want {
				t.Errorf("find = %q, want %q", got, row.want)
			}
			if row.skip == nil && len(r.skipped) > 0 || row.skip != nil && !says(r.skipped, row.skip...) {
				t.Errorf("skipped with %q, want one message with %q", r.skipped, row.skip)
			}
			if row.fatal == nil && len(r.fatals) > 0 || row.fatal != nil && !says(r.fatals, row.fatal...) {
				t.Errorf("failed with %q, want one message with %q", r.fatals, row.fatal)
			}
		})
	}
}

func TestRequireTurnsSkipIntoFailure(t *testing.T) {
	t.Setenv(EnvRequire, "1")
	t.Setenv(testVariable, "")
	r := &recorder{ctx: t.Context()}
	find(r, &server{name: "something", variable: testVariable, container: absent("no docker"), native: absent("no apt")})
	if len(r.skipped) != 0 || !says(r.fatals, EnvRequire, "no docker", "no apt") {
		t.Errorf("skipped %q, failed %q; want one failure with the reasons", r.skipped, r.fatals)
	}
}

func TestStartersRunOnce(t *testing.T) {
	t.Parallel()
	runs := 0
	start := once(func() (string, error) {
		runs++
		return "address", nil
	})
	for range 3 {
		if address, err := start(); address != "address" || err != nil {
			t.Errorf("start = %q, %v", address, err)
		}
	}
	if runs != 1 {
		t.Errorf("the starter ran %d times, want once", runs)
	}
}

func TestNamedServerThatDoesNotAnswerFails(t *testing.T) {
	t.Setenv(EnvRequire, "")
	port, err := freePort(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	address := net.JoinHostPort("127.0.0.1", port)
	t.Setenv(testVariable, "postgres://postgres@"+address+"/postgres")
	r := &recorder{ctx: t.Context()}
	freshDatabase(r, &server{name: "something", variable: testVariable})
	if len(r.skipped) != 0 || !says(r.fatals, testVariable, "connect") {
		t.Errorf("database: skipped %q, failed %q; want one failure", r.skipped, r.fatals)
	}
	r = &recorder{ctx: t.Context()}
	checkReachable(r, testVariable, address)
	if !says(r.fatals, testVariable, address) {
		t.Errorf("broker: failed %q; want one failure", r.fatals)
	}
}

func TestParseBase(t *testing.T) {
	t.Parallel()
	for _, good := range []string{"postgres://h/d", "postgresql://u:p@h:1/d?sslmode=disable"} {
		if _, err := parseBase("X", good); err != nil {
			t.Errorf("parseBase(%q): %v", good, err)
		}
	}
	for _, bad := range []string{"", "host=h user=secret", "mysql://h/d", "postgres:///d", "postgres://u:secret@h:x/d"} {
		_, err := parseBase("X", bad)
		if err == nil || !strings.Contains(err.Error(), "X") || strings.Contains(err.Error(), "secret") {
			t.Errorf("parseBase(%q) = %v, want an error that names the variable and hides the address", bad, err)
		}
	}
}

func TestParseExport(t *testing.T) {
	t.Parallel()
	lines := "# kafka is not running\nexport A_B='1'\nexport A='postgres://x?y=z'\n"
	if got, ok := parseExport(lines, "A"); got != "postgres://x?y=z" || !ok {
		t.Errorf("parseExport(A) = %q, %v", got, ok)
	}
	if got, ok := parseExport(lines, "B"); ok {
		t.Errorf("parseExport(B) = %q, want none", got)
	}
}

func TestUniqueName(t *testing.T) {
	t.Parallel()
	name := uniqueName("TestX/with spaces, 'quotes' and a very long name that goes on")
	if !strings.HasPrefix(name, "t_testx_with_spaces_quotes_and_a_very_long") || len(name) > 63 {
		t.Errorf("name = %q (%d bytes)", name, len(name))
	}
	if other := uniqueName("TestX"); notInName.MatchString(strings.ReplaceAll(other, "_", "")) {
		t.Errorf("name %q needs quoting", other)
	}
	if one, two := uniqueName("a"), uniqueName("a"); one == two {
		t.Errorf("two databases of one test are called %s", one)
	}
}

func TestParseSecureKafka(t *testing.T) {
	t.Parallel()
	got, err := parseSecureKafka("kafka://admin:s%40cret@127.0.0.1:9093?ca=/some/ca.pem")
	if want := (SecureKafka{"127.0.0.1:9093", "admin", "s@cret", "/some/ca.pem"}); err != nil || *got != want {
		t.Errorf("parseSecureKafka = %+v, %v, want %+v", got, err, want)
	}
	for _, bad := range []string{"", "h:1", "kafka://h:1?ca=f", "kafka://u:secret@h?ca=f", "kafka://u:secret@h:1", "kafka://u:secret@h:x?ca=f"} {
		if _, err := parseSecureKafka(bad); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("parseSecureKafka(%q) = %v, want an error that hides the address", bad, err)
		}
	}
}
