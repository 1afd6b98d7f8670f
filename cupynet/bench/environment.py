"""Whether an interpreter can run cupynet on a GPU as it is: `python -m cupynet.bench.environment [module ...]`.

For `make test-gpu` and `make bench-gpu`, which install nothing. Silent and 0 where it can; else one line on stderr that
names what it lacks, and 2. It needs nothing itself but Python.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

# what is imported -> what brings it, as pyproject.toml has it
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
    """What keeps this interpreter from a GPU, in a line; "" where nothing does. modules: that are needed too."""
    wanted = NEEDED | {name: name for name in modules}
    missing = [f"{name} ({brings})" if brings != name else name for name, brings in wanted.items() if not _there(name)]
    if missing:
        what = "the module" if len(missing) == 1 else "the modules"
        return f"{sys.executable} lacks {what} {', '.join(missing)}: name an interpreter that has them, PYTHON=..."
    from cupynet.backend.cuda import probe

    why = probe()
    return "" if why is None else f"no GPU can be used: {why}"


def _there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # of a package that is there and broken
        return False


def main(arguments: list[str]) -> int:
    """The command; its exit code."""
    why = lacks(arguments)
    if why:
        print(f"cupynet: {why}", file=sys.stderr)
    return LACKING if why else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
