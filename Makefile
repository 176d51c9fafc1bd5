# The commands a newcomer needs. Each does its own set-up: nothing but Python 3.11 and make has to be there.
# PYTHON=... chooses the interpreter; pip's own settings (PIP_INDEX_URL and so on) are honoured.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check --no-input
TORCH := torch==2.13.0
NEEDED_GB := 3
SOURCES := python test tools scripts benchmark
# With several processes on few cores a spinning OpenMP worker costs a factor of 20.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo stop test test-unit bench lint clean

help:
	@echo "make demo       set up, serve a tiny model, ask it something, leave the endpoint up"
	@echo "make stop       end what make demo started"
	@echo "make test       set up, lint, run all tests"
	@echo "make test-unit  only the fast tests"
	@echo "make lint       ruff and mypy"
	@echo "make bench      engine figures on this machine"
	@echo "make setup      only the virtual environment"
	@echo "make clean      remove everything these commands made"

# Three stamps, so that a rerun does only what is missing and an interrupted one does not count.
setup: $(VENV)/.installed

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "error: Python 3.11 or newer is needed, '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -1); use make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import shutil, sys; sys.exit(shutil.disk_usage(".").free < $(NEEDED_GB) * 10**9)' || { \
		echo "error: less than $(NEEDED_GB) GB are free on this disk; the virtual environment needs them" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null || { \
		echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

# torch first and alone: with other versions sums may run in another order, and extensions are built against this one.
$(VENV)/.torch: $(VENV)/.created
	@echo "installing $(TORCH) into $(VENV) ..."
	@$(PIP) install $(TORCH) || { echo "error: $(TORCH) could not be installed (pip's reason is above)" >&2; exit 1; }
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing this package and its tools ..."
	@$(PIP) install --editable '.[dev]' || { echo "error: the dependencies could not be installed (pip's reason is above)" >&2; exit 1; }
	@touch $@

demo: setup
	@$(BIN)/python scripts/demo.py start

stop:
	@if [ -f $(VENV)/.installed ]; then $(BIN)/python scripts/demo.py stop; else echo "nothing to stop"; fi

lint: setup
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest

test-unit: setup
	@$(BIN)/python -m pytest test/unit -m "not slow"

bench: setup
	@$(BIN)/python benchmark/engine.py

clean:
	@if [ -f $(VENV)/.installed ]; then $(BIN)/python scripts/demo.py stop; fi
	@rm -rf $(VENV) .demo .cache build dist python/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
