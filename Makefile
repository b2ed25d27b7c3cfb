# The verbs. Each sets up what it needs in .venv and may be run again at any time.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
BIN := $(CURDIR)/$(VENV)/bin
READY := $(VENV)/.ready
BUILT := build/.built
SOURCES := setup.py src/detattn/contract.py $(shell find csrc -type f)

.PHONY: audit test build wheel bench check docs test-gpu clean
.DEFAULT_GOAL := audit

audit: $(BUILT)  ## the invariance audit of detattn on this machine's best backend
	$(BIN)/detattn audit

test: check $(BUILT)  ## linters, types, source rules, kernels compile, tests, docs
	$(PY) -m pytest
	$(BIN)/mkdocs build --strict --quiet

build: $(BUILT)  ## the compiled libraries, in place

wheel: $(BUILT)  ## dist/detattn-*.whl
	$(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

bench: $(BUILT)  ## speed beside PyTorch's attention; refuses to print one when the bits are wrong
	$(PY) benchmarks/run.py

check: $(BUILT)  ## linters, formatters, types, source rules
	PATH="$(BIN):$$PATH" $(BIN)/pre-commit run --all-files --show-diff-on-failure

docs: $(BUILT)  ## the documentation, in site/
	$(BIN)/mkdocs build --strict

test-gpu: $(BUILT)  ## the same tests on the GPU of this machine; rewrites tests/gpu_report.json
	$(PY) tests/gpu_report.py

clean:  ## everything that can be made again
	rm -rf build dist site $(VENV) src/*.egg-info src/detattn/*.so

$(READY): requirements-dev.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "detattn needs Python 3.10 or later: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	touch $@

$(BUILT): $(READY) pyproject.toml $(SOURCES)
	DETATTN_CXXFLAGS=-Werror PATH="$(BIN):$$PATH" $(PY) -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -e .
	mkdir -p build && touch $@
