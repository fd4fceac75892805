package sqs

import (
	"context"
	"fmt"
	"net/http"

	"github.com/aws/aws-sdk-go-v2/aws"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
	awssqs "github.com/aws/aws-sdk-go-v2/service/sqs"
)

// Client is the part of the client of aws-sdk-go-v2/service/sqs that a Source uses.
// *sqs.Client of that package is one. Its methods are called concurrently and must
// obey their contexts.
type Client interface {
	GetQueueUrl(ctx context.Context, in *awssqs.GetQueueUrlInput, opts ...func(*awssqs.Options)) (*awssqs.GetQueueUrlOutput, error)
	GetQueueAttributes(ctx context.Context, in *awssqs.GetQueueAttributesInput, opts ...func(*awssqs.Options)) (*awssqs.GetQueueAttributesOutput, error)
	ReceiveMessage(ctx context.Context, in *awssqs.ReceiveMessageInput, opts ...func(*awssqs.Options)) (*awssqs.ReceiveMessageOutput, error)
	DeleteMessage(ctx context.Context, in *awssqs.DeleteMessageInput, opts ...func(*awssqs.Options)) (*awssqs.DeleteMessageOutput, error)
	DeleteMessageBatch(ctx context.Context, in *awssqs.DeleteMessageBatchInput, opts ...func(*awssqs.Options)) (*awssqs.DeleteMessageBatchOutput, error)
	ChangeMessageVisibility(ctx context.Context, in *awssqs.ChangeMessageVisibilityInput, opts ...func(*awssqs.Options)) (*awssqs.ChangeMessageVisibilityOutput, error)
	ChangeMessageVisibilityBatch(ctx context.Context, in *awssqs.ChangeMessageVisibilityBatchInput, opts ...func(*awssqs.Options)) (*awssqs.ChangeMessageVisibilityBatchOutput, error)
}

var _ Client = (*awssqs.Client)(nil)

// localRegion is signed for when an endpoint is given and no region is known.
const localRegion = "us-east-1"

// newClient returns Config.Client, or one from the default configuration chain with
// connections of its own, which release ends.
func newClient(ctx context.Context, cfg *Config, a address) (client Client, release func(), err error) {
	if cfg.Client != nil {
		return cfg.Client, func() {}, nil
	}
	loading, cancel := context.WithTimeout(ctx, cfg.RequestTimeout)
	defer cancel()
	loaded, err := config.LoadDefaultConfig(loading)
	if err != nil {
		return nil, nil, errorf("load the AWS configuration", err)
	}
	region := loaded.Region
	if a.region != "" {
		region = a.region
	}
	if cfg.Region != "" {
		region = cfg.Region
	}
	endpoint := cfg.Endpoint
	if endpoint == "" {
		endpoint = a.endpoint
	}
	if region == "" && endpoint != "" {
		region = localRegion
	}
	if region == "" {
		return nil, nil, ErrNoRegion
	}
	if !isRegion(region) {
		return nil, nil, fmt.Errorf("%w: %q of the AWS configuration is none: it %s", ErrNoRegion, region, regionRule)
	}
	release = func() {}
	if loaded.HTTPClient == nil {
		loaded.HTTPClient = awshttp.NewBuildableClient()
	}
	if shared, ok := loaded.HTTPClient.(*awshttp.BuildableClient); ok {
		transport := shared.GetTransport() // a copy
		transport.MaxIdleConnsPerHost = 2*cfg.Pollers + 2*senders
		release = transport.CloseIdleConnections
		loaded.HTTPClient = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	return awssqs.NewFromConfig(loaded, func(o *awssqs.Options) {
		o.Region = region
		if endpoint != "" {
			o.BaseEndpoint = aws.String(endpoint)
		}
	}), release, nil
}
