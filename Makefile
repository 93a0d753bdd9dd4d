# Every target makes the virtual environment it needs: no step has to be remembered, and nothing outside .venv changes.
# Needs make and Python 3.11 or newer with its venv module; no compiler, no GPU. PYTHON=... picks another interpreter.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --quiet
# Tests of GPU kernels without a GPU: compiled only, or run on a simulated machine; on one core each.
GPU_TESTS := tests/compiled tests/simulated
# Beside the Triton of requirements/test.txt: the oldest that is supported and the newest, in folders of their own.
OTHER_TRITONS := triton-oldest triton-newest
OTHER_TRITON_TESTS := $(addprefix tests/compiled/test_,compiled_gluon_forward.py compiled_gluon_backward.py triton_sample.py)
triton_of = $(shell sed -n 's/^triton==//p' requirements/$(1).txt)
under = PYTHONPATH=$(CURDIR)/$(VENV)/$(1)$${PYTHONPATH:+:$$PYTHONPATH} $(BIN)/python -m pytest --triton=$(call triton_of,$(1))

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint format bench docs clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

setup: $(VENV)/stamp-test $(OTHER_TRITONS:%=$(VENV)/stamp-%) $(VENV)/stamp-lint $(VENV)/stamp-docs  ## make .venv with everything that the other targets need

demo: $(VENV)/stamp-base  ## train and run a small model on real text, beside torch
	$(BIN)/kilat demo

test: $(VENV)/stamp-test $(OTHER_TRITONS:%=$(VENV)/stamp-%)  ## the tests, without those marked slow
	$(BIN)/python -m pytest -m "not slow" $(addprefix --ignore=,$(GPU_TESTS))
	$(BIN)/python -m pytest -m "not slow" -n 2 --triton=$(call triton_of,test) $(GPU_TESTS)
	$(call under,triton-oldest) -n 2 $(OTHER_TRITON_TESTS)
	$(call under,triton-newest) -n 2 $(OTHER_TRITON_TESTS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/interpreted

test-all: $(VENV)/stamp-test $(OTHER_TRITONS:%=$(VENV)/stamp-%)  ## every test, with many more random examples, and the planted bugs (long)
	$(BIN)/python -m pytest --hypothesis-profile=long
	$(call under,triton-oldest) -n 2 $(OTHER_TRITON_TESTS)
	$(call under,triton-newest) -n 2 $(OTHER_TRITON_TESTS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/interpreted
	$(BIN)/python scripts/mutation_check.py --json benchmarks/mutation-check.json

lint: $(VENV)/stamp-lint $(VENV)/stamp-test  ## ruff (rules and format) and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/stamp-lint  ## rewrite the sources the way `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/stamp-base  ## time the CPU suite beside torch
	$(BIN)/kilat bench --suite cpu

docs: $(VENV)/stamp-docs  ## build the pages into site/, warnings as errors
	$(BIN)/mkdocs build --strict

clean:  ## remove what the other targets made
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis

# The package itself is installed as a link to src/, without build isolation: its build needs only the pinned setuptools.
$(VENV)/stamp-base: requirements/base.txt pyproject.toml
	@test -n "$(PYTHON)" || { echo "make: Python 3.11 or newer is needed; install it or pass PYTHON=/path/to/python" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) -r requirements/base.txt
	$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/stamp-%: requirements/%.txt $(VENV)/stamp-base
	$(PIP) -r $<
	@touch $@

# No pip option installs a second version beside the first, but a folder does, which goes first on PYTHONPATH.
$(VENV)/stamp-triton-%: requirements/triton-%.txt $(VENV)/stamp-base
	rm -rf $(VENV)/triton-$*
	$(PIP) --no-deps --target $(VENV)/triton-$* -r $<
	@touch $@
