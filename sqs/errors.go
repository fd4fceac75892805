package sqs

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	awsretry "github.com/aws/aws-sdk-go-v2/aws/retry"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

// Errors of this package. Test with errors.Is. Open returns them at once; Receive
// returns ErrNoQueue as Config.OnQueueDeleted says, ErrForbidden and ErrLogin when
// they last for longer than 30 s.
var (
	// ErrMalformed: what was given to Open is no name, URL or ARN of a queue.
	ErrMalformed = errors.New("this is no name, URL or ARN of a queue")

	// ErrNoRegion: nothing says in which AWS region the queue is.
	ErrNoRegion = errors.New("no region is known: set Config.Region or AWS_REGION, or give the queue's ARN")

	// ErrNotSQS: what answers is no SQS, or cannot be trusted to be one: a page of
	// HTML, another protocol, TLS mixed up, a certificate that cannot be verified.
	ErrNotSQS = errors.New("this is not SQS")

	// ErrNoQueue: the queue does not exist in this region and account.
	ErrNoQueue = errors.New("queue does not exist")

	// ErrForbidden: a permission is missing.
	ErrForbidden = errors.New("permission is missing")

	// ErrLogin: there are no credentials, or the access key, its signature or its token
	// is refused.
	ErrLogin = errors.New("credentials are missing or refused")
)

// permissions is what a source needs.
const permissions = "sqs:GetQueueUrl, sqs:GetQueueAttributes, sqs:ReceiveMessage, sqs:DeleteMessage and sqs:ChangeMessageVisibility"

const adviceNoQueue = "check its name (that of a FIFO queue ends in .fifo), the region, the account and the permission sqs:GetQueueUrl, or create it"

// errorf adds to an error what was being done.
func errorf(what string, err error) error { return fmt.Errorf("%s: %w", what, err) }

// explain adds to a refusal what it means and what to do. Other errors stay as they
// are: they pass.
func explain(err error) error {
	if err == nil {
		return nil
	}
	with := func(what error, advice string) error { return fmt.Errorf("%w: %s: %w", what, advice, err) }
	var missing *types.QueueDoesNotExist
	var kms *types.KmsAccessDenied
	var security *types.InvalidSecurity
	switch {
	case errors.As(err, &missing):
		return with(ErrNoQueue, adviceNoQueue)
	case errors.As(err, &kms):
		return with(ErrForbidden, "the role needs kms:Decrypt on the key of the queue")
	case errors.As(err, &security):
		return with(ErrLogin, "requests must be signed, over HTTPS")
	}
	switch code := errorCode(err); {
	case code == "AWS.SimpleQueueService.NonExistentQueue":
		return with(ErrNoQueue, adviceNoQueue)
	case strings.HasPrefix(code, "AccessDenied"):
		return with(ErrForbidden, "the role needs "+permissions+" on the queue")
	case slices.Contains(loginCodes, code):
		return with(ErrLogin, "check the access key, the session token, the region and the clock")
	}
	return err
}

// loginCodes are what AWS says about credentials.
var loginCodes = []string{
	"InvalidClientTokenId", "UnrecognizedClientException", "SignatureDoesNotMatch", "InvalidAccessKeyId",
	"InvalidSignatureException", "RequestTimeTooSkewed", "ExpiredToken", "ExpiredTokenException", "RequestExpired", "MissingAuthenticationToken",
	"MissingAuthenticationTokenException", "IncompleteSignature", "IncompleteSignatureException",
}

// errorCode is the code of an answer of the server without the name space that
// some servers put before it; empty for what is none.
func errorCode(err error) string {
	var api smithy.APIError
	if !errors.As(err, &api) {
		return ""
	}
	return plainCode(api.ErrorCode())
}

func plainCode(code string) string { return code[strings.LastIndexByte(code, '#')+1:] }

// isFinal tells whether trying again is of no use.
func isFinal(err error) bool {
	return errors.Is(err, ErrNoQueue) || errors.Is(err, ErrForbidden) || errors.Is(err, ErrLogin)
}

// isPassing tells whether a call failed for no reason that lies in what it said: it
// was throttled, the server had trouble, or there was no answer. Credentials may be
// renewed; when they are not, Receive ends.
func isPassing(err error) bool {
	var api smithy.APIError
	if errors.Is(err, ErrLogin) || !errors.As(err, &api) {
		return true
	}
	if _, throttled := awsretry.DefaultThrottleErrorCodes[errorCode(err)]; throttled {
		return true
	}
	var response *smithyhttp.ResponseError
	return errors.As(err, &response) && response.HTTPStatusCode() >= http.StatusInternalServerError
}

// isFinalAtOpen is isFinal for the first look at a queue.
func isFinalAtOpen(err error) bool {
	return isFinal(err) || errors.Is(err, ErrMalformed) || errors.Is(err, ErrNotSQS)
}

// staleCode tells whether the code of an entry of a batch says that its receipt
// handle is not valid any more, or was never: the message was delivered again, or
// is gone.
func staleCode(code string) bool {
	switch plainCode(code) {
	case "ReceiptHandleIsInvalid", "InvalidReceiptHandle", "MessageNotInflight", "AWS.SimpleQueueService.MessageNotInflight":
		return true
	}
	return false
}

// isStale is staleCode for the error of a call about one message. AWS says
// InvalidParameterValue of a handle that has expired.
func isStale(err error) bool {
	var invalid *types.ReceiptHandleIsInvalid
	var visible *types.MessageNotInflight
	if errors.As(err, &invalid) || errors.As(err, &visible) {
		return true
	}
	code := errorCode(err)
	return staleCode(code) || code == "InvalidParameterValue"
}
