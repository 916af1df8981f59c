# Needs make, Python 3.11 or newer, and a package index. Everything is installed into $(VENV).
#
#   PYTHON=python3.12   the interpreter to build the environment from
#   VENV=.venv          where the environment goes
#   WORKERS=auto        test processes
#   ARGS=...            more arguments for pytest
#   PROMPT=...          the demo's prompt

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
ARGS ?=
PROMPT ?= def read_config(path):

PY := $(VENV)/bin/python
PIP_INSTALL := $(PY) -m pip install -qq --disable-pip-version-check
# Machine code is not optimised for `test`, which is a fifth of its time; `test-slow` runs what users run.
QUICK_COMPILE := XLA_FLAGS="$$XLA_FLAGS --xla_backend_optimization_level=0"
# More than four workers mostly compile the same functions again, and so do two that share a file's tests.
PYTEST := JAX_PLATFORMS=cpu $(PY) -m pytest -n $(WORKERS) --maxprocesses=4 --dist loadfile

# The interpreter's version is part of the stamp's name: another PYTHON means another environment.
PYTHON_TAG := $(shell $(PYTHON) -c 'import sys; print("%s-%d.%d.%d" % ((sys.implementation.name,) + sys.version_info[:3]))' 2>/dev/null)
# Stamps are written last, so an interrupted step is done again.
CREATED := $(VENV)/.created-$(PYTHON_TAG)
INSTALLED := $(VENV)/.installed
INSTALLED_TEST := $(VENV)/.installed-test

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test test-slow lint format venv clean

help:
	@echo 'make demo       layer table, KV bytes a token and some Python from the bundled nano model, with drafts'
	@echo 'make test       the tests, on the CPU, without those marked slow'
	@echo 'make test-slow  all tests'
	@echo 'make lint       import contracts, ruff check, ruff format --check'
	@echo 'make format     let ruff mend and format the code'
	@echo 'make clean      remove the environment, caches and build output'
	@echo 'Variables: PYTHON=$(PYTHON) VENV=$(VENV) WORKERS=$(WORKERS) ARGS="$(ARGS)" PROMPT="$(PROMPT)"'

$(CREATED):
	@$(PYTHON) -c pass 2>/dev/null || { \
	  echo "dsv41: '$(PYTHON)' does not run; choose an interpreter: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "dsv41: needs Python 3.11 or newer, '$(PYTHON)' is $$($(PYTHON) --version 2>&1);" \
	    "choose another: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@# PYTHON may live in the environment that is about to be replaced, so ask it for the one it was made from.
	@set -e; base=$$($(PYTHON) -c 'import sys; print(sys._base_executable)'); \
	  rm -rf $(VENV); \
	  echo "Creating $(VENV) with $$($(PYTHON) --version 2>/dev/null || "$$base" --version)"; \
	  "$$base" -m venv $(VENV) >/dev/null 2>&1 \
	    || { "$$base" -m venv --clear --without-pip $(VENV) \
	         && "$$base" -m pip --python $(PY) install --quiet pip; } \
	    || { echo "dsv41: '$(PYTHON)' cannot create environments; on Debian or Ubuntu install python3-venv" >&2; exit 1; }
	@touch $@

$(INSTALLED): pyproject.toml | $(CREATED)
	@echo 'Installing dsv41 and what it needs (about 750 MB the first time)'
	@$(PIP_INSTALL) -e .
	@touch $@

$(INSTALLED_TEST): pyproject.toml | $(CREATED)
	@echo 'Installing dsv41, what it needs and the test tools (about 900 MB the first time)'
	@$(PIP_INSTALL) -e '.[test]'
	@touch $(INSTALLED) $@

venv: $(CREATED)

demo: $(INSTALLED)
	@JAX_PLATFORMS=cpu $(PY) -m launch.inspect --checkpoint=dsv41/data/nano
	@JAX_PLATFORMS=cpu $(PY) -m launch.generate --checkpoint=dsv41/data/nano --prompt='$(PROMPT)' --max_new_tokens=96 --temperature=0.6 --speculate=on

test: $(INSTALLED_TEST)
	@$(QUICK_COMPILE) $(PYTEST) $(ARGS)

test-slow: $(INSTALLED_TEST)
	@$(PYTEST) -m '' $(ARGS)

lint: $(INSTALLED_TEST)
	@$(PY) -c 'from importlinter.cli import lint_imports_command; lint_imports_command()'
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .

format: $(INSTALLED_TEST)
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

clean:
	rm -rf $(VENV) .venv-jax-* .jax_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
