# `make demo` trains on real speech and prints a WER report; `make test` runs the test suite. Both install into .venv first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
AN4 ?=
# `make demo CPU=1` takes PyTorch's wheels for CPUs: the usual ones are for CUDA and bring several GB of its libraries.
TORCH_INDEX := $(if $(CPU),--index-url https://download.pytorch.org/whl/cpu)

.PHONY: demo test test-slow test-all test-gpu test-two-gpus test-versions lint docs wheel clean

# torch first and by its pinned version: a later request for any torch would fetch another build of several gigabytes.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"ds2 needs Python 3.11 or later, {sys.executable} is {sys.version.split()[0]}: make PYTHON=python3.11"'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch $(TORCH_INDEX)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: $(VENV)/installed
	$(BIN)/python tools/demo.py $(if $(AN4),--an4 '$(AN4)')

# Tests start a hundred interpreters, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

# A worker on each core; a worker that is done takes tests from the others.
PARALLEL := -n auto --maxprocesses 8 --dist worksteal

# One worker more than cores: tests of servers and ranks wait for other processes.
test: $(VENV)/installed
	$(BIN)/python -m pytest $(PARALLEL) -n $$($(BIN)/python -c 'from ds2.system.machine import usable_cores; print(min(8, usable_cores() + 1))')

# Fuzzing, kills, long trainings and every tile of the kernels compiled.
test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m 'slow and not gpu' $(PARALLEL)

test-all: test test-slow

# On a machine with a GPU, with its own Python and torch: needs pytest, pytest-xdist and the other dependencies of ds2 besides, no extra.
# A pass is noted in tests/gpu_passes.tsv; where the sources are not in a git repository, COMMIT=... names their commit.
test-gpu test-two-gpus:
	PYTHONPATH=.:ops:$$PYTHONPATH $(PYTHON) tools/gpu_tests.py run $(if $(filter test-two-gpus,$@),--two-gpus) $(if $(COMMIT),--commit $(COMMIT))

# The oldest and the newest packages that pyproject.toml allows, in environments of their own; fetches about 11 GB.
# CI tries the oldest with constraints.txt's PyTorch; what `make test` installs is the newest but for PyTorch.
test-versions:
	$(PYTHON) tools/check_versions.py oldest
	$(PYTHON) tools/check_versions.py newest

lint: $(VENV)/installed
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/mypy tests/support/peers_check.py && $(BIN)/lint-imports --no-logo
	$(BIN)/python tools/gpu_tests.py check

# Guide, design, results and the API reference, from the docstrings, to build/site/index.html. A link that leads nowhere is an error.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

wheel: $(VENV)/installed
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf $(VENV) dist
