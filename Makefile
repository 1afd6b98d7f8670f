# cupynet: `make train` and `make test` need python3 and make and nothing else. They build .venv from PyPI the first time
# and use it again until pyproject.toml, the interpreter asked for, the place of this folder or the CUDA driver changes.
# Written for GNU make 3.81 (macOS) and any POSIX shell.

ARGS    ?=
PYTHON  ?=
MINUTES ?= 60
export PYTHON

VENV := .venv
PY   := $(VENV)/bin/python
# the oldest Python that works and the first that does not, as requires-python in pyproject.toml has them
OLDEST := 3.10
BEYOND := 3.14

.DEFAULT_GOAL := help
.PHONY: help install train test test-standin test-slow test-gpu soak records wheels picture bench bench-gpu doctor check clean environment

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

install: environment ## build .venv, with CuPy where nvidia-smi answers; PYTHON=python3.12 chooses the interpreter
	@echo "$(VENV) is ready: $$(cat $(VENV)/.complete)"

train: environment ## train LeNet on MNIST, or what ARGS says: ARGS="workers=4 dtype=half"
	@$(PY) -m cupynet train $(ARGS)

# Bytecode is kept, whatever the shell says: hundreds of processes import the same modules.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n auto --maxprocesses 4 --dist worksteal \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test: environment ## run the tests that every change should pass, up to 4 at once: ARGS="-k loader"
	@gpus=0; marks='not slow and (not device_code or smoke)'; \
	if command -v nvidia-smi >/dev/null 2>&1; then gpus=$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU'); fi; \
	[ "$$gpus" -ge 1 ] || marks="$$marks and not gpu"; \
	[ "$$gpus" -ge 2 ] || marks="$$marks and not multi_gpu"; \
	$(PYTEST) -m "$$marks" $(ARGS)

test-standin: environment ## run the GPU's code without a GPU: every test on a stand-in of CuPy, and of that stand-in
	@$(PYTEST) -m 'device_code and not slow' $(ARGS)

test-slow: environment ## run the tests that take long: killed runs, wheels, browsers
	@$(PYTEST) -m 'slow and not gpu' $(ARGS)

# with an interpreter that has all there is to have: PYTHON, else that of .venv, else python3; nothing is installed
equipped = py="$$PYTHON"; if [ -z "$$py" ]; then py=$(PY); [ -x "$$py" ] || py=python3; fi; "$$py" -m cupynet.bench.environment

test-gpu: ## run the tests marked gpu with PYTHON=, which has CuPy and pytest; writes outputs/records/gpu-tests-*.json
	@$(equipped) pytest hypothesis && marks='gpu and not slow' && \
	if [ "$$(nvidia-smi -L 2>/dev/null | grep -c '^GPU')" -lt 2 ]; then marks="$$marks and not multi_gpu"; fi && \
	"$$py" -m pytest -q -p tests.gpu_record -m "$$marks" $(ARGS)

soak: environment ## train, kill, go on and compare for an hour, or for MINUTES=5; the results go to outputs/soak/
	@$(PY) -m tests.soak --minutes $(MINUTES) $(ARGS)

records: environment ## measure again what the README quotes, on an idle machine: ARGS="speedrun memory"; hours for all
	@$(PY) -m tests.records $(ARGS)

wheels: environment ## install the wheel with every Python and every extra at hand, and train with each: ARGS="--python 3.12"
	@$(PY) -m tests.wheels $(ARGS)

picture: environment ## draw anew what the README shows of a terminal, on an idle machine; .github/pictures/terminal.svg
	@$(PY) -m tests.picture epochs=3 $(ARGS)

bench: environment ## measure operations, the training step and the loop: ARGS="peers=torch" compares with PyTorch if installed
	@$(PY) -m cupynet bench $(ARGS)

bench-gpu: ## measure on a GPU, with PyTorch where it is: PYTHON= as for test-gpu, QUICK=1; writes outputs/records/gpu-*.json
	@$(equipped) && "$$py" -m cupynet bench gpu=true data=mnist data.fallback=synthetic $(if $(QUICK),repeats=1 seeds=1) $(ARGS)

doctor: environment ## say what this machine has and lacks for training: ARGS="backend=cupy"
	@$(PY) -m cupynet doctor $(ARGS)

check: environment ## the gate: formatting, lint, types
	@$(PY) -m ruff format --check .
	@$(PY) -m ruff check .
	@$(PY) -m mypy

clean: ## remove caches and build products, never outputs/ (for a fresh environment: rm -rf .venv)
	@rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info
	@find cupynet tests -type d -name __pycache__ -prune -exec rm -rf {} +

environment:
	@$(SHELL) -c "$$ENVIRONMENT"

# .venv/.complete says what a finished .venv was made of: interpreter, extras, requirements, place. While .venv/.unfinished
# exists an installation was interrupted, and the next one starts afresh. An environment that somebody made by hand has
# neither; it is kept where its Python will do, and completed.
define ENVIRONMENT
set -eu
identity='import sys; print("Python", "%d.%d" % sys.version_info[:2], "of", sys.base_prefix)'
fits='import sys; low, high = (tuple(map(int, v.split("."))) for v in ("$(OLDEST)", "$(BEYOND)")); sys.exit(not low <= sys.version_info[:2] < high)'
# the interpreter behind a virtual environment, which may be the very one that is replaced below
behind='import sys; print(getattr(sys, "_base_executable", None) or sys.executable)'
bounds='Python $(OLDEST) or later, before $(BEYOND)'

cuda=
if command -v nvidia-smi >/dev/null 2>&1 && report=$$(nvidia-smi 2>/dev/null); then
    driver=$$(printf '%s\n' "$$report" | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | sed -n 1p)
    if [ "$${driver:-12}" -ge 13 ]; then cuda=,cuda13x; elif [ "$${driver:-12}" -eq 12 ]; then cuda=,cuda12x; fi
fi

made_of=
if [ -f $(VENV)/.complete ]; then made_of=$$(cat $(VENV)/.complete); fi
# an environment with CuPy stays one where there is no GPU at the moment (the login node of a cluster)
if [ -z "$$cuda" ]; then
    case $$made_of in *",cuda12x, "*) cuda=,cuda12x ;; *",cuda13x, "*) cuda=,cuda13x ;; esac
fi

# the usual case: .venv is what it should be
here=$$(pwd -P)
recipe="pyproject.toml $$(cksum < pyproject.toml | cut -d ' ' -f 1) in $$here"
have=$$($(PY) -c "$$identity" 2>/dev/null) || have=
want=$$have
if [ -n "$$PYTHON" ]; then want=$$("$$PYTHON" -c "$$identity" 2>/dev/null) || want=unknown; fi
if [ -n "$$have" ] && [ "$$made_of" = "$$have with dev,mpi$$cuda, $$recipe" ] && [ "$$have" = "$$want" ]; then exit 0; fi

chosen= without_venv=
for candidate in "$${PYTHON:-$(PY)}" python3.12 python3.11 python3.13 python3.10 python3; do
    if "$$candidate" -c "$$fits" >/dev/null 2>&1; then
        if "$$candidate" -c 'import ensurepip, venv' >/dev/null 2>&1; then chosen=$$candidate; break; fi
        without_venv=$${without_venv:-$$candidate}
    fi
    if [ -n "$$PYTHON" ]; then break; fi
done
if [ -z "$$chosen" ]; then
    if [ -n "$$without_venv" ]; then
        echo "$$without_venv has no venv module: install it (Debian, Ubuntu: apt install python3-venv), or name another interpreter: make PYTHON=/path/to/python" >&2
    elif [ -n "$$PYTHON" ]; then
        echo "PYTHON=$$PYTHON will not do ($$("$$PYTHON" --version 2>&1 | sed -n '$$p')): cupynet needs $$bounds" >&2
    else
        echo "cupynet needs $$bounds, and none was found as python3.10 to python3.13 or python3: install one, or name it: make PYTHON=/path/to/python" >&2
    fi
    exit 1
fi
chosen=$$("$$chosen" -c "$$behind")
want=$$("$$chosen" -c "$$identity")

case $$cuda in '') size='about a minute' ;; *) size='minutes: CUDA is some 2 GB' ;; esac
echo "installing cupynet[dev,mpi$$cuda] into $(VENV) with $$want (the first time takes $$size)"
# what is there can be completed, unless it was interrupted, moved here, or holds the CuPy of another CUDA
keep=no
case $$made_of in '' | *" with dev, "*" in $$here" | *" with dev,mpi, "*" in $$here" | *" with dev$$cuda, "*" in $$here" | *" with dev,mpi$$cuda, "*" in $$here")
    if [ "$$have" = "$$want" ] && [ ! -f $(VENV)/.unfinished ] && $(PY) -m pip --version >/dev/null 2>&1; then keep=yes; fi ;;
esac
# its interpreter goes first, so that nothing can take what is left for an environment
if [ $$keep = no ]; then rm -rf $(VENV)/bin; rm -rf $(VENV); mkdir $(VENV); fi
: > $(VENV)/.unfinished
rm -f $(VENV)/.complete
if [ $$keep = no ]; then "$$chosen" -m venv $(VENV); fi
$(PY) -m pip install -q --disable-pip-version-check -e ".[dev,mpi$$cuda]"
echo "$$want with dev,mpi$$cuda, $$recipe" > $(VENV)/.complete
rm -f $(VENV)/.unfinished
endef
export ENVIRONMENT
