package rabbitmq

import (
	"log/slog"

	"github.com/ackafter/ackafter/internal/retry"
)

// newTrouble is for something that may fail again and again.
func newTrouble(log *slog.Logger, what string) retry.Trouble {
	return retry.Trouble{Log: log, Adapter: "rabbitmq", What: what}
}
