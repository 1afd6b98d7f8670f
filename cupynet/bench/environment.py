"""Check that an interpreter can run cupynet on a GPU: `python -m cupynet.bench.environment [module ...]`.

For `make test-gpu` and `make bench-gpu`, which install nothing. Prints nothing and exits with 0 if it can, otherwise
names what is missing on stderr and exits with 2. Needs only the standard library.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

# module -> package, as in pyproject.toml
NEEDED = {
    "numpy": "numpy",
    "filelock": "filelock",
    "hydra": "hydra-core",
    "omegaconf": "omegaconf",
    "jinja2": "jinja2",
    "mnist": "mnist",
    "numba": "numba",
    "platformdirs": "platformdirs",
    "rich": "rich",
    "safetensors": "safetensors",
    "threadpoolctl": "threadpoolctl",
    "yaml": "pyyaml",
    "cupy": "cupy-cuda12x or cupy-cuda13x",
}
LACKING = 2


def lacks(modules: list[str]) -> str:
    """Return what keeps this interpreter from using a GPU; "" if nothing does. modules: also needed."""
    wanted = NEEDED | {name: name for name in modules}
    missing = [f"{name} ({brings})" if brings != name else name for name, brings in wanted.items() if not _there(name)]
    if missing:
        return f"{sys.executable} lacks the modules {', '.join(missing)}: name an interpreter that has them, PYTHON=..."
    from cupynet.backend.cuda import probe

    why = probe()
    return "" if why is None else f"no GPU can be used: {why}"


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a broken package
        return False


def main(arguments: list[str]) -> int:
    """Run the command. Return the exit code."""
    why = lacks(arguments)
    if why:
        print(f"cupynet: {why}", file=sys.stderr)
    return LACKING if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
