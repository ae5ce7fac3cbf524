# `make help` lists the targets. Everything runs in .venv: `make demo` installs the pinned packages that the demo needs,
# and `make setup`, or the first target that needs it, adds those for development.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
PYTHON312 ?= $(shell for p in python3.12 python3.13 python3.14; do \
	$$p -c pass 2>/dev/null && { command -v $$p; break; }; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.demo
CHROMIUM := $(VENV)/.chromium
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
# For the demo: compiling every module of every package takes longer than the rest of the installation, and most are
# never imported. Tests need compiled packages: some warn when they are compiled, and tests treat warnings as errors.
INSTALL := $(PIP) install --no-compile
# Two workers compute on two cores: a second thread in each would only take turns with the other. And compiled modules are kept:
# tests start many processes, each of which would compile the package again.
# Tests write and sync many small files: they do so in memory where /dev/shm has room and runs programs. Folders of tests
# that passed are removed there.
SHM := $(shell [ "$$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $$4 }')" -ge 4194304 ] 2>/dev/null \
	&& ! grep -q ' /dev/shm .*noexec' /proc/mounts && echo /dev/shm)
TEST_ENV := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE= $(SHM:%=TMPDIR=%)
# A file stays with one worker, so that what its tests share is made once; the dearest files come first (tests/cost.py), and a
# two more workers run those that mostly wait (tests/schedule.py).
WORKERS := --dist loadfile --no-loadscope-reorder $(if $(SHM),-o tmp_path_retention_policy=failed)

DEMO_REQUIREMENTS := $(patsubst %,requirements/%.txt,demo runtime torch portable)

PY ?= 3.12
ARCH ?= x86_64
OFFLINE := build/offline-py$(PY)-$(ARCH)
OFFLINE_STAMP := $(OFFLINE)/.installed
AGENTS := build/agents
AGENTS_STAMP := $(AGENTS)/.installed
VLLM := build/vllm-venv
VLLM_STAMP := $(VLLM)/.installed
HARBOR := build/harbor
HARBOR_STAMP := $(HARBOR)/.installed
PLATFORMS := $(foreach tag,manylinux_2_28 manylinux_2_17 manylinux2014,--platform $(tag)_$(ARCH))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo demo-control demo-terminal test test-fast test-long test-agents test-vllm test-harbor check format offline-deps clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv and install the pinned packages, those for development included

demo: $(DEMO_STAMP) ## pre-train and fine-tune a small network, then let an untouched agent make it better, in minutes
	@$(BIN)/python examples/demo.py $(ARGS)

demo-control: $(DEMO_STAMP) ## the demo with rewards dealt at random
	@$(BIN)/python examples/demo.py --control $(ARGS)

demo-terminal: $(DEMO_STAMP) ## a small network learns to use a shell from the tests of 600 task folders, in minutes
	@$(BIN)/python -m examples.demo_terminal $(ARGS)

test: $(STAMP) $(CHROMIUM) ## run the tests on 2 cores, but for those of `make check` (ARGS="-k name" is passed on)
	$(TEST_ENV) $(BIN)/python -m pytest -n 4 $(WORKERS) --ignore=tests/test_contract.py $(ARGS)

test-fast: $(STAMP) ## run the tests that start no process and load no torch, with fewer random cases, in 90 seconds
	M2FORGE_FAST=1 $(TEST_ENV) $(BIN)/python -m pytest -n 4 $(WORKERS) $(ARGS)

test-long: $(STAMP) $(CHROMIUM) ## run the tests with many more random cases, and those marked long
	M2FORGE_LONG=1 $(TEST_ENV) $(BIN)/python -m pytest -n 4 $(WORKERS) $(ARGS)

test-vllm: $(STAMP) $(VLLM_STAMP) ## test the vLLM backend against a real server (downloads gigabytes, takes minutes)
	M2FORGE_VLLM=$(VLLM)/bin/python $(TEST_ENV) $(BIN)/python -m pytest -m vllm tests/rollout tests/rl/test_vllm_run.py $(ARGS)

test-agents: $(STAMP) $(AGENTS_STAMP) ## test the gateway with real clients (npm, PyPI; about 2 GB, takes minutes)
	M2FORGE_AGENTS=$(AGENTS) $(TEST_ENV) $(BIN)/python -m pytest -m agents tests/gateway/clients tests/rl/test_cli_runs.py $(ARGS)

test-harbor: $(STAMP) $(HARBOR_STAMP) ## run task folders under Harbor in our sandboxes (needs Python 3.12, takes minutes)
	M2FORGE_HARBOR=$(abspath $(HARBOR)/bin/python) $(TEST_ENV) $(BIN)/python -m pytest -m harbor tests/tasks $(ARGS)

check: $(STAMP) ## check format, lint, strict types and the contract of the code base
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_contract.py

format: $(STAMP) ## format the code and fix what lint can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

offline-deps: $(OFFLINE_STAMP) ## unpack the runtime dependencies for another Python (PY=3.12 ARCH=x86_64)
	@echo "$(OFFLINE) is for Python $(PY) on $(ARCH), beside an installed torch, numpy and safetensors:"
	@echo "  PYTHONPATH=$(OFFLINE) python -m m2forge --help"

clean: ## remove build outputs and caches (.venv and runs/ stay)
	rm -rf build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find m2forge tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or later found; name one with PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(DEMO_STAMP): $(DEMO_REQUIREMENTS) pyproject.toml | $(BIN)/python
	@echo "installing what the demo needs into $(VENV), about 800 MB, most of it torch"
	@$(INSTALL) -r requirements/demo.txt
	@$(INSTALL) --no-deps --no-build-isolation --editable .
	@touch $@

$(STAMP): $(wildcard requirements/*.txt) pyproject.toml | $(BIN)/python
	@echo "installing the packages for development into $(VENV), about 2 GB; this may take minutes"
	@$(PIP) install -r requirements/dev.txt
	@$(PIP) install --no-deps -r requirements/nodeps.txt
	@$(PIP) install --no-deps --no-build-isolation --editable .
	@touch $(DEMO_STAMP) $@

# A browser for the tests of the run page; without one they are skipped.
$(CHROMIUM): dev/chromium.sh | $(STAMP)
	@dev/chromium.sh $(BIN)/python
	@touch $@

# Real clients of the gateway, each unmodified: CLI agents and the AI SDK from npm, with a Node of their own, and Python
# libraries. OpenHands needs Python 3.12; where there is none its test is skipped. Nothing here is a dependency.
$(AGENTS_STAMP): requirements/agents.json requirements/agents.txt requirements/openhands.txt | $(BIN)/python
	@echo "installing real clients into $(AGENTS)"
	@mkdir -p $(AGENTS)/node
	@cp requirements/agents.json $(AGENTS)/node/package.json
	@npm install --silent --no-audit --no-fund --prefix $(AGENTS)/node
	@test -x $(AGENTS)/python/bin/python || $(PYTHON) -m venv $(AGENTS)/python
	@$(AGENTS)/python/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r requirements/agents.txt
	@if test -n "$(PYTHON312)"; then \
		$(PYTHON312) -m venv $(AGENTS)/openhands && $(AGENTS)/openhands/bin/python -m pip \
			--disable-pip-version-check -qq install --no-deps -r requirements/openhands.txt; \
	else echo "no Python 3.12 or later found: OpenHands is left out; name one with PYTHON312=/path/to/python"; fi
	@touch $@

# vLLM serves text models without the libraries for images and sound, and fails at their import where they were built
# for another torch.
$(VLLM_STAMP): requirements/vllm.txt | $(BIN)/python
	@echo "installing vLLM into $(VLLM)"
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq install -r requirements/vllm.txt
	@$(VLLM)/bin/python -m pip --disable-pip-version-check -qq uninstall --yes torchvision torchaudio torchcodec
	@touch $@

# Harbor, which imports our environment class: it needs Python 3.12, and what our sandboxes import.
$(HARBOR_STAMP): requirements/harbor.txt | $(BIN)/python
	@test -n "$(PYTHON312)" || { echo "no Python 3.12 or later found; name one with PYTHON312=/path/to/python"; exit 1; }
	@echo "installing Harbor into $(HARBOR)"
	@test -x $(HARBOR)/bin/python || $(PYTHON312) -m venv $(HARBOR)
	@$(HARBOR)/bin/python -m pip --disable-pip-version-check -qq install --no-deps -r requirements/harbor.txt
	@touch $@

# Built beside its place and renamed, so that the folder is whole whenever it exists.
$(OFFLINE_STAMP): requirements/portable.txt | $(BIN)/python
	rm -rf $(OFFLINE).partial
	$(PIP) install --target $(OFFLINE).partial --python-version $(PY) --implementation cp \
		$(PLATFORMS) --only-binary=:all: --no-deps --no-compile -r requirements/portable.txt
	rm -rf $(OFFLINE).partial/bin $(OFFLINE).partial/*.dist-info/licenses
	find $(OFFLINE).partial -name __pycache__ -type d -prune -exec rm -rf {} +
	touch $(OFFLINE).partial/.installed
	rm -rf $(OFFLINE)
	mv $(OFFLINE).partial $(OFFLINE)
