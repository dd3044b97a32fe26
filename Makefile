# The only entrance: people and CI call the same targets.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
INSTALLED := $(VENV)/.installed
.DEFAULT_GOAL := help
# A process a core, each with one thread: tests are many and small. They start hundreds of processes, which find the
# package compiled, also where the environment keeps Python from storing that. All but the benchmarks' own wait for a
# part of their time: half again as many processes as cores.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder
JOBS   := $(shell (nproc || sysctl -n hw.ncpu) 2>/dev/null | awk '{n = int($$1 * 3 / 2); print n < 8 ? n : 8}')
.PHONY: help demo test test-slow test-peers bench-check check format bench bench-gpu test-gpu chaos docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# torch goes in first and by its pin: whatever asks for torch later finds it there.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed, this is " + sys.version.split()[0] + "; try: make PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (torch first; a few minutes the first time)"
	@$(PIP) torch
	@$(PIP) -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## tune the digits workload, apply the pick, train with both (about 2 minutes)
	@$(BIN)/python scripts/demo.py

test: $(INSTALLED) ## the fast test set, offline, and what `make check` checks beside it
	@$(MAKE) --no-print-directory check > $(VENV)/.checked 2>&1 & checks=$$!; \
	$(PYTEST) --numprocesses $(JOBS) -m "not slow and not bench"; tested=$$?; \
	wait $$checks || { cat $(VENV)/.checked; exit 1; }; exit $$tested

test-slow: $(INSTALLED) ## the rest: every combination, long runs, trainings and servers that are killed
	@$(PYTEST) --numprocesses $(JOBS) -m "slow and not bench"

bench-check: $(INSTALLED) ## the tests of the benchmarks' own helpers
	@$(PYTEST) -m bench

test-peers: $(INSTALLED) ## integrations and trackers against the real Lightning, transformers, MLflow and W&B, in the peers' environment
	@$(BIN)/python -m benchmarks --peer-tests

check: $(INSTALLED) ## format, lint, types of the torch-free half, import contracts
	@$(BIN)/ruff format --check --quiet . || (echo "run 'make format'"; exit 1)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/basedpyright
	@$(BIN)/lint-imports --no-cache

format: $(INSTALLED) ## format and fix what ruff can fix
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --fix --quiet .

bench: $(INSTALLED) ## all benchmarks, peers in an environment of their own; writes benchmarks/results/
	@$(BIN)/python -m benchmarks --all

bench-gpu: $(INSTALLED) ## the benchmarks that have a part on an NVIDIA GPU; writes benchmarks/results/*-cuda.json
	@$(BIN)/python -m benchmarks --all --device cuda

test-gpu: $(INSTALLED) ## the tests that need an NVIDIA GPU
	@$(BIN)/python -m pytest -m gpu

chaos: $(INSTALLED) ## trials that fail in every known way, searches and trainings of a lab that are killed (15 minutes); a lab in CHAOS_MINUTES (30) of trouble
	@$(BIN)/python -m pytest -m chaos tests/chaos

docs: $(INSTALLED) ## write the generated pages again
	@$(BIN)/python -m fulltilt.config.document > docs/config.md
	@$(BIN)/python -m benchmarks._document > docs/measured.md
	@$(BIN)/python -m benchmarks._readme
	@$(BIN)/python scripts/draw_readme.py

clean: ## remove the environments and what the demo wrote; runs/ stays
	rm -rf $(VENV) .venv-peers demo
