"""cupynet: convnets from scratch on NumPy and CuPy, trained as parallel replicas whose parameters are averaged.

The public names are listed in `__init__.pyi`. Each is imported from its package when it is first used, so that
`import cupynet` imports neither NumPy nor numba.
"""

import ast
import sys
from importlib import import_module
from pathlib import Path

from cupynet.core.version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [line for line in _STUB.body if isinstance(line, ast.ImportFrom)]
_MODULES = {name.name: line.module or "" for line in _IMPORTS for name in line.names}

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    """Import a public name from its package (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__])
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
