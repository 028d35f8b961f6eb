# Everything runs inside .venv, which is made on first use and brought up to date when pyproject.toml changes.
#   make train ARGS="--steps 200 --stages 2"      make test ARGS="tests/mpmd -k dropout"
#   make test-all runs what is slow as well, and ten times as many of the random examples that are
#   make test-cuda compiles for GPUs, which need not be here, in a .venv-cuda with their compiler (3 GB)
#   make test-gpu runs on a GPU, in the same .venv-cuda
#   make test-hf compares published models with transformers, in a .venv-hf with it and torch
#   make fuzz N=1000 SEED=7 compares random train steps under mm.jit with nnx.jit
#   make docs builds the site of the pages in docs/, strictly: build/site/index.html
#   make bench BENCH=schedules ARGS="--stages 2"

# The first Python of a supported version that works (a version manager's shim may be there and not work).
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(shell \
	$(p) -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $(p))))
ARGS ?=
N ?= 100
SEED ?= 0
BENCH ?= side_by_side
BIN := .venv/bin
# What a user installs; and with it what tests need.
USED := .venv/used
INSTALLED := .venv/installed

# On a machine without TPUs their compiler, which plans are made with, would ask the network for some.
ifeq ($(wildcard /dev/accel* /dev/vfio/*),)
export TPU_SKIP_MDS_QUERY ?= 1
export TPU_WORKER_HOSTNAMES ?= localhost
export TPU_ACCELERATOR_TYPE ?= v5litepod-8
export ALLOW_MULTIPLE_LIBTPU_LOAD ?= 1
endif

.PHONY: train test test-all test-cuda test-gpu test-hf fuzz lint docs bench clean

train: $(USED)
	$(BIN)/mmnnx train --profile 1 $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

test-all: $(INSTALLED)
	$(BIN)/python -m pytest -m "not cuda and not gpu and not hf" --hypothesis-profile=all $(ARGS)

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --examples $(N) --seed $(SEED) $(ARGS)

test-cuda: .venv-cuda/installed
	JAX_PLATFORMS=cpu .venv-cuda/bin/python -m pytest -m cuda tests/plan $(ARGS)

test-gpu: .venv-cuda/installed
	JAX_PLATFORMS=cuda,cpu JAX_DEFAULT_MATMUL_PRECISION=highest XLA_PYTHON_CLIENT_PREALLOCATE=false \
	.venv-cuda/bin/python -m pytest -m "gpu or not slow" tests/gpu tests/mpmd/test_every_schedule.py tests/mpmd/test_parity.py $(ARGS)

test-hf: $(INSTALLED) .venv-hf/installed
	$(BIN)/python -m pytest -m hf tests/hf $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: .venv/docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx --quiet --fresh-env --fail-on-warning --keep-going -c docs . build/site

bench: $(INSTALLED)
	$(BIN)/python benchmarks/$(BENCH).py $(ARGS)

clean:
	rm -rf .venv .venv-cuda .venv-hf dist build .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(USED): pyproject.toml
	@test -x $(BIN)/python || test -n "$(PYTHON)" || { echo "mmnnx needs Python 3.11, 3.12 or 3.13: set PYTHON=/path/to/one"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(INSTALLED): $(USED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.venv/docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

.venv-cuda/installed: pyproject.toml
	test -x .venv-cuda/bin/python || $(PYTHON) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[cuda12,dev]'
	@touch $@

# transformers and torch have their own Python: they are what is compared with, nothing that mmnnx needs.
.venv-hf/installed: pyproject.toml
	test -x .venv-hf/bin/python || $(PYTHON) -m venv .venv-hf
	.venv-hf/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0" "transformers>=5.24" "peft>=0.21"
	@touch $@
