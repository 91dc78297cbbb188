# Python 3.11 or newer: `make PYTHON=python3.12 ...` where python3 is older.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup quickstart test lint types slow clean

setup:  # creates .venv and installs; once done, a second call only looks at a stamp
	@$(PYTHON) scripts/setup.py --extras dev

quickstart: setup
	@$(BIN)/python examples/quickstart/run.py

test: lint types
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

slow: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

clean:  # what set-up and the tools made; runs/ and data/ stay
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
