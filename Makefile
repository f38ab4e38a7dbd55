# Each target does all the set-up that it needs on a fresh machine.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test slow check lint types imports bench curves bench-peers bench-head docs-figures clean

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

# Reports as JSON and plots as SVG go here; FIGURES=docs/plots makes the documentation's anew, a piece at a
# time with SUITES, CURVES and PAYLOADS. What a piece leaves out stays as it was.
FIGURES ?= build/figures
SUITES ?=
CURVES ?=
PAYLOADS ?=

bench: $(READY)
	$(BIN)/python -m benchmarks $(SUITES) --json $(FIGURES)/bench.json --add --plots $(FIGURES)
	$(BIN)/python -m benchmarks.goals $(FIGURES)

curves: $(READY)
	$(BIN)/python -m benchmarks.curves $(CURVES) --json $(FIGURES)/curves.json --add --plots $(FIGURES)

# Beside the systems that people use for the same job, in an environment of their own. What cannot be
# installed is reported in the table.
PEERS := .venv-peers
PEERS_READY := $(PEERS)/.ready
$(PEERS_READY): pyproject.toml constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/pip install --quiet --upgrade pip
	$(PEERS)/bin/pip install --quiet -c constraints.txt torch
	$(PEERS)/bin/pip install --quiet -c constraints.txt matplotlib -e '.[server]'
	-$(PEERS)/bin/pip install --quiet ray
	-$(PEERS)/bin/pip install --quiet TransferQueue tensordict
	-$(PEERS)/bin/pip install --quiet mooncake-transfer-engine-non-cuda
	touch $@

bench-peers: $(PEERS_READY)
	$(PEERS)/bin/python -m benchmarks.peers $(PAYLOADS) --json $(FIGURES)/peers.json --add --plots $(FIGURES)
	$(if $(PAYLOADS),,-$(PEERS)/bin/python -m benchmarks.peers.head_memory --json $(FIGURES)/head.json)
	$(PEERS)/bin/python -m benchmarks.goals $(FIGURES)

bench-head: $(PEERS_READY)
	$(PEERS)/bin/python -m benchmarks.peers.head_memory --json $(FIGURES)/head.json
	$(PEERS)/bin/python -m benchmarks.goals $(FIGURES)

# docs/speed.md and its plots, from the reports in docs/plots.
docs-figures: $(READY)
	$(BIN)/python -m benchmarks.docs

clean:
	rm -rf $(VENV) $(PEERS) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
