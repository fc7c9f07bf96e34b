# make demo   optimize a bundled example (on the GPU if there is one, else interpreter and cross-compiler)
# make test   all tests
# make lint   format, lint and types
# make check  lint and the fast tests: what a commit must pass
# make ci     lint and all tests: what continuous integration runs
# make docs   the documentation as a site, in runs/site
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Without a GPU the tests run Triton's interpreter: 3.6.0 is what the measured machine has, and it needs numpy < 2.4.
PINS ?= $(if $(shell command -v nvidia-smi 2>/dev/null),,'triton==3.6.0' 'numpy<2.4')
# More than two cores: for a fifth of the time a worker waits for processes that its test started.
WORKERS ?= 3
# Tests start many processes: compiled once and kept, PyTorch is there in 4 seconds instead of 10.
export PYTHONDONTWRITEBYTECODE :=

# Twice quiet: errors are shown; warnings, one for each folder of packages that a machine is set up with, are not.
PIP := $(BIN)/python -m pip install --quiet --quiet --no-compile

.PHONY: setup demo test lint check ci format docs clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable '.[test]' $(PINS)
	touch $@

demo: setup
	$(BIN)/qimeng optimize examples/softmax_problem.py --out runs/demo

test: setup
	$(BIN)/python -m pytest --slow -n $(WORKERS) --dist worksteal

lint: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# Both at once: mypy takes one core, and tests wait for processes that they started.
ci: setup
	$(MAKE) --jobs=2 lint test

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

clean:
	rm -rf $(VENV) dist build runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
