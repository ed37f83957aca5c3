# Every target sets up .venv by itself. Another Python: PYTHON=python3.12 make test
PYTHON ?= python3

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
VLLM := 0.32.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-fast test-compat test-long mutants bench docs lint clean

help: ## show this list
	@echo "Targets (each sets up .venv by itself; another Python: PYTHON=python3.12 make test):"
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 20

demo: .venv/.vllm ## chats that do not fit on the device, in a real vLLM: without offload, eager, lazy (two minutes, no GPU)
	@echo "==> demo"
	@$(BIN)/python -m demo $(ARGS)

test: lint docs .venv/.vllm .venv/.prometheus ## lint, types, docs and all tests, with a real vLLM on the CPU (the first time two minutes more)
	@echo "==> pytest"
	@$(BIN)/python -m pytest

test-fast: lint ## the same without the tests that need vLLM and torch, which are then not installed (some minutes)
	@echo "==> pytest, without tests that need vLLM or torch"
	@$(BIN)/python -m pytest --ignore=tests/vllm --ignore=tests/copier --ignore=tests/gpu --ignore=tests/bench/test_bytes.py

test-compat: .venv/.vllm ## the core cases on six releases of vLLM; writes docs/tested-versions.md (minutes, 2.5 GB)
	@echo "==> tools/compat.py"
	@$(BIN)/python tools/compat.py

test-long: .venv/.ready ## more than a million engine steps under random traffic and faults (ten minutes and more)
	@echo "==> state machine, until a million steps were checked"
	@FOREBAY_PROFILE=long $(BIN)/python -m pytest tests/test_state_machine.py --timeout=0 -s

mutants: .venv/.vllm ## break the code on purpose, line by line: does a test notice? (minutes)
	@echo "==> tools/mutants.py"
	@$(BIN)/python tools/mutants.py

bench: .venv/.ready ## what a block costs the scheduler
	@echo "==> bench/scheduler_cost.py"
	@$(BIN)/python bench/scheduler_cost.py

docs: .venv/.docs ## the site, from docs and README, into build/site; warnings are errors
	@echo "==> sphinx"
	@$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet --fresh-env --conf-dir tools/site . build/site
	@echo "see build/site/index.html"

lint: .venv/.ready ## ruff and mypy
	@echo "==> ruff check"
	@$(BIN)/ruff check .
	@echo "==> ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "==> mypy"
	@$(BIN)/mypy

clean: ## remove .venv, .venv-compat, caches and build output
	@echo "==> removing .venv, .venv-compat, caches and build output"
	@rm -rf .venv .venv-compat .hypothesis .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.ready: pyproject.toml
	@found=$$($(PYTHON) -c 'import platform; print(platform.python_version())' 2>/dev/null || true); \
	if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		echo "Forebay needs Python 3.11 or newer; $(PYTHON) is $${found:-not there} (try: PYTHON=python3.12 make)" >&2; \
		exit 1; \
	fi; \
	echo "==> setting up .venv with Python $$found"
	@# Interrupted, it leaves files in its temporary folder, and its own pip ends a moment after it.
	@temporary=$$(mktemp -d); trap 'sleep 1; rm -rf "$$temporary"; echo "interrupted" >&2; exit 130' INT; \
	status=0; TMPDIR=$$temporary $(PYTHON) -m venv .venv 2>"$$temporary/errors" || status=$$?; \
	tail -n 1 "$$temporary/errors" >&2; rm -rf "$$temporary"; exit $$status
	@echo "==> installing forebay and its development tools"
	@$(BIN)/python -m pip install -e '.[dev]' | grep --line-buffered -E '^(Collecting|Successfully)'
	@touch $@

.venv/.vllm: .venv/.ready tools/install_vllm.py
	@$(BIN)/python tools/install_vllm.py $(VLLM)
	@touch $@

.venv/.docs: .venv/.ready
	@echo "==> installing what builds the site"
	@$(BIN)/python -m pip install -e '.[docs]' | grep --line-buffered -E '^(Collecting|Successfully)'
	@touch $@

# Where there is none to be had, the script says so, and the test that needs it is skipped.
.venv/.prometheus: .venv/.ready tools/install_prometheus.py
	@if $(BIN)/python tools/install_prometheus.py; then touch $@; fi
