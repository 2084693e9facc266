# `make demo` and `make test` do all their own set-up in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test test-slow lint format bench docs clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1,<27"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group test --group lint --editable .
	touch $@

demo: $(STAMP)
	$(BIN)/actorllm generate "Once upon a time, in a forest," --max-tokens 160 --seed 7 --stats

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow"

test-slow: $(STAMP) $(VENV)/triton-3.6
	$(BIN)/python -m pytest -m slow
	PYTHONPATH=$(VENV)/triton-3.6:kernels $(BIN)/python -m actorllm_kernels.resources

$(VENV)/triton-3.6: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.6.0

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python bench/run_all.py

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
