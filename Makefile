# cupynet: `make train` and `make test` need python3 and make and nothing else. The first builds .venv from PyPI.
# Written for GNU make 3.81 (macOS) and any POSIX shell.

ARGS    ?=
MINUTES ?= 60

VENV := .venv
PY   := $(VENV)/bin/python
# CuPy for the CUDA version of the driver, if there is one
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | \
	awk '$$1 >= 13 { print ",cuda13x" } $$1 == 12 { print ",cuda12x" }')
# written when all packages are installed, and when those that training needs are
INSTALLED := $(VENV)/.installed$(CUDA)
TRAINS := $(VENV)/.trains$(CUDA)
# the oldest Python that works and the first that does not, as in pyproject.toml
OLDEST := 3.10
BEYOND := 3.14
SUPPORTED = import ensurepip, sys, venv; low, high = (tuple(map(int, v.split("."))) for v in ("$(OLDEST)", "$(BEYOND)")); \
	sys.exit(not low <= sys.version_info[:2] < high)

.DEFAULT_GOAL := help
.PHONY: help install train test test-standin test-gpu-standin test-slow test-gpu soak records wheels pages picture bench bench-gpu doctor check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## build .venv with all packages, with CuPy if there is a GPU; PYTHON=python3.12 chooses the interpreter
	@:

# install cupynet with EXTRAS; pip shows its progress on a terminal
define build
	@python=; for each in $(or $(PYTHON),python3.12 python3.11 python3.13 python3.10 python3); do \
		if "$$each" -c '$(SUPPORTED)' 2>/dev/null; then python=$$each; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "cupynet needs Python $(OLDEST) or later, before $(BEYOND), with its venv module (Debian, Ubuntu: apt" >&2; \
		echo "install python3-venv). None was found$(if $(PYTHON), as $(PYTHON)). Name one: make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "installing cupynet[$(EXTRAS)$(CUDA)] into $(VENV) with $$python (the first time takes $(if $(CUDA),minutes: CUDA is 2 GB,about a minute))"; \
	"$$python" -m venv $(VENV)
	@if [ -t 1 ]; then quiet=; else quiet=-q; fi; \
	$(PY) -m pip install $$quiet --disable-pip-version-check -e ".[$(EXTRAS)$(CUDA)]"
endef

$(INSTALLED): EXTRAS = dev,mpi
$(INSTALLED): pyproject.toml
	$(build)
	@touch "$@" "$(TRAINS)"

$(TRAINS): EXTRAS = images,plots
$(TRAINS): pyproject.toml
	$(build)
	@touch "$@"

train: $(TRAINS) ## train LeNet on MNIST, or with other settings: ARGS="workers=4 dtype=half"
	@$(PY) -m cupynet train $(ARGS)

# Bytecode is kept even if PYTHONDONTWRITEBYTECODE is set: hundreds of processes import the same modules.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: install ## run the tests that every change should pass, up to 4 at once: ARGS="-k loader"
	@$(PYTEST) -m 'not slow and (not device_code or smoke)' $(ARGS)

test-standin: install ## run the tests of the GPU code without a GPU, on a stand-in of CuPy, and those of the stand-in
	@$(PYTEST) -m 'device_code and not slow' $(ARGS)

test-gpu-standin: install ## run the tests marked gpu on the stand-in, except those that test-standin also runs
	@PYTHONDONTWRITEBYTECODE= $(PY) -m tests.standin -m pytest -q -p tests.standin.gpu_only $(ARGS)

test-slow: install ## run the slow tests: killed runs, wheels, browsers
	@$(PYTEST) -m 'slow and not gpu' $(ARGS)

# On a GPU: with PYTHON, which has CuPy and pytest, or else with .venv. Nothing is installed.
ON_GPU = $(or $(PYTHON),$(PY))

test-gpu: ## run the tests marked gpu; writes outputs/records/gpu-tests-*.json
	@$(ON_GPU) -m pytest -q -p tests.gpu_record -m 'gpu and not slow' $(ARGS)

bench-gpu: ## measure on a GPU, beside PyTorch if it is installed: QUICK=1; writes outputs/records/gpu-*.json
	@$(ON_GPU) -m cupynet bench gpu=true data=mnist data.fallback=synthetic $(if $(QUICK),repeats=1 seeds=1) $(ARGS)

soak: install ## train, kill, resume and compare for an hour, or for MINUTES=5; the results go to outputs/soak/
	@$(PY) -m tests.soak --minutes $(MINUTES) $(ARGS)

records: install ## measure again what the README quotes, on an idle machine: ARGS="speedrun memory"; hours for all
	@$(PY) -m tests.records $(ARGS)

wheels: install ## install the wheel with every Python and every extra, and train with each: ARGS="--python 3.12"
	@$(PY) -m tests.wheels $(ARGS)

pages: install ## write the reference pages of cupynet/guides/ (settings, api, cli) after a change of their sources
	@$(PY) -m tests.pages

picture: install ## draw the README's picture of a terminal, .github/pictures/terminal.svg, on an idle machine
	@$(PY) -m tests.picture epochs=3 $(ARGS)

bench: install ## measure operations, the training step and the loop: ARGS="peers=torch" compares with PyTorch
	@$(PY) -m cupynet bench $(ARGS)

doctor: install ## check what this machine has and lacks for training: ARGS="backend=cupy"
	@$(PY) -m cupynet doctor $(ARGS)

check: install ## check formatting, lint and types, of the package and of the tests
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

clean: ## remove caches and build products, never outputs/ or .venv
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find cupynet tests -type d -name __pycache__ -prune -exec rm -rf {} +
