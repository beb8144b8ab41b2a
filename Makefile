# make demo   set up .venv and let the tiny checkpoint write some text through mlx_lm.generate
# make test   set up .venv with the tools and run the linters, the type checker and all tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROMPT ?= Explain the for statement

.PHONY: demo test clean

demo: $(VENV)/.run
	$(BIN)/spark25-mlx register
	$(BIN)/mlx_lm.generate --model examples/tiny --prompt "$(PROMPT)" --max-tokens 120

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy spark25_mlx
	$(BIN)/python -m pytest -n auto

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	touch $@

$(VENV)/.run: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[cpu]'
	touch $@

$(VENV)/.dev: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[cpu,dev]'
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist *.egg-info
