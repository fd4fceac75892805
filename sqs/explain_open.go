package sqs

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"

	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/sqs/types"
	"github.com/aws/smithy-go"
	smithyhttp "github.com/aws/smithy-go/transport/http"
)

const (
	adviceEndpoint    = "check Config.Endpoint, AWS_ENDPOINT_URL and proxies on the way"
	adviceCredentials = "none were found: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or give the process a role"

	// metadataService is where the default chain asks last.
	metadataService = "ec2imds"
)

// explainLook is explain for the first look at a queue, where more is final: a
// mistake in a configuration should show at once. Later the same may be trouble of a
// proxy, or of the service that gives credentials, and pass.
func explainLook(err error) error {
	var address *types.InvalidAddress
	var empty *credentials.StaticCredentialsEmptyError
	var certificate *tls.CertificateVerificationError
	var unknown *net.DNSError
	switch {
	case errors.As(err, &address) || errorCode(err) == "InvalidAddress":
		return fmt.Errorf("%w: the server knows no such address: check the URL and the region: %w", ErrMalformed, err)
	case errors.As(err, &empty) || askedMetadata(err):
		return fmt.Errorf("%w: %s: %w", ErrLogin, adviceCredentials, err)
	case errors.As(err, &certificate):
		return fmt.Errorf("%w: its certificate cannot be verified: check the host of the endpoint and the trusted authorities: %w", ErrNotSQS, err)
	case errors.Is(err, http.ErrSchemeMismatch):
		return fmt.Errorf("%w: it speaks HTTP without TLS: give the endpoint as http://: %w", ErrNotSQS, err)
	case errors.As(err, &unknown) && unknown.IsNotFound:
		return fmt.Errorf("check the region and the endpoint: %w", err) // It may pass.
	}
	if what := foreign(err); what != "" {
		return fmt.Errorf("%w: it answers %s: %s: %w", ErrNotSQS, what, adviceEndpoint, err)
	}
	return explain(err)
}

// askedMetadata tells whether credentials were looked for everywhere and not found.
func askedMetadata(err error) bool {
	for {
		var operation *smithy.OperationError
		if !errors.As(err, &operation) {
			return false
		}
		if operation.Service() == metadataService {
			return true
		}
		err = operation.Err
	}
}

// foreign says of an answer that SQS does not give what it is; empty: it is none. An
// answer of 500 or more comes from anything on the way, and passes.
func foreign(err error) string {
	var unreadable *smithy.DeserializationError
	var response *smithyhttp.ResponseError
	if !errors.As(err, &unreadable) || !errors.As(err, &response) || response.Response == nil || response.HTTPStatusCode() >= http.StatusInternalServerError {
		return ""
	}
	kind := response.Response.Header.Get("Content-Type")
	if strings.Contains(kind, "json") {
		return "" // Cut off on its way.
	}
	if kind == "" {
		kind = "something unknown"
	}
	return fmt.Sprintf("HTTP %d with %.50s", response.HTTPStatusCode(), kind)
}
