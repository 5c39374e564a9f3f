# `make demo` and `make test` work as the first command typed: whatever they need is set up once, in .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.kvwire-setup
DEMO_ARGS ?=
PYTEST_ARGS ?=
BENCH_ARGS ?=
export PYTHON

.DEFAULT_GOAL := help

.PHONY: help
help: ## what can be typed
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## (.*)/  \1\t\2/' | expand -t 20

.PHONY: setup
setup: $(STAMP) ## the environment in .venv, vLLM on a CPU included (about two minutes, once)

$(STAMP): pyproject.toml scripts/setup.sh $(wildcard requirements/*.txt)
	scripts/setup.sh $(VENV)
	@touch $@

.PHONY: demo
demo: setup ## one engine stores, a fresh one finds it; DEMO_ARGS="--path shm|ucx|inline"
	$(BIN)/kvwire demo $(DEMO_ARGS)

.PHONY: demo-fleet
demo-fleet: setup ## the same with a coordinator and two servers, between which the bytes move
	$(BIN)/kvwire demo --fleet $(DEMO_ARGS)

.PHONY: test
test: setup check-proto ## the tests, vLLM included; PYTEST_ARGS="-m 'not e2e'" leaves vLLM out
	@scripts/programs.sh
	scripts/test.sh $(VENV) $(PYTEST_ARGS)

.PHONY: e2e
e2e: setup ## real vLLM on a CPU: same text with kvwire and without, hits, restarts, faults; PYTEST_ARGS="-k openai"
	$(BIN)/python -m pytest tests/e2e --durations=15 $(PYTEST_ARGS)

.PHONY: check
check: setup lint types layers check-proto proto-lint ## ruff, mypy, layers, buf, stubs

.PHONY: lint
lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

.PHONY: format
format: setup ## rewrites Python and .proto files in the house's format
	$(BIN)/ruff check --fix-only --select I .
	$(BIN)/ruff format .
	$(BIN)/buf format -w

.PHONY: types
types: setup
	$(BIN)/mypy

.PHONY: layers
layers: setup
	$(BIN)/lint-imports

.PHONY: proto
proto: ## regenerates proto/gen
	$(PYTHON) scripts/genproto.py

.PHONY: check-proto
check-proto: ## are the committed stubs byte for byte what the schemas generate?
	$(PYTHON) scripts/genproto.py --check

.PHONY: proto-lint
proto-lint: setup proto-breaking
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code

# proto/baseline.binpb is the schema of the last release: `buf build -o proto/baseline.binpb`, committed with it.
.PHONY: proto-breaking
proto-breaking: setup ## no change breaks a client of the last release
	@if [ -f proto/baseline.binpb ]; then $(BIN)/buf breaking --against proto/baseline.binpb; \
	else echo "proto-breaking: skipped, there is no release yet (no proto/baseline.binpb)"; fi

.PHONY: bench
bench: setup ## data paths against memcpy, calls against a bare gRPC echo
	$(BIN)/kvwire bench transfer $(BENCH_ARGS)
	$(BIN)/kvwire bench control $(BENCH_ARGS)

.PHONY: wheel
wheel: setup ## builds the wheel and tries it in an environment of its own
	$(BIN)/python scripts/check_wheel.py

# After a try with newer versions: what is installed now becomes what everybody gets.
.PHONY: constraints
constraints: setup
	{ grep '^#' requirements/constraints.txt; \
	  $(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(kvwire|xgrammar|vllm|apache-tvm-ffi)\b' | sed 's/+cpu$$//' | sort -f; \
	} > build/constraints.new && mv build/constraints.new requirements/constraints.txt
