# make quickstart and make test set up .venv themselves. PYTHON=python3.12 chooses the Python that it is made from.

PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

# PyPI's torch for Linux brings the CUDA libraries, several GB. Without an NVIDIA GPU the CPU build is preferred.
# TORCH_INDEX=URL takes torch from elsewhere (ROCm, another CUDA); TORCH_INDEX= takes PyPI's.
TORCH_INDEX ?= $(shell [ "$$(uname)" != Linux ] || command -v nvidia-smi >/dev/null || echo https://download.pytorch.org/whl/cpu)

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-long test-lower-bound format clean

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
	$(PYTEST) -m long -o faulthandler_timeout=900

# A copy of the tree has an environment and kernels of its own, since kernels fit one torch only. This torch wants a
# setuptools older than the one in constraints.txt.
LOWER_BOUND := build/lower-bound

test-lower-bound:  ## run the tests of ZeRO++ with the oldest torch that pyproject.toml allows
	rm -rf $(LOWER_BOUND)/tests
	mkdir -p $(LOWER_BOUND)
	tar -c --exclude='*.so' Makefile pyproject.toml setup.py README.md LICENSE csrc megatron_zpp tests | tar -x -C $(LOWER_BOUND)
	oldest=$$(sed -n 's/^dependencies = \["torch>=\([0-9.]*\),.*/\1/p' pyproject.toml); \
	sed -e "s/^torch==.*/torch==$${oldest:?not found in pyproject.toml}/" -e 's/^setuptools==.*/setuptools>=77,<82/' constraints.txt > $(LOWER_BOUND)/constraints.txt
	touch -r constraints.txt $(LOWER_BOUND)/constraints.txt
	$(MAKE) -C $(LOWER_BOUND) $(READY)
	cd $(LOWER_BOUND) && $(PYTEST) tests/zeropp

format: $(READY)  ## format the code and fix what ruff can fix
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:  ## remove .venv, caches and everything that the quickstart made
	rm -rf $(VENV) runs/quickstart build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

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
