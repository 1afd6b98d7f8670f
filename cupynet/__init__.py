"""cupynet: convnets from scratch on NumPy and CuPy, trained as parallel replicas whose parameters are averaged.

The public names are listed in `__init__.pyi`. Each is imported from its package on first use, so that `import cupynet`
imports neither NumPy nor Numba.
"""

import ast
from importlib import import_module
from pathlib import Path

from cupynet.core.version import __version__ as __version__

_STUB = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
_IMPORTS = [line for line in _STUB.body if isinstance(line, ast.ImportFrom)]
_MODULES = {name.name: line.module or "" for line in _IMPORTS for name in line.names}

__all__ = list(_MODULES)

# Keras and PyTorch names for which `guess` finds nothing or the wrong class, and the names to suggest
_ELSEWHERE = {
    "load_model": "load",
    "Input": "Image",
    "Linear": "Dense",
    "ReLU": "Activation",
    "Add": "Residual",
    "CategoricalCrossentropy": "SoftmaxNLL",
    "SparseCategoricalCrossentropy": "SoftmaxNLL",
    "CrossEntropyLoss": "SoftmaxNLL",
    "MSELoss": "MeanSquaredError",
    "BCEWithLogitsLoss": "BinaryCrossEntropy",
    "NAdam": "Nadam",
    "Lamb": "LAMB",
    "StepLR": "StepDecay",
    "CosineAnnealingLR": "Cosine",
    "CSVLogger": "HistoryWriter",
    "RandomFlip": "HorizontalFlip",
    "RandomTranslation": "Shift",
    "RandomRotation": "Rotate",
}


def __getattr__(name: str) -> object:
    """Import a public name from its package (PEP 562)."""
    if name not in _MODULES:
        # without `obj`, so that Python does not add its own suggestion
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_hint(name)}", name=name)
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def _hint(name: str) -> str:
    from cupynet.core.wording import guess

    if name in _ELSEWHERE:
        return f"; it is called {_ELSEWHERE[name]!r} here"
    return "" if name.startswith("_") else guess(name, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
