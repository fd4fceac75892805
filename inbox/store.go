package inbox

import (
	"context"
	"time"

	"github.com/ackafter/ackafter/broker"
)

// Store keeps the inbox in a database and runs handlers inside its
// transactions. Tx is the transaction type that handlers get. Package inboxtest
// holds the rules below as a test suite, RunStore.
//
// All methods may be called concurrently. Every method obeys ctx. Errors wrap
// the driver's error, so that Classify and errors.As see it.
type Store[Tx any] interface {
	// Check tells whether the store can be used: the tables are there
	// (ErrNoSchema, which names the command that makes them) and of the version
	// that this release needs (ErrSchemaVersion, which says both versions).
	Check(ctx context.Context) error

	// Register records that a consumer with this definition of its key is
	// running. A first registration, and a repeated one with the same
	// definition, return nil. Another stored definition is a
	// *KeyDefinitionError, unless r.Replaces equals the stored one, which is
	// then replaced.
	Register(ctx context.Context, r Registration) error

	// Begin opens a transaction and claims the keys in it, in one round trip
	// where the database allows, sorted by key so that two batches cannot
	// deadlock on claims. The keys of one call are distinct. It may be called
	// with no claims.
	//
	// A key that another open transaction holds is waited for, LockTimeout in
	// all; then everything is rolled back and the error wraps ErrInFlight. A
	// key whose row is past its window is claimed anew in the same transaction.
	// Whatever the error, nothing is held and no transaction stays open.
	Begin(ctx context.Context, claims []Claim, o BeginOptions) (Batch[Tx], error)

	// Claim takes a key inside a transaction that the caller owns: the key is
	// taken if and only if that transaction commits. The outcome of the entry
	// is FirstAttempt (do the work), Replay or Conflict (do not; Stored has the
	// row). Without the option WithFingerprint bodies are not compared, and
	// nothing is ever a Conflict.
	//
	// It waits for another transaction that holds the key for as long as the
	// caller's ctx and the transaction's own lock timeout allow; a lock timeout
	// wraps ErrInFlight. An invalid consumer or key (empty, too long, NUL,
	// invalid UTF-8) is an error that names it and leaves the transaction
	// usable.
	Claim(ctx context.Context, tx Tx, consumer, key string, opts ...ClaimOption) (Entry, error)

	// SaveResult stores a result with a key that was claimed in tx by Claim: any
	// bytes, though Record.Decode needs JSON. It returns ErrNotFound when the key is not there.
	SaveResult(ctx context.Context, tx Tx, consumer, key string, result []byte, opts ...ClaimOption) error

	// Lookup returns the row of a key, expired or not. ErrNotFound when there
	// is none. Long keys that are stored as a hash are found by their text.
	Lookup(ctx context.Context, key Key) (*Record, error)

	// Classify tells whose fault an error is that came from this database.
	Classify(err error) Class
}

// Batch is one open transaction with claimed keys. It is used by one goroutine
// at a time, except that Abort may be called while a handler is still running.
//
// The order of calls is: for each entry of interest Start, the handler, Finish;
// or Park; then Commit or Abort. At Commit the claims of entries that were
// neither finished with ok nor found as somebody else's are deleted in the same
// transaction, so that a claim never outlives its message's failure.
type Batch[Tx any] interface {
	// Entries returns what became of each claim, in the order of the claims.
	Entries() []Entry

	// Start opens a savepoint and returns the transaction for one handler run.
	// The returned Tx is dead once Finish was called. i is the entry that the
	// run is for. Errors: the transaction is unusable, call Abort.
	Start(ctx context.Context, i int) (Tx, error)

	// Finish ends the run that Start began. With ok, the run's writes are kept
	// and result (nil for none) is stored with the key at Commit. Without ok,
	// they are rolled back to the savepoint.
	//
	// Called with ok for an entry that was not started, it keeps the claim: a
	// bulk handler runs once, under one savepoint, for many entries.
	//
	// An error that wraps ErrSwallowed says that a statement of the handler
	// failed although the handler reported success: the run was rolled back,
	// the batch stays usable. An error that wraps ErrTxEnded says that the
	// handler ended the transaction by itself: the batch is unusable, the run's
	// effects are unknown. Any other error: the batch is unusable, nothing of
	// it was committed.
	Finish(ctx context.Context, i int, ok bool, result []byte) error

	// Park inserts p into the parked table in this transaction and, for i >= 0,
	// gives up the claim of entry i if there is one; a row of somebody else's is
	// never touched. A row for the same key and fingerprint
	// that is already there stays as it is. i < 0: p has no claim (its key
	// could not be derived).
	//
	// With p.Lease the message has a row: its State, Reason, Error, Failure,
	// Attempts, Worker and time of the next attempt are set to those of p and the
	// lease ends; its key, lane and message stay. A lease that is over (see
	// Entry.Gone) changes nothing and is an error that wraps ErrNotFound: the
	// batch stays usable.
	Park(ctx context.Context, i int, p Parked) error

	// Commit deletes the claims of unfinished entries and commits. The row of a
	// claim that came from the parked table (Claim.Parked) is deleted with it when
	// its entry was finished with ok, or is a Replay or a Conflict and was not
	// parked again; else it stays, with its lease. Callers give
	// it a context that a shutdown does not cancel. A nil error means that the
	// work is durable. ErrNotCommitted (wrapped) says that nothing was
	// committed. ErrCommitUnknown (wrapped) says that no answer came: only a
	// new claim can tell. In each case the batch has ended.
	Commit(ctx context.Context) error

	// Abort rolls everything back. It never blocks on a running handler: then
	// the connection is cut and not reused. After Commit or Abort it does
	// nothing. Like database/sql's Rollback it is fit for defer.
	Abort()
}

// BeginOptions bound a batch's transaction.
type BeginOptions struct {
	// LockTimeout bounds the wait for keys that others hold, for all claims of
	// the batch together. It does not bound the handlers' own statements.
	// Always positive.
	LockTimeout time.Duration

	// IdleTimeout is how long the transaction may sit idle before the database
	// ends it, so that a client that is gone does not hold claims. Zero: no
	// bound.
	IdleTimeout time.Duration

	// IgnoreParked runs messages that are in the parked table instead of
	// reporting them; their success removes the parked row.
	IgnoreParked bool

	// Order says what holds claims with a Lane back, see Entry.Held. The zero
	// value holds nothing.
	Order Order

	// BeforeStatement is called with the text of each statement of a handler,
	// before it is sent, by the goroutine that sends it. An error is what the
	// handler gets instead, as if the database had refused the statement: a run
	// that then reports success has swallowed it. It is for tests (inboxtest.Chaos).
	// Nil: nothing is called. A store that does not see statements leaves it alone,
	// and so may what a handler sends past its Tx.
	BeforeStatement func(sql string) error
}

// Order says which parked messages hold back the later ones of their lane.
type Order struct {
	// Keep: those that get another attempt, and those that wait.
	Keep bool
	// BlockedByDead: dead letters, too. Without Keep it says nothing.
	BlockedByDead bool
	// MaxWaiting and MaxWaitingBytes bound the ParkedWaiting rows of one lane and
	// the sum of their bodies, see Entry.Full. Zero: no bound.
	MaxWaiting      int
	MaxWaitingBytes int64
}

// Claim asks for one key.
type Claim struct {
	Key

	// Fingerprint tells "same body" from "other body"; nil compares nothing.
	Fingerprint []byte

	// MessageID, Source, Position, EventTime, Worker, TraceID and Attempt are
	// recorded with the key, see Record.
	MessageID string
	Source    string
	Position  broker.Position
	EventTime time.Time
	Worker    string
	TraceID   string
	Attempt   int

	// Retention is how long the key is kept, from now by the database's clock.
	// Zero or negative: for ever.
	Retention time.Duration

	// Lane is the ordering domain of the message; empty for none. It is looked at
	// under BeginOptions.Order.
	Lane string

	// Parked is the lease of the parked row that the message comes from; the zero
	// value for a message that comes from a broker. Its row is not reported as
	// WasParked or Dead.
	Parked Lease
}

// Lease is a parked row in the hands of one process, see Parker. Every lease of a
// row has a token of its own, so that an earlier holder can do nothing.
type Lease struct {
	ID    int64 // of the row, see ParkedRecord.ID; zero for none
	Token int64
}

// Entry is the answer to one claim.
type Entry struct {
	// Outcome is FirstAttempt (claimed: run the handler), Replay, Conflict,
	// WasParked or Dead (the message with this fingerprint is in the parked
	// table; not claimed).
	Outcome Outcome

	// Stored is the row that was found, for Replay and Conflict; else nil.
	Stored *Record

	// Gone: the claim came from the parked table, and its lease is over or its row
	// is no longer there: somebody else sees to the message. The outcome is
	// empty, nothing is claimed.
	Gone bool

	// Held: the key is claimed, but an earlier message of its lane is parked, see
	// Order. It must not run now: a message that comes from a broker is to be
	// parked as ParkedWaiting, one from the parked table to be given back. For a
	// leased row those with a lower ParkedRecord.ID are earlier; for any other
	// message all that are there. Leased rows that the same call has claimed do not
	// hold each other, as who called keeps their order; they do hold the messages
	// from a broker that were claimed with them.
	Held bool

	// Full: Held, and as much waits in the lane as may. It cannot be parked now.
	Full bool
}

// Claimed tells whether the key is ours. The work is to be done unless Held says
// that it has to wait.
func (e Entry) Claimed() bool { return e.Outcome == FirstAttempt }

// ClaimOption is an option of Store.Claim and Store.SaveResult.
type ClaimOption func(*Claim)

// WithTenant scopes the key by tenant. Default: no tenant.
func WithTenant(tenant string) ClaimOption { return func(c *Claim) { c.Tenant = tenant } }

// WithFingerprint makes the claim compare bodies: the same key with another
// fingerprint is a Conflict. Default: nothing is compared.
func WithFingerprint(fingerprint []byte) ClaimOption {
	return func(c *Claim) { c.Fingerprint = fingerprint }
}

// WithRetention sets how long the key is kept. Zero: DefaultRetention.
// Negative: for ever.
func WithRetention(d time.Duration) ClaimOption {
	return func(c *Claim) {
		if d == 0 {
			d = DefaultRetention
		}
		c.Retention = d
	}
}

// WithMessage records the broker's id, source and position of m with the key.
func WithMessage(m *broker.Message) ClaimOption {
	return func(c *Claim) {
		c.MessageID, c.Source, c.Position, c.EventTime = m.ID, m.Source, m.Position, m.Time
		c.TraceID = traceID(m.Headers)
	}
}

// NewClaim returns the claim that Store.Claim and Store.SaveResult make of
// their arguments, with the defaults applied and everything validated. It is
// for store authors. The error names the argument and the rule.
func NewClaim(consumer, key string, opts ...ClaimOption) (Claim, error) {
	c := Claim{Key: Key{Consumer: consumer, MessageKey: key}, Attempt: 1, Retention: DefaultRetention, Worker: defaultWorker()}
	for _, o := range opts {
		if o != nil {
			o(&c)
		}
	}
	if err := validateName("consumer", c.Consumer); err != nil {
		return Claim{}, err
	}
	if err := validateTenant(c.Tenant); err != nil {
		return Claim{}, err
	}
	if err := validateMessageKey(c.MessageKey); err != nil {
		return Claim{}, err
	}
	return c, nil
}

// Registration is what a consumer tells the store at its start.
type Registration struct {
	// Consumer is its name.
	Consumer string
	// KeyDefinition is the canonical text of its key function.
	KeyDefinition string
	// Replaces is the stored definition that the user confirms to replace.
	Replaces string
	// Retention is its window; zero or negative: for ever.
	Retention time.Duration
}

// Class tells whose fault an error is.
type Class int

// The classes of errors.
const (
	// ClassMessage: the message's or its handler's own failure. Errors that did
	// not come from the database are of this class.
	ClassMessage Class = iota

	// ClassContention: serialization failure, deadlock, lock timeout. Running
	// again, alone, is expected to help.
	ClassContention

	// ClassUnavailable: the database cannot be reached or refuses to work:
	// connection lost, failover, shutting down, out of connections.
	ClassUnavailable
)

// Parker is implemented by stores that give parked messages back when their time
// has come. Without it failed messages are tried again in their lanes only.
type Parker interface {
	// Lease takes parked messages that are due: of those without a lane, every
	// one in the state ParkedRetry whose time has come; of a lane, in the order of
	// their ids, ParkedWaiting ones and such that are due, from the first that is
	// neither dead (unless r.BlockedByDead) nor discarded on, and only while none
	// before it is leased or has its time to come. Rows that somebody has leased
	// are passed over without waiting; a lease that has run out counts for
	// nothing. Without r.Keep lanes count for nothing.
	//
	// Several processes may call it at once: no row is leased to two.
	Lease(ctx context.Context, r LeaseRequest) (Leased, error)

	// Release ends leases: the rows can be leased again at once. A lease that is
	// over is passed over.
	Release(ctx context.Context, leases []Lease) error

	// PurgeDead deletes dead and discarded messages that have been so for longer
	// than age, at most limit in one call and the oldest first, and returns how
	// many. With blocked, dead messages that have a lane are kept: they hold it.
	PurgeDead(ctx context.Context, consumer string, age time.Duration, blocked bool, limit int) (int, error)
}

// LeaseRequest is what a feeder asks for.
type LeaseRequest struct {
	// Consumer whose rows are wanted.
	Consumer string
	// Limit is the highest number of rows; at least 1.
	Limit int
	// For is how long the lease lasts, by the database's clock; positive.
	For time.Duration
	// Worker is recorded with the rows.
	Worker string
	// Order is that of BeginOptions; its bounds say nothing here.
	Order Order
}

// Leased is what a feeder gets.
type Leased struct {
	// Rows are whole, with Lease set, those of a lane in their order.
	Rows []ParkedRecord
	// Next is the time until the next row becomes due, as far as that is known
	// now; negative when none waits for a time. A row that was left out because of
	// Limit is due: zero.
	Next time.Duration
}

// Undertaker is implemented by stores through which a person can see to parked
// messages. The rows are named by ParkedRecord.ID.
type Undertaker interface {
	// RetryParked makes messages that are dead (or wait for a time) due now, with
	// all their attempts before them. It returns how many it did; rows that are
	// gone, waiting, discarded, or leased at the moment are passed over.
	RetryParked(ctx context.Context, ids []int64) (int, error)

	// DiscardParked gives messages up: body and headers are deleted, and the row
	// stays as ParkedDiscarded, so that a redelivery of the message does not run,
	// until it is purged like a dead letter. note says who and why, it must hold
	// no personal data. It returns how many it did; rows that are gone, discarded,
	// or leased at the moment are passed over.
	DiscardParked(ctx context.Context, ids []int64, note string) (int, error)

	// GroupParked counts parked messages by Failure, reason and state, the largest
	// group first. After and Limit of f bound nothing.
	GroupParked(ctx context.Context, f ParkedFilter) ([]ParkedGroup, error)
}

// PoolSizer is implemented by stores whose number of connections is bounded.
type PoolSizer interface {
	// PoolSize returns how many transactions can be open at once; 0 when
	// there is no bound.
	PoolSize() int
}

// Sealer is implemented by batches whose transaction can become unfit for the
// next message's handler, because a handler changed settings of the transaction
// (set local, set_config: a search path, a tenant for row-level security).
type Sealer interface {
	// Sealed reports that no further handler shall be started in this batch.
	// What is finished can be committed.
	Sealed() bool
}

// Inspector is implemented by stores that can answer an operator's questions.
type Inspector interface {
	// Find returns the rows of a message key over all consumers and tenants,
	// ordered by consumer and tenant; nil when there are none.
	Find(ctx context.Context, messageKey string) ([]Record, error)

	// ListParked returns parked rows, oldest first, without bodies and headers.
	ListParked(ctx context.Context, f ParkedFilter) ([]ParkedRecord, error)

	// GetParked returns one parked row whole. ErrNotFound when there is none.
	GetParked(ctx context.Context, id int64) (*ParkedRecord, error)
}

// Marker is implemented by stores that keep track of the Runs of a consumer, and of
// the messages that are run with care after one of them has died: that way a
// message that kills its process is found out. Without it such a message kills one
// process after the other.
type Marker interface {
	// Beat records that a Run is alive, now by the database's clock, whether or not
	// it was recorded before. It returns all recorded Runs of the consumer as they
	// were just before that, with how long ago each of them beat; so a Run that was
	// not recorded is not among them the first time.
	Beat(ctx context.Context, consumer string, r RunRecord) ([]RunRecord, error)

	// EndRuns forgets Runs, by their ids; ids that are not there are passed over. It
	// may also delete marks of the consumer that count no more, see MarkStart.
	EndRuns(ctx context.Context, consumer string, ids ...string) error

	// MarkStart records, committed when it returns, that the message of a claim is
	// about to be run, and returns how many such marks it has now, from 1. It
	// returns 0 and records nothing when the key has a row within its window: then the
	// message is not run. Marks are counted for each key and fingerprint; those that
	// nobody has touched for MarkRetention count no more.
	MarkStart(ctx context.Context, c Claim) (int, error)

	// UnmarkStart takes back one mark of the claim's message, or all of them. When
	// there is none it does nothing.
	UnmarkStart(ctx context.Context, c Claim, all bool) error
}

// MarkRetention is how long a mark counts that no later one of its message
// followed, see Marker.
const MarkRetention = 7 * 24 * time.Hour

// RunRecord is a Run of a consumer as its store knows it.
type RunRecord struct {
	// ID is unique among all Runs.
	ID string
	// Worker is Config.Worker, for people.
	Worker string
	// Host is the name of the host that it runs on; empty when unknown.
	Host string
	// Age is the time since its last beat, by the database's clock; not negative. It
	// is set by Beat.
	Age time.Duration
}
