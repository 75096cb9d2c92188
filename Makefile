# The commands of the README. They create .venv and install into it on first use.
PYTHON ?= python3
BIN := .venv/bin

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile
BASE ?= HEAD

.PHONY: demo test test-all test-changed test-times lint docs clean first-tier both-tiers

demo: .venv/installed
	$(BIN)/graphllm run --prompt "What is 12 + 7?"

# docs/testing.md says what is in which tier. Linter and type checker run beside the tests.
test: .venv/installed
	@$(MAKE) --no-print-directory -j2 lint first-tier

test-all: .venv/installed
	@$(MAKE) --no-print-directory -j2 lint both-tiers

first-tier: .venv/installed
	$(PYTEST)

both-tiers: .venv/installed
	$(PYTEST) -m "not slow"

# Of both tiers, the files whose imports reach what changed since BASE.
test-changed: .venv/installed
	files=$$($(BIN)/python tests/reach.py $(BASE)) && [ -z "$$files" ] || $(PYTEST) -m "not slow" $$files

test-times: .venv/installed
	$(BIN)/python tests/times.py

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info
