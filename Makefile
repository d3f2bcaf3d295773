# Two commands are enough: `make train` and `make test`. Everything runs inside .venv; nothing else is touched.

PYTHON ?= python3
ARGS ?=

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup train test lint proofs torture bench clean

help: ## show this list
	@grep -hE '^[a-z]+:.*## ' Makefile | sort | sed -E 's/^([a-z]+):.*## (.*)/make \1|\2/' | \
		while IFS='|' read -r target text; do printf '  %-12s %s\n' "$$target" "$$text"; done

setup: $(STAMP) ## create .venv and install the locked versions (does nothing when that is done)

# The stamp is removed first and written last, so that a failed or interrupted install is tried again.
# torch and torchvision stand on the command line, so that pip resolves them together: they have to match.
$(STAMP): pyproject.toml constraints.txt Makefile
	@rm -f $(STAMP)
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "shardwise needs Python 3.11 or newer, but '$(PYTHON)' is $$("$(PYTHON)" --version 2>&1 | head -n 1); name another: make setup PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' has no venv module; install it first (Debian and Ubuntu: apt install python3-venv)" >&2; exit 1; }
	"$(PYTHON)" -m venv $(VENV)
	$(RUN) -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]' torch torchvision
	@touch $(STAMP)

train: $(STAMP) ## train the default experiment; overrides go into ARGS, as in make train ARGS="strategy=fsdp"
	$(RUN) train.py $(ARGS)

test: $(STAMP) ## run the tests, except the proofs
	$(RUN) -m pytest $(ARGS)

lint: $(STAMP) ## check style, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

proofs: $(STAMP) ## run the full matrices and reference runs, which take longer than the tests
	$(RUN) -m pytest -m proofs $(ARGS)

torture: $(STAMP) ## kill runs at random moments and resume them, which takes an hour or two
	$(RUN) -m pytest -m torture $(ARGS)

bench: $(STAMP) ## measure the figures in the README's table
	$(RUN) benchmarks/run.py $(ARGS)

clean: ## remove .venv, builds and caches; outputs/ stays
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
