# Each target does all the set-up that it needs on a fresh machine.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow check lint types imports bench bench-peers clean

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: $(READY)
	$(BIN)/arrow-tq demo

test: $(READY)
	$(BIN)/python -m pytest -n auto

slow: $(READY)
	$(BIN)/python -m pytest -m slow -n 0
	ARROW_TQ_THOROUGH=1 $(BIN)/python -m pytest -n auto tests/property

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

check: lint types imports test

bench: $(READY)
	$(BIN)/python -m benchmarks

# Beside the systems that people use for the same job, in an environment of their own. What cannot be
# installed is reported in the table.
PEERS := .venv-peers
bench-peers:
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --upgrade pip
	$(PEERS)/bin/pip install --quiet -c constraints.txt torch
	$(PEERS)/bin/pip install --quiet -c constraints.txt -e '.[server]'
	-$(PEERS)/bin/pip install --quiet ray
	-$(PEERS)/bin/pip install --quiet TransferQueue tensordict
	-$(PEERS)/bin/pip install --quiet mooncake-transfer-engine-non-cuda
	$(PEERS)/bin/python -m benchmarks.peers

clean:
	rm -rf $(VENV) $(PEERS) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
