package inbox

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/ackafter/ackafter/keyfunc"
)

// maxName is the limit of names and tenants, in bytes.
const maxName = 200

// validateName checks the name of a consumer.
func validateName(field, name string) error {
	switch {
	case strings.TrimSpace(name) == "":
		return fmt.Errorf("inbox: %s: must not be empty", field)
	case strings.TrimSpace(name) != name:
		return fmt.Errorf("inbox: %s: %q: must not begin or end with white space", field, name)
	case len(name) > maxName:
		return fmt.Errorf("inbox: %s: has %d bytes, at most %d are allowed", field, len(name), maxName)
	}
	return validateText(field, name)
}

// validateTenant checks a tenant; empty is fine.
func validateTenant(tenant string) error {
	if len(tenant) > maxName {
		return fmt.Errorf("inbox: tenant: has %d bytes, at most %d are allowed", len(tenant), maxName)
	}
	return validateText("tenant", tenant)
}

// validateMessageKey checks a business key. The texts never hold the key.
func validateMessageKey(key string) error {
	if err := keyfunc.Check(key); err != nil {
		return fmt.Errorf("inbox: message key: %w", err)
	}
	return nil
}

func validateText(field, s string) error {
	switch {
	case !utf8.ValidString(s):
		return fmt.Errorf("inbox: %s: is not valid UTF-8", field)
	case strings.ContainsRune(s, 0):
		return fmt.Errorf("inbox: %s: must not contain a NUL", field)
	}
	return nil
}
