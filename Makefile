# `make` lists the targets. Everything runs in .venv, which the first target that needs it makes.

.SHELLFLAGS := -eu -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Quiet but for errors: some machines' pip settings make it warn once a package.
PIP_INSTALL := -m pip install -qq --disable-pip-version-check

# The first interpreter that is 3.11 or newer and can make an environment; PYTHON=... overrides.
FIND_PYTHON = for name in python3.11 python3.12 python3.13 python3 python; do \
	if "$$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' \
		>/dev/null 2>&1; then echo "$$name"; break; fi; done
PYTHON ?= $(shell $(FIND_PYTHON))

.PHONY: help venv demo test test-slow test-nixl test-clients test-browser lint format types bench bench-gpu protos golden dashboards clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## make .venv and install the package with its tools

$(STAMP): pyproject.toml constraints.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 or newer with ensurepip found; set PYTHON=/path/to/python" >&2; \
		exit 1; fi
	@echo "Installing into $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv "$(VENV)"
	@"$(BIN)/python" $(PIP_INSTALL) \
		--constraint constraints.txt --editable '.[dev]'
	@touch "$@"

demo: $(STAMP) ## ask the default model a question, with prefill and decode on different nodes
	@"$(BIN)/flowkv" generate --chat --warmup --prefill-nodes 1 --decode-nodes 1 \
		"What is the capital of France?"

test: $(STAMP) ## run the tests
	"$(BIN)/pytest"

test-slow: $(STAMP) ## run the tests, slow ones too
	"$(BIN)/pytest" -m ""

NIXL_VENV := build/nixl

# Without its dependencies: torch is large, and NIXL imports it only where it is given tensors.
test-nixl: ## run the tests of the nixl backend, in an environment of its own
	@"$(PYTHON)" -m venv "$(NIXL_VENV)"
	@"$(NIXL_VENV)/bin/python" $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@"$(NIXL_VENV)/bin/python" $(PIP_INSTALL) --no-deps 'nixl-cu12>=1.5'
	"$(NIXL_VENV)/bin/python" -m pytest tests/test_transfer_nixl.py

CLIENTS ?=

test-clients: $(STAMP) ## check a server with the clients people have (CLIENTS="openai smg" picks)
	"$(BIN)/python" -m tests.clients $(CLIENTS)

test-browser: $(STAMP) ## check the live page in a Chromium that is installed
	"$(BIN)/pytest" tests/browser/live_page.py

lint: $(STAMP) types ## ruff (pickle is banned there), mypy, import layers
	"$(BIN)/ruff" check .
	"$(BIN)/ruff" format --check .
	"$(BIN)/lint-imports"

types: $(STAMP) ## mypy, strict
	"$(BIN)/mypy"

format: $(STAMP) ## format, and fix what can be fixed
	"$(BIN)/ruff" format .
	"$(BIN)/ruff" check --fix .

bench: $(STAMP) ## measure the engine and the allocator
	"$(BIN)/flowkv" bench allocator
	"$(BIN)/flowkv" bench engine

bench-gpu: $(STAMP) ## check and time the GPU kernels
	"$(BIN)/python" -m benchmarks.gpu_kernels

dashboards: $(STAMP) ## remake the Grafana dashboard
	"$(BIN)/python" -m flowkv_jax.metrics.dashboard docs/grafana

# The compiler is older than the one in .venv on purpose; generate.py says why.
PROTOC_VENV := build/protoc
COMPILER_VERSION = $(shell sed -n 's/^COMPILER_VERSION = "\(.*\)"/\1/p' flowkv_jax/rpc/generate.py)

protos: ## regenerate the gRPC stubs, in an environment of its own
	@"$(PYTHON)" -m venv "$(PROTOC_VENV)"
	@"$(PROTOC_VENV)/bin/python" $(PIP_INSTALL) \
		"grpcio-tools==$(COMPILER_VERSION)"
	"$(PROTOC_VENV)/bin/python" flowkv_jax/rpc/generate.py

GOLDEN_VENV := build/golden
TOKENIZER ?= $(error set TOKENIZER to a folder with tokenizer.json of SmolLM2-135M-Instruct)

golden: $(STAMP) ## remake the golden outputs with transformers: make golden TOKENIZER=FOLDER
	@"$(PYTHON)" -m venv "$(GOLDEN_VENV)"
	@"$(GOLDEN_VENV)/bin/python" $(PIP_INSTALL) \
		torch transformers gguf ml_dtypes safetensors
	"$(GOLDEN_VENV)/bin/python" tests/goldens/make_goldens.py \
		--gguf "$$("$(BIN)/flowkv" pull)" --tokenizer "$(TOKENIZER)"

clean: ## remove .venv and caches; the model stays in its cache folder
	rm -rf "$(VENV)" build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache ./*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
