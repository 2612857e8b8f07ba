# Every check that a change must pass, each as one short command.

VENV ?= .venv
PYTHON ?= $(VENV)/bin/python
BASE_PYTHON ?= python3
# Constraints hold for build environments too.
PIP = PIP_CONSTRAINT=$(CURDIR)/constraints.txt $(PYTHON) -m pip install -qq --disable-pip-version-check
PYTEST = $(PYTHON) -m pytest -q -n 2

.DEFAULT_GOAL := help
.PHONY: oracles help setup browser check lint format types imports dependencies test test-ci test-all docs dist release-check lock clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

setup:  ## a virtual environment in .venv with everything to develop and test
	$(BASE_PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	$(PIP) --no-deps megatron-core==0.16.1
	$(PIP) --no-deps --ignore-requires-python megatron-bridge==0.6.2
	$(PIP) --no-deps torchtitan==0.3.0 spmd_types==0.2.3 torchdata==0.11.0 tensorboard==2.21.0
	$(PIP) -e '.[dev]'

browser:  ## chromium for tests of the report, where apt-get can install it
	@if ! command -v chromium >/dev/null && command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		(timeout 120 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 300 \
		apt-get install -y -qq --no-install-recommends chromium) >/dev/null 2>&1; \
	fi; command -v chromium || echo "no chromium: the report is not tested in a browser"

check:  ## style, types, floors of the house, dependencies (15 s)
	@$(MAKE) --no-print-directory --keep-going --output-sync -j 2 types lint format imports dependencies

lint:
	$(PYTHON) -m ruff check -q .

format:
	$(PYTHON) -m ruff format -q --check .

types:
	$(PYTHON) -m mypy

imports:
	$(PYTHON) -c 'from importlinter.cli import lint_imports_command as main; main()' --no-logo

dependencies:
	$(PYTHON) -m deptry optimus benchmarks

test:  ## the tests to run after every change (60 s)
	$(PYTEST) -m 'not ci and not heavy'

test-ci:  ## the slower tests, on the minutes granted to each area (tests/conftest.py)
	$(PYTEST) -m 'ci and not heavy and not alone' --ci-budget
	$(PYTHON) -m pytest -q -m 'ci and alone and not heavy' --ci-budget

oracles:  ## what only the heaviest tests compare with: HolisticTraceAnalysis, without the notebooks it asks for
	$(PIP) pandas plotly networkx psutil
	$(PIP) --no-deps HolisticTraceAnalysis==0.5.0

test-all: oracles  ## every test
	$(PYTEST) -m 'not alone'
	$(PYTHON) -m pytest -q -m alone

docs:  ## the documentation, in site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build -q --strict

dist:  ## wheel and source distribution, in dist/
	rm -rf dist
	$(PYTHON) -m build -n >/dev/null

release-check: dist  ## build, install into fresh environments, render README (twine), compare versions
	$(PYTHON) -m twine check --strict dist/*
	$(PYTHON) .ci/release_check.py --base-python $(BASE_PYTHON)

lock:  ## write constraints.txt from this environment
	@sed -n '/^#/p' constraints.txt > constraints.new
	@$(PYTHON) -m pip freeze --exclude-editable --exclude torch --exclude optimus-mllm >> constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove what the commands above left behind, but not .venv
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find optimus benchmarks tests -name __pycache__ -prune -exec rm -rf {} +
