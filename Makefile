# Set-up, run and checks. Every target works on a bare checkout with Python 3.11; a second call installs nothing.
#
#   PYTHON       interpreter for the environments, e.g. make run PYTHON=/opt/python3.11/bin/python3
#   TORCH_INDEX  package index of torch, e.g. https://download.pytorch.org/whl/cu129. Empty: a wheel that pip's own
#                find-links offers, else the CPU build.
#   RUN_ID       folder of the run, e.g. make run RUN_ID=seed2
#   PARAMS       further parameters, e.g. make run RUN_ID=seed2 PARAMS=seed=2,train_sokoban.loop.iterations=50
#   PYTEST_ARGS  further words for pytest, e.g. make test PYTEST_ARGS="-k sokoban"
#   SGLANG       cpu or gpu: which environment of SGLang servers `make sglang-env` makes
#   BENCH_ARGS   further words for the benchmark, e.g. make bench-peer BENCH_ARGS="--turns 8 --threads 2"
#   TORCH        version of torch for make test-torch
#   MUTANTS_ARGS  further words for the mutants, e.g. make mutants MUTANTS_ARGS="--count 40 --only training/"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3.11
TORCH_INDEX ?=
RUN_ID ?= default
PARAMS ?=
PYTEST_ARGS ?=
SGLANG ?= cpu
BENCH_ARGS ?=
MUTANTS_ARGS ?=
TORCH ?= 2.11.0
TORCH_VENV := .venv-torch-$(TORCH)
# Two test processes, each with one thread of torch; the tests of a group, which is a file unless a mark says another one,
# stay together, and tests/conftest.py orders the groups so that neither process waits long for the other at the end.
WORKERS ?= -n 2 --dist loadgroup --no-loadscope-reorder

export KEDRO_DISABLE_TELEMETRY := 1
export DO_NOT_TRACK := 1
export MLFLOW_DISABLE_TELEMETRY := true
export HF_HUB_DISABLE_TELEMETRY := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some images set it. Without stored byte code every process compiles the libraries anew, ten seconds each time.
unexport PYTHONDONTWRITEBYTECODE

COMMA := ,
# All paths are relative, so that the checkout may lie in a folder with spaces.
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile -c constraints.txt
CPU_INDEX := https://download.pytorch.org/whl/cpu
# Another index gives other wheels, so its checksum is part of the stamps' names.
TAG := $(if $(TORCH_INDEX),-$(firstword $(shell printf '%s' '$(TORCH_INDEX)' | cksum)))
RUN_STAMP := $(VENV)/.installed-run$(TAG)
DEV_STAMP := $(VENV)/.installed-dev$(TAG)

ifeq ($(TORCH_INDEX),)
INSTALL_TORCH = $(PIP) --no-deps --no-index torch 2>/dev/null || $(PIP) --no-deps --index-url $(CPU_INDEX) torch
else
INSTALL_TORCH = $(PIP) --no-deps --force-reinstall --index-url $(TORCH_INDEX) torch
endif

# TRL lives in an environment of its own, with the same torch and the same versions of everything both need.
PEER_VENV := .venv-trl
PEER_STAMP := $(PEER_VENV)/.installed$(TAG)

# SGLang servers live in an environment of their own: their versions are not those of this project. On a CPU it is the
# pinned list and nothing else, and the CPU shims of scripts/sglang_cpu, which a .pth file loads.
SGLANG_VENV := .venv-sglang$(patsubst %,-%,$(filter gpu,$(SGLANG)))
SGLANG_STAMP := $(SGLANG_VENV)/.installed-$(SGLANG)
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip install --quiet --no-compile
SGLANG_MODULES := sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler, sglang.srt.models.registry
SGLANG_SITE = $$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# Servers of the package openenv live in an environment of their own, which tests of its protocol use.
OPENENV_VENV := .venv-openenv
OPENENV_STAMP := $(OPENENV_VENV)/.installed

.PHONY: help install run run-geo3k run-geo3k-multi-turn test test-torch test-fast check format docs bench bench-memory bench-backends bench-peer mutants sglang-env openenv-env chromium clean-data

help: ## Show the targets.
	@grep -E '^[a-z0-9-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 24

# Make the virtual environment $(1) unless it is there. constraints.txt pins versions for the Python that is tested.
define MAKE_VENV
@test -x $(1)/bin/python || { \
minor=$$($(PYTHON) -c 'import sys; print(sys.version_info.minor if sys.version_info.major == 3 else 0)' 2> /dev/null) || minor=none; \
way="install Python 3.11, or name it: make $(or $(firstword $(MAKECMDGOALS)),install) PYTHON=/path/to/python3.11"; \
case "$$minor" in \
11) ;; \
none) echo "PYTHON=$(PYTHON): there is no such program; $$way" >&2; exit 1 ;; \
[0-9]|10) echo "PYTHON=$(PYTHON): this is Python 3.$$minor, too old; $$way" >&2; exit 1 ;; \
*) echo "PYTHON=$(PYTHON): this is Python 3.$$minor, but 3.11 alone is tested; if the installation fails, $$way" >&2 ;; \
esac; \
$(PYTHON) -m venv $(1); }
endef

# What `kedro run` needs, without the tools of the developers.
$(RUN_STAMP): pyproject.toml constraints.txt
	$(call MAKE_VENV,$(VENV))
	@echo 'Installing into $(VENV), which takes a minute or two'
	$(INSTALL_TORCH)
	$(PIP) -e .
	touch $@

$(DEV_STAMP): pyproject.toml constraints.txt
	$(call MAKE_VENV,$(VENV))
	@echo 'Installing into $(VENV), which takes a minute or two'
	$(INSTALL_TORCH)
	$(PIP) -e '.[dev]'
	touch $(RUN_STAMP) $@

install: $(DEV_STAMP) ## Make .venv with everything, tests and notebooks included.

# Train on a task, $(1), and say where the report is.
define TRAIN
$(BIN)/python -m kedro run --pipelines=train_$(1) '--params=run_id=$(RUN_ID)$(if $(PARAMS),$(COMMA)$(subst ','\'',$(PARAMS)))'
@root=$$($(BIN)/python -c 'import os; print(os.path.expanduser(os.getenv("GEO_SOKOBAN_DATA_ROOT") or "data"))'); \
report="$$root/08_reporting/train_$(1)/$(RUN_ID)/report.html"; \
test -f "$$report" || { echo "No report at $$report" >&2; exit 1; }; \
echo "Report: $$report"
endef

run: $(RUN_STAMP) ## Train a policy on Sokoban and say where its report is.
	$(call TRAIN,sokoban)

run-geo3k: $(RUN_STAMP) ## The same on geometry problems, with one response.
	$(call TRAIN,geo3k)

run-geo3k-multi-turn: $(RUN_STAMP) ## The same with the scoring tool.
	$(call TRAIN,geo3k_multi_turn)

check: $(DEV_STAMP) ## Format, lint, types, direction of imports.
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

# `make --jobs=3 test` makes the environments and runs the checks at the same time. Tests that call make start it anew.
test: check sglang-env chromium ## All checks, then the whole test suite, with a real SGLang server and a real browser.
	MAKEFLAGS= $(BIN)/python -m pytest $(WORKERS) $(PYTEST_ARGS)

# The step, a run that continues, the engine and offload with the torch that a GPU machine brings; pip then says that this
# package wants another one.
TORCH_TESTS := tests/training/test_reference_step.py tests/training/test_resume.py tests/training/test_offload.py \
  tests/training/test_compute.py tests/rollout/engines/test_transformers.py
test-torch: ## Some tests with another torch, e.g. make test-torch TORCH=2.11.0
	$(call MAKE_VENV,$(TORCH_VENV))
	$(subst $(BIN),$(TORCH_VENV)/bin,$(INSTALL_TORCH))
	$(subst $(BIN),$(TORCH_VENV)/bin,$(PIP)) -e '.[dev]'
	$(TORCH_VENV)/bin/python -m pip install --quiet --no-compile $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==$(TORCH)
	$(TORCH_VENV)/bin/python -m pytest -p no:xdist $(TORCH_TESTS) $(PYTEST_ARGS)

test-fast: check ## The same without the slow tests.
	MAKEFLAGS= $(BIN)/python -m pytest -m "not slow" $(WORKERS) $(PYTEST_ARGS)

format: $(DEV_STAMP) ## Rewrite the code in the project's format.
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

docs: $(DEV_STAMP) ## Write docs/parameters.md, execute the notebooks on the stored runs, build the docs site into site/.
	$(BIN)/python -m scripts.parameter_docs
	$(BIN)/python -m scripts.scaling_docs
	$(BIN)/python -m scripts.reading_list
	$(BIN)/python scripts/notebook_pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

$(PEER_STAMP): pyproject.toml constraints.txt requirements/trl.txt
	$(call MAKE_VENV,$(PEER_VENV))
	@echo 'Installing into $(PEER_VENV), which takes a minute or two'
	$(subst $(BIN),$(PEER_VENV)/bin,$(INSTALL_TORCH))
	$(subst $(BIN),$(PEER_VENV)/bin,$(PIP)) -r requirements/trl.txt -e .
	touch $@

bench: $(DEV_STAMP) ## Time engine, environments, growth and writing; best on an idle machine. BENCH_DOCS=1 writes the docs.
	$(BIN)/python -m pytest benchmarks -s --ignore=benchmarks/test_memory.py --ignore=benchmarks/test_backends.py $(BENCH_ARGS)

bench-memory: $(DEV_STAMP) ## Memory of the recipes over 200 iterations, 16 minutes. BENCH_DOCS=1 writes the docs.
	$(BIN)/python -m pytest benchmarks/test_memory.py -s $(BENCH_ARGS)

bench-backends: $(DEV_STAMP) ## Reward over iterations with both backends, three seeds, 20 minutes. BENCH_DOCS=1 writes the docs.
	$(BIN)/python -m pytest benchmarks/test_backends.py -s $(BENCH_ARGS)

bench-peer: $(PEER_STAMP) ## Compare the losses with TRL's, and time one GRPO step; best on an idle machine. BENCH_DOCS=1 writes the docs.
	$(PEER_VENV)/bin/python -m benchmarks.peer.losses
	$(PEER_VENV)/bin/python -m benchmarks.peer $(BENCH_ARGS)

mutants: $(DEV_STAMP) ## Put 300 random faults into a copy of the code, one at a time, and list those that no test notices.
	$(BIN)/python -m benchmarks.mutants $(MUTANTS_ARGS)

$(SGLANG_STAMP): requirements/sglang-$(SGLANG).txt $(if $(filter cpu,$(SGLANG)),$(wildcard scripts/sglang_cpu/*.py))
	$(call MAKE_VENV,$(SGLANG_VENV))
	@echo 'Installing into $(SGLANG_VENV), which takes a minute or two'
ifeq ($(SGLANG),cpu)
	$(subst $(PIP),$(SGLANG_PIP) -c constraints.txt,$(INSTALL_TORCH))
	$(SGLANG_PIP) --no-deps -r $<
	printf '%s\n' '$(CURDIR)/scripts/sglang_cpu' 'import torchvision_cpu, forked_processes' > "$(SGLANG_SITE)/sglang_cpu.pth"
	# Compiles it once; else the first server would do so while somebody waits for it.
	$(SGLANG_VENV)/bin/python -c 'import $(SGLANG_MODULES)' > $@.log 2>&1 || { cat $@.log; exit 1; }
else
	$(SGLANG_PIP) -r $<
endif
	touch $@

sglang-env: $(SGLANG_STAMP) ## Make .venv-sglang, in which SGLang servers run; SGLANG=gpu: .venv-sglang-gpu.

$(OPENENV_STAMP): requirements/openenv.txt
	$(call MAKE_VENV,$(OPENENV_VENV))
	$(OPENENV_VENV)/bin/python -m pip install --quiet --no-compile --no-deps -r $<
	touch $@

openenv-env: $(OPENENV_STAMP) ## Make .venv-openenv, in which tests run a server of the package openenv.

# The tests of pages need a browser. Without one they are skipped, but fail in continuous integration.
chromium: $(DEV_STAMP) ## Install a headless Chromium unless there is one: Debian's package, which takes root.
	@$(BIN)/python tests/chromium.py || { \
	echo 'No Chromium yet: trying the package chromium-headless-shell'; \
	apt-get -qq -o Acquire::Retries=3 update && DEBIAN_FRONTEND=noninteractive \
	apt-get -qq install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core > /dev/null; \
	} || echo 'It was not installed. GEO_SOKOBAN_CHROMIUM may name a Chromium of your own.' >&2

# data, and the data roots of the environments below it.
DATA_ROOTS = data $(wildcard $(patsubst conf/%/,data/%,$(wildcard conf/*/)))
clean-data: $(RUN_STAMP) ## Say what is stored below data/, ask for a word, delete it; YES=1 asks for none.
	$(foreach root,$(DATA_ROOTS),$(BIN)/python -m geo_sokoban_pipeline runs --data-root $(root) remove --all $(if $(YES),--yes) &&) :
