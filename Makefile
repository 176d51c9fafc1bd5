# The commands a newcomer needs. Each does its own set-up: nothing but Python 3.11 and make has to be there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# With several processes on few cores a spinning OpenMP worker costs a factor of 20.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo stop test test-unit bench lint clean

help:
	@echo "make demo       set up, serve a tiny model, ask it something, leave the endpoint up"
	@echo "make stop       end what make demo started"
	@echo "make test       set up, lint, run all tests"
	@echo "make test-unit  only the fast tests"
	@echo "make bench      engine figures on this machine"
	@echo "make lint       ruff and mypy"

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, found $$($(PYTHON) --version 2>&1); set PYTHON=..." >&2; exit 1; }
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "installing torch (the CPU build) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo "installing the rest ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $(STAMP)

demo: setup
	@$(BIN)/python scripts/demo.py start

stop:
	@if [ -x $(BIN)/python ]; then $(BIN)/python scripts/demo.py stop; else echo "nothing to stop"; fi

lint: setup
	@$(BIN)/ruff check python test tools scripts benchmark
	@$(BIN)/ruff format --check python test tools scripts benchmark
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest

test-unit: setup
	@$(BIN)/python -m pytest test/unit -m "not slow"

bench: setup
	@$(BIN)/python benchmark/engine.py

clean: stop
	@rm -rf $(VENV) .demo build dist
