# make test      everything, with servers: starts them, runs the tests of all modules, stops them
# make unit      the tests that need no server
# make soak      make test at full size and length. The ten minutes of chaos alone:
#                make soak TESTFLAGS='-v -run TestChaos'; with ACKAFTER_TEST_SEED they
#                are those of an earlier run
# make lint      the linters, over all modules
# make bench     the benchmarks, with servers: those of the packages, then the
#                comparison of bench/ (BENCHFLAGS='-events 200000 -reps 9')
# make services  starts the servers and leaves them running; make services-down stops them
#
# TESTFLAGS is handed to go test: make test TESTFLAGS='-v -run Kafka', and
# BENCHFLAGS to the comparison in bench: make bench BENCHFLAGS='-only loop,batch'.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory

SERVICES := integration_test/services
# Every folder with a go.mod; "." is the published module.
MODULES := . $(patsubst %/go.mod,%,$(wildcard */go.mod */*/go.mod))
GOLANGCI_VERSION := 2.12.2

# The race detector needs a C compiler. Looked up when used: `with` may have
# installed it.
RACE = $(if $(shell command -v $$(go env CC)),-race)
TIMEOUT ?= 30m
TESTFLAGS ?=
BENCHFLAGS ?=

.PHONY: test unit soak linter lint bench services services-down test-modules bench-modules \
	download tidy tidy-check fmt fmt-check

test:
	@$(SERVICES)/with $(MAKE) test-modules

soak:
	@ACKAFTER_TEST_SOAK=1 $(SERVICES)/with $(MAKE) test-modules TIMEOUT=3h

# The tests of all modules on the servers that the environment names. -count=1:
# a cached result says nothing about a server.
test-modules:
	@status=0; \
	for module in $(MODULES); do \
	  start=$$SECONDS; \
	  echo "=== test $$module"; \
	  (cd "$$module" && go vet ./...) || status=1; \
  (cd "$$module" && go test $(RACE) -count=1 -timeout $(TIMEOUT) $(TESTFLAGS) ./...) || status=1; \
	  echo "=== test $$module: $$((SECONDS - start)) s"; \
	done; \
	exit $$status

unit:
	@unset $${!ACKAFTER_TEST_@}; go vet ./... && go test $(RACE) -timeout $(TIMEOUT) $(TESTFLAGS) ./...

# The linter of the pinned version: the one on the PATH, else one built here.
LINTER = $(or $(shell linter=$$(command -v golangci-lint) && \
	"$$linter" version 2>/dev/null | grep -qF "version $(GOLANGCI_VERSION) " && echo "$$linter"),$(LOCAL_LINTER))
LOCAL_LINTER := $(CURDIR)/bin/golangci-lint-$(GOLANGCI_VERSION)

$(LOCAL_LINTER):
	GOBIN=$(CURDIR)/bin/install go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v$(GOLANGCI_VERSION)
	@mv bin/install/golangci-lint $@ && rmdir bin/install

linter: $(LINTER)

# A cache of this checkout's own: a shared one remembers findings under the paths
# of other checkouts, where the exclusions do not match.
lint: $(LINTER)
	@status=0; export GOLANGCI_LINT_CACHE="$(CURDIR)/bin/lint-cache"; \
	for module in $(MODULES); do \
	  echo "=== lint $$module"; \
	  (cd "$$module" && $< run --allow-parallel-runners --config "$(CURDIR)/.golangci.yml" ./...) || status=1; \
	done; \
	exit $$status

bench:
	@$(SERVICES)/with $(MAKE) bench-modules

bench-modules:
	@for module in $(MODULES); do (cd "$$module" && go test -run '^$$' -bench . -benchmem $(TESTFLAGS) ./...); done
	@go -C bench run . $(BENCHFLAGS)

services:
	@$(SERVICES)/up && $(SERVICES)/env

services-down:
	@$(SERVICES)/down

download:
	@for module in $(MODULES); do (cd "$$module" && go mod download); done

tidy:
	@for module in $(MODULES); do (cd "$$module" && go mod tidy); done

tidy-check:
	@for module in $(MODULES); do (cd "$$module" && go mod tidy -diff); done

fmt:
	@gofmt -l -w .

fmt-check:
	@files=$$(gofmt -l .); [ -z "$$files" ] || { printf 'not formatted by gofmt:\n%s\n' "$$files"; exit 1; }
