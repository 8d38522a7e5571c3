# make quickstart and make test set up .venv themselves. PYTHON=python3.12 chooses the Python that it is made from.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

# PyPI's torch for Linux brings the CUDA libraries, several GB. Without an NVIDIA GPU the CPU build is preferred.
# TORCH_INDEX=URL takes torch from elsewhere (ROCm, another CUDA); TORCH_INDEX= takes PyPI's.
TORCH_INDEX ?= $(shell [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-long test-evidence release test-integrations test-ray lower-bound test-lower-bound cuda-build test-cuda-build cuda-objects gpu-text test-sanitizers docs format clean

help:  ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 25

quickstart: $(READY)  ## train a small GPT on this machine with ZeRO-3 and with ZeRO++ and LoCo, and compare
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" examples/quickstart/run.sh

# mypy and the tests run side by side, each test in one of WORKERS processes. Most tests start ranks of one thread each.
WORKERS ?= 2
PYTEST := $(VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal

test: $(READY)  ## check formatting, lint and types, and run all tests but the long ones
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy & types=$$!; \
	$(PYTEST); tests=$$?; \
	wait $$types || { echo "error: mypy found what it says above" >&2; exit 1; }; \
	exit $$tests

test-long: $(READY)  ## run the tests that make test leaves out for their time
	$(PYTEST) -m "long and not evidence" -o faulthandler_timeout=900

test-evidence: $(READY)  ## run more cases of what make test-long shows, as each night
	$(PYTEST) -m evidence -o faulthandler_timeout=900

release: $(READY)  ## build the source archive and a wheel in dist/, and train README's snippet with the wheel in an empty environment
	rm -rf dist
	$(VENV)/bin/python setup.py --quiet sdist --dist-dir dist
	$(VENV)/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist dist/*.tar.gz
	$(VENV)/bin/python -m pytest -n 0 -m release -o faulthandler_timeout=900 tests/test_package.py

# What an extra names, alone: with its package that would be built again.
INSTALL_EXTRA = $(VENV)/bin/python -m pip install --quiet -c constraints.txt $$($(VENV)/bin/python -c 'import tomllib; \
	print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["$(1)"])')

docs: $(READY)  ## build the site of docs/ in build/site, and fail at a broken link
	$(call INSTALL_EXTRA,docs)
	$(VENV)/bin/python docs/build.py

# torchtitan wants a datasets older than transformers' huggingface_hub.
test-integrations: $(READY)  ## install torchtitan, accelerate, Lightning and torchao into .venv, and train under them
	$(call INSTALL_EXTRA,integrations)
	$(VENV)/bin/python -m pip install --quiet --no-deps -c constraints.txt torchtitan
	$(PYTEST) -m integrations -o faulthandler_timeout=900

test-ray: $(READY)  ## install Ray and Kubeflow's API into .venv, and start runs with them
	$(call INSTALL_EXTRA,ray)
	$(VENV)/bin/python -m pytest -m ray tests/examples/test_ray.py

# Each in a copy of the tree with an environment and kernels of its own, since kernels fit one torch only: the oldest that
# pyproject.toml allows. It wants a setuptools older than the one in constraints.txt. PyPI's torch is the CUDA build.
lower-bound test-lower-bound cuda-build test-cuda-build: oldest = $(shell sed -n 's/^dependencies = \["torch>=\([0-9.]*\),.*/\1/p' pyproject.toml)

test-lower-bound: lower-bound  ## run the tests of ZeRO++ with the oldest torch that pyproject.toml allows
lower-bound test-lower-bound: COPY := build/lower-bound
test-lower-bound: CHECK := true

test-cuda-build: cuda-build  ## the same against torch for CUDA, with the CUDA kernels, which run on no GPU here; needs nvcc
cuda-build test-cuda-build: COPY := build/cuda-build
test-cuda-build: CHECK := $(VENV)/bin/python -c 'from megatron_zpp.zeropp.wire import kernels; exit(not kernels.has_cuda and "error: the build left the CUDA kernels out")'
cuda-build: TORCH_INDEX :=
# The toolkit is where nvcc itself says: what lies on PATH may be a wrapper elsewhere.
cuda-build test-cuda-build: export CUDA_HOME ?= $(or $(realpath $(shell nvcc --dryrun -x cu /dev/null 2>&1 | sed -n 's/^#$$ TOP=//p')),$(error no nvcc: install the CUDA toolkit))

lower-bound cuda-build:
	rm -rf $(COPY)/tests
	mkdir -p $(COPY)
	tar -c --exclude='*.so' Makefile pyproject.toml setup.py README.md CONTRIBUTING.md LICENSE csrc megatron_zpp tests | tar -x -C $(COPY)
	sed -e "s/^torch==.*/torch==$(or $(oldest),$(error no oldest torch in pyproject.toml))/" -e 's/^setuptools==.*/setuptools>=77,<82/' constraints.txt > $(COPY)/constraints.txt
	touch -r constraints.txt $(COPY)/constraints.txt
	$(MAKE) -C $(COPY) $(READY) TORCH_INDEX=$(TORCH_INDEX)

test-lower-bound test-cuda-build:
	cd $(COPY) && $(CHECK) && $(VENV)/bin/mypy megatron_zpp && $(PYTEST) tests/zeropp

# What the card's machine links in half a minute (ZEROPP_CUDA_OBJECTS=build/cuda-objects) takes minutes to compile there.
# Each file by itself: make -j compiles them side by side. nvcc needs nothing of torch.
CUDA_ARCH ?= sm_90
CUDA_FLAGS := -std=c++20 -O3 --fmad=false -Xcompiler -fPIC
CUDA_OBJECTS := $(patsubst csrc/cuda/%.cu,build/cuda-objects/%.o,$(wildcard csrc/cuda/*.cu))
CUDA_SOURCES := $(wildcard csrc/*.h csrc/cuda/*)
cuda-objects:  ## compile the CUDA kernels for H100 and H200 into build/cuda-objects, with nvcc alone, for benchmarks/gpu.sh
	@command -v nvcc >/dev/null || { echo "error: no nvcc: install the CUDA toolkit" >&2; exit 1; }
	mkdir -p build/cuda-objects
	rm -f $(filter-out $(CUDA_OBJECTS),$(wildcard build/cuda-objects/*))
	$(MAKE) -j $(WORKERS) $(CUDA_OBJECTS)
	sha256sum $(CUDA_SOURCES) > build/cuda-objects/sources.sha256

build/cuda-objects/%.o: csrc/cuda/%.cu $(CUDA_SOURCES)
	nvcc -arch=$(CUDA_ARCH) $(CUDA_FLAGS) -c $< -o $@

# 22 million tokens in 45 MB: 330 steps of 64 x 1024 see each once. The sources stay here.
TEXT ?= build/gpu-text
TEXT_MEGABYTES ?= 77.5
TEXT_VOCABULARY ?= 8192
TEXT_FLAGS := --tokenizer-type SentencePieceTokenizer --tokenizer-model $(TEXT)/tokenizer.model
gpu-text: $(READY)  ## prepare the text for the loss runs of benchmarks/gpu.sh in build/gpu-text
	$(VENV)/bin/python examples/quickstart/make_corpus.py --packages torch transformers --max-megabytes $(TEXT_MEGABYTES) \
		--output $(TEXT)-sources.jsonl
	$(VENV)/bin/python tools/train_tokenizer.py --input $(TEXT)-sources.jsonl --vocab-size $(TEXT_VOCABULARY) \
		--max-megabytes 10 --output $(TEXT)/tokenizer.model
	$(VENV)/bin/python tools/preprocess_data.py --input $(TEXT)-sources.jsonl --output-prefix $(TEXT)/python --append-eod \
		--workers $(WORKERS) $(TEXT_FLAGS)
	rm $(TEXT)-sources.jsonl

SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined
test-sanitizers: $(READY)  ## run the tests of the CPU kernels with AddressSanitizer and UndefinedBehaviorSanitizer
	CFLAGS="$(SANITIZERS)" LDFLAGS="$(SANITIZERS)" $(VENV)/bin/python setup.py -q build_ext \
		--build-lib build/sanitizers --build-temp build/sanitizers/objects
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
		ZEROPP_KERNELS=build/sanitizers/megatron_zpp/zeropp/wire/_kernels.so \
		$(VENV)/bin/python -m pytest -n 0 tests/zeropp/test_kernels.py tests/zeropp/test_moves.py tests/zeropp/test_element_scales.py

format: $(READY)  ## format the code and fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove .venv, caches and everything that the quickstart made
	rm -rf $(VENV) runs/quickstart build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes before the rest and alone, so that only it is looked for in TORCH_INDEX; and the package is built without
# isolation, against that torch, so that building it never downloads a second one.
$(READY): constraints.txt pyproject.toml setup.py $(shell find csrc -name "*.h" -o -name "*.cpp" -o -name "*.cu")
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: $(PYTHON) is no Python 3.11 or newer; choose one with make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "error: $(PYTHON) can't make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt setuptools wheel
	$(VENV)/bin/python -m pip install --quiet --no-deps -c constraints.txt torch $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt torch  # what it needs, from PyPI
	$(VENV)/bin/python -m pip install --quiet -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@
