package inbox

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
)

// failureText is how much of an error's text counts for its failure hash.
const failureText = 2000

// varying are the parts of an error's text that differ between failures that are
// the same for a person: what is quoted, and words with a digit in them, such as
// ids, times and counts.
var varying = regexp.MustCompile(`"[^"]*"|'[^']*'|` + "`[^`]*`" + `|[\pL\pN_.:+-]*\pN[\pL\pN_.:+-]*`)

// failureOf returns a hash that is the same for failures that look alike.
func failureOf(reason Reason, err error) string {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if len(text) > failureText {
		text = strings.ToValidUTF8(text[:failureText], "")
	}
	sum := sha256.Sum256([]byte(string(reason) + "\x00" + varying.ReplaceAllString(text, "?")))
	return hex.EncodeToString(sum[:8])
}
