# Everything runs in .venv, built from nothing but Python 3.11+ and make.
# `make test PYTHON=python3.12` picks the interpreter the first time.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

# Jupyter refuses to serve as root unless told; inside containers one usually is root.
LAB_ARGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

.DEFAULT_GOAL := help
.PHONY: help venv quickstart lab check format test test-all soak notebooks clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## /  \1\t/p' $(MAKEFILE_LIST) | expand -t 14

venv: $(STAMP)  ## create or update .venv

# torch goes first and alone, so that pip takes the build that is usual on this machine (CUDA or CPU);
# a torch that is already there is left for the second call to judge. The stamp comes last: an
# interrupted installation is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "SlideDP needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
	  $(PY) -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(PY) -m pip install -q -c constraints.txt -e '.[dev,pretrained]'
	@touch $@

quickstart: venv  ## run notebooks/quickstart.ipynb here, print its output
	$(PY) -m slidedp notebook notebooks/quickstart.ipynb

lab: venv  ## open notebooks/quickstart.ipynb in JupyterLab
	$(PY) -m jupyterlab $(LAB_ARGS) notebooks/quickstart.ipynb

notebooks: venv  ## run every notebook
	@set -e; for notebook in notebooks/*.ipynb; do \
	  echo "== $$notebook"; $(PY) -m slidedp notebook "$$notebook"; done

check: venv  ## lint, formatting, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy slidedp widgets

format: venv  ## fix what ruff can fix
	$(PY) -m ruff check --fix-only .
	$(PY) -m ruff format .

# Two files at a time: most tests wait for processes that start, and one file's tests share theirs. In the
# order of the folders, which ends with short files, so that both are busy to the end.
test: venv  ## the tests for any machine, minutes at most
	$(PY) -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not gpu and not multigpu'

test-all: venv  ## all tests; those without their hardware are skipped
	$(PY) -m pytest -q

soak: venv  ## inject faults and delays for hours
	$(PY) -m pytest -q -rA tests/faults

# Runs and the environment stay: both are expensive to make again.
clean:  ## remove caches and build outputs
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d \
	  -exec rm -rf {} +
