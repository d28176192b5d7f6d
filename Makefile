# make demo   install, fetch the small model, watch lookahead decoding against token by token
# make test   install what tests need; lint, types, all tests (a few minutes)
# make plugin install decodekit and the example plugin into a fresh environment, and run it
# make versions  the tests beside other versions of torch, transformers, ...; hours, many GB
# make fast   lint, types and the tests that need no real model (a few minutes)

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2
PROCESSES := tests/e2e/test_processes.py
PIP := $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: demo test fast quantised plugin versions lint format clean

demo: $(VENV)/.installed
	$(BIN)/decodekit strategy=lookahead model=smollm2-135m max_new_tokens=128 compare=true \
	  prompt="Write a Python function that returns the n-th Fibonacci number, and explain it step by step."

# The tests that start programs come last and alone: those have threads of their own on all cores.
test: fast quantised
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m e2e -n $(WORKERS) --dist loadfile --ignore $(PROCESSES)
	$(BIN)/python -m pytest -m e2e $(PROCESSES)

# The packages that quantise are kept in an environment of their own, beside all that is in ours:
# once installed, they slow down and comment on every import of transformers.
quantised: $(VENV)/.installed-dev
	$(PYTHON) -m venv $(VENV)-quantised
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	  > "$$($(VENV)-quantised/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/ours.pth"
	$(VENV)-quantised/bin/python -m pip install --disable-pip-version-check -q --no-deps \
	  -c constraints.txt torchao bitsandbytes
	$(VENV)-quantised/bin/python -m pytest -q tests/behaviour/test_quantised.py

# A part of `make test` too.
plugin: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m e2e tests/e2e/test_plugin.py

# Not a part of `make test`. ROWS="lowest highest" runs these rows of docs/versions.md only.
versions: $(VENV)/.installed-dev
	$(BIN)/python scripts/versions.py $(ROWS)

# Two processes with one thread each: torch's threads would wait for each other.
fast: $(VENV)/.installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not e2e" -q -n $(WORKERS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-quantised $(VENV)-versions build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
