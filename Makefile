# `make train` and `make test` need only python3 and make. The first run builds .venv with packages from PyPI.
# For GNU make 3.81 (macOS) and later, and any POSIX shell.

ARGS    ?=
MINUTES ?= 60

VENV := .venv
PY   := $(VENV)/bin/python
# the extra for the driver's CUDA version, if there is a GPU
CUDA := $(shell nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9]*\).*/\1/p' | \
	awk '$$1 >= 13 { print ",cuda13x" } $$1 == 12 { print ",cuda12x" }')
# stamp files: all packages are installed, or only the ones that training needs
INSTALLED := $(VENV)/.installed$(CUDA)
TRAINS := $(VENV)/.trains$(CUDA)
# the oldest supported Python, and the first unsupported one, as in pyproject.toml
OLDEST := 3.10
BEYOND := 3.14
SUPPORTED = import ensurepip, sys, venv; low, high = (tuple(map(int, v.split("."))) for v in ("$(OLDEST)", "$(BEYOND)")); \
	sys.exit(not low <= sys.version_info[:2] < high)

.DEFAULT_GOAL := help
.PHONY: help install train test test-standin test-gpu-standin test-slow test-gpu soak records wheels pages notebook picture bench bench-gpu doctor check clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## create .venv with all packages, and CuPy if there is a GPU; PYTHON=python3.12 selects the interpreter
	@:

# Install cupynet[EXTRAS]; pip shows its progress on a terminal. Then check the machine and compile the kernels, so
# that the first training run starts as fast as later ones.
define build
	@python=; for each in $(or $(PYTHON),python3.12 python3.11 python3.13 python3.10 python3); do \
		if "$$each" -c '$(SUPPORTED)' 2>/dev/null; then python=$$each; break; fi; done; \
	if [ -z "$$python" ]; then \
		echo "cupynet requires Python $(OLDEST) or later, but before $(BEYOND), with the venv module (Debian, Ubuntu: apt install" >&2; \
		echo "python3-venv). $(if $(PYTHON),$(PYTHON) is not suitable,None was found). Select one with make PYTHON=/path/to/python" >&2; exit 1; fi; \
	echo "installing cupynet[$(EXTRAS)$(CUDA)] into $(VENV) with $$python (takes $(if $(CUDA),several minutes: CUDA is 2 GB,about a minute))"; \
	"$$python" -m venv $(VENV)
	@if [ -t 1 ]; then quiet=; else quiet=-q; fi; \
	$(PY) -m pip install $$quiet --disable-pip-version-check -e ".[$(EXTRAS)$(CUDA)]"
	@$(PY) -m cupynet doctor || :
endef

$(INSTALLED): EXTRAS = dev,mpi
$(INSTALLED): pyproject.toml
	$(build)
	@touch "$@" "$(TRAINS)"

$(TRAINS): EXTRAS = images,plots
$(TRAINS): pyproject.toml
	$(build)
	@touch "$@"

train: $(TRAINS) ## train LeNet on MNIST; change settings with ARGS="workers=4 dtype=half"
	@$(PY) -m cupynet train $(ARGS)

# Keep bytecode even if PYTHONDONTWRITEBYTECODE is set, because hundreds of processes import the same modules.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: install ## run the standard tests, up to 4 in parallel; select some with ARGS="-k loader"
	@$(PYTEST) -m 'not slow and (not device_code or smoke)' $(ARGS)

test-standin: install ## run the tests of the GPU code on a stand-in for CuPy (no GPU needed), and the stand-in's own tests
	@$(PYTEST) -m 'device_code and not slow' $(ARGS)

test-gpu-standin: install ## run the tests marked gpu on the stand-in, except those that test-standin also runs
	@PYTHONDONTWRITEBYTECODE= $(PY) -m tests.standin -m pytest -q -p tests.standin.gpu_only $(ARGS)

test-slow: install ## run the slow tests: killed runs, wheels, browsers
	@$(PYTEST) -m 'slow and not gpu' $(ARGS)

# GPU targets run PYTHON, or else the interpreter in .venv. It must have CuPy and pytest: these targets install nothing.
ON_GPU = $(or $(PYTHON),$(PY))

test-gpu: ## run the tests marked gpu on a GPU; writes outputs/records/gpu-tests-*.json
	@$(ON_GPU) -m pytest -q -p tests.gpu_record -m 'gpu and not slow' $(ARGS)

bench-gpu: ## benchmark a GPU, and PyTorch if installed; QUICK=1 for a short run; writes outputs/records/gpu-*.json
	@$(ON_GPU) -m cupynet bench gpu=true data=mnist data.fallback=synthetic $(if $(QUICK),repeats=1 seeds=1) $(ARGS)

soak: install ## train, kill, resume and compare for an hour, or MINUTES=5; writes results to outputs/soak/
	@$(PY) -m tests.soak --minutes $(MINUTES) $(ARGS)

records: install ## repeat the README's CPU measurements; use an idle machine; select some with ARGS="speedrun memory"; all of them take hours
	@$(PY) -m tests.records $(ARGS)

wheels: install ## install the wheel with every Python version and extra, and train with each: ARGS="--python 3.12"
	@$(PY) -m tests.wheels $(ARGS)

pages: install ## regenerate the reference pages in cupynet/guides/ (settings, api, cli)
	@$(PY) -m tests.pages

notebook: install ## run cupynet/guides/first_steps.ipynb and store it with its outputs
	@$(PY) -m tests.notebook

picture: install ## draw the terminal picture of the README, .github/pictures/terminal.svg; use an idle machine
	@$(PY) -m tests.picture epochs=3 $(ARGS)

bench: install ## benchmark operations, the training step and the training loop; compare with ARGS="peers=torch"
	@$(PY) -m cupynet bench $(ARGS)

doctor: install ## check whether this machine is ready for training; pass settings with ARGS="backend=cupy"
	@$(PY) -m cupynet doctor $(ARGS)

check: install ## check formatting, lint and types
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

clean: ## remove caches and build products, but keep outputs/ and .venv
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find cupynet tests -type d -name __pycache__ -prune -exec rm -rf {} +
