# Everything here needs Go, git and make, and sets up the rest by itself: the tools that tools/go.mod pins are built
# once, into .cache/bin (a first build takes some minutes), and again only when their versions or Go change.

GO ?= go
# Some systems come without a C compiler, which the race detector needs on Linux.
RACE := $(if $(shell command -v $$($(GO) env CC) 2>/dev/null),-race)
COUNT ?= 1
BENCH ?= .
BACKEND ?= memory
export BACKEND

TOOLS := .cache/bin/$(shell { cat tools/go.mod tools/go.sum; $(GO) env GOVERSION GOOS GOARCH; } | git hash-object --stdin)
BUF := $(TOOLS)/buf
LINTER := $(TOOLS)/golangci-lint

# Tests and generators that run buf take this one.
export LEASEBUS_BUF := $(CURDIR)/$(BUF)

.DEFAULT_GOAL := help

.PHONY: help
help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: ## Run the example service: publish, retry, dead-letter, requeue. BACKEND=postgres or amqp keeps its messages there.
	$(if $(filter postgres,$(BACKEND)),$(GO) run ./internal/testservers/cmd/ready postgres) \
	$(if $(filter amqp,$(BACKEND)),$(GO) run ./internal/testservers/cmd/ready rabbitmq) $(GO) run ./examples/orders/cmd/demo

.PHONY: test
test: $(BUF) ## Run all tests, with the race detector.
	$(if $(RACE),,@echo "No C compiler: the tests run without the race detector.")
	$(GO) run ./internal/testservers/cmd/ready
	$(GO) test $(RACE) -count=$(COUNT) -timeout 20m ./...
	$(GO) -C bench test -count=$(COUNT) -timeout 20m ./...

.PHONY: test-short
test-short: $(BUF) ## Run the tests that need no server and little time, without the race detector.
	$(GO) test -short -timeout 5m ./...

.PHONY: bench
bench: ## Compare with other queues: a table, and JSON and charts in bench/results. Takes an hour.
	$(GO) -C bench run . -rounds 3 -out results

.PHONY: bench-quick
bench-quick: ## The same in less than a minute: the most telling cases.
	$(GO) -C bench run . -quick -quiet -rounds 5 -budget 38s

.PHONY: bench-amqp
bench-amqp: ## Compare with other clients of RabbitMQ: a table, and JSON and charts in bench/results-amqp.
	$(GO) -C bench run . -amqp -rounds 3 -out results-amqp

.PHONY: bench-amqp-quick
bench-amqp-quick: ## The same in less than a minute.
	$(GO) -C bench run . -amqp -quick -quiet -rounds 5 -budget 38s

.PHONY: microbench
microbench: ## Run the Go benchmarks; BENCH=regexp selects, COUNT=10 repeats for benchstat.
	$(GO) test -run '^$$' -bench '$(BENCH)' -benchmem -count=$(COUNT) ./runtime/...

.PHONY: generate
generate: $(BUF) golden-update ## Write all generated files: from the proto files, the goldens, the contract's table.
	$(BUF) generate
	$(BUF) generate --template examples/buf.gen.yaml
	$(GO) run ./internal/contract

.PHONY: golden-update
golden-update: $(BUF) ## Write what the generator emits now as the wanted output of golden/.
	rm -f golden/messages_test.go # it is written again, and would not compile where a message has gone
	$(GO) test ./golden -run '^(TestGolden$$|TestRefused|TestMessagesAreComplete$$)' -count=1 -update

.PHONY: check-generated
check-generated: $(BUF) ## Fail if a generated file is not what its source comes to.
	GO="$(GO)" MAKE="$(MAKE)" tools/check-generated.sh

.PHONY: lint
lint: $(BUF) $(LINTER) ## Run go vet, golangci-lint, and buf's lint, format and breaking-change checks.
	$(GO) vet ./...
	$(LINTER) run ./...
	cd bench && $(GO) vet ./... && $(CURDIR)/$(LINTER) run ./...
	$(BUF) lint
	$(BUF) format --diff --exit-code
	BUF="$(BUF)" tools/breaking.sh

.PHONY: format
format: $(BUF) $(LINTER) ## Format Go and proto files.
	$(LINTER) fmt
	$(BUF) format --write

.PHONY: clean
clean: ## Remove the tools that were built.
	rm -rf .cache

$(BUF): PACKAGE := github.com/bufbuild/buf/cmd/buf
$(LINTER): PACKAGE := github.com/golangci/golangci-lint/v2/cmd/golangci-lint
$(BUF) $(LINTER):
	@echo "Building $(notdir $@) as pinned in tools/go.mod; this happens once and takes some minutes."
	@mkdir -p $(TOOLS)
	$(GO) -C tools build -o $(CURDIR)/$@ $(PACKAGE)
