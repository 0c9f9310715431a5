# Everything runs in a virtual environment of its own; `make help` lists the targets.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
DRAFTING := --speculative dspark --compare --max-new-tokens 64

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint type bench

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.installed  ## write text on four local ranks, with and without drafting
	$(BIN)/meshspark generate --tp 2 --ep 4 --prompt 'def read_header(file):' $(DRAFTING)

test: $(VENV)/.test-installed  ## the tests that CI runs
	$(BIN)/python -m pytest tests

test-all: $(VENV)/.test-installed  ## every test, the slow ones too
	$(BIN)/python -m pytest tests -m "slow or not slow"

lint: $(VENV)/.dev-installed  ## style, imports between floors, spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/codespell

type: $(VENV)/.dev-installed  ## static types
	$(BIN)/mypy

bench: $(VENV)/.test-installed  ## decode speed of the sample
	$(BIN)/meshspark bench decode --case sample

# torch goes first and alone: what follows then finds it there and fetches no second build of it.
$(VENV)/.torch-installed: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet -c constraints.txt torch
	touch $@

$(VENV)/.installed: $(VENV)/.torch-installed pyproject.toml
	$(PIP) install --quiet -c constraints.txt -e .
	touch $@

$(VENV)/.test-installed: $(VENV)/.installed
	$(PIP) install --quiet -c constraints.txt -e '.[test]'
	touch $@

$(VENV)/.dev-installed: $(VENV)/.test-installed
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	touch $@
