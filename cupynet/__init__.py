"""cupynet: convnets from scratch on NumPy and CuPy, trained by replicas in parallel whose parameters are averaged.

The public names are found here but live in their rooms, and a room is imported when one of its names is first used:
`import cupynet` alone costs nothing and imports neither NumPy nor numba.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cupynet.backend import Backend, create_backend
    from cupynet.data import MNIST, Data, Dataset, Loader, Prefetcher, Synthetic
    from cupynet.errors import ConfigError, CupynetError, DataError, DivergedError, Interrupted, OutputError
    from cupynet.nn import (
        Activation,
        Context,
        Conv2D,
        Dense,
        Flat,
        Flatten,
        Image,
        Layer,
        MaxPool2D,
        Model,
        Params,
        Sequential,
        SoftmaxNLL,
    )
    from cupynet.optim import SGD, Constant, Nesterov, OneCycle
    from cupynet.training import Evaluation, ParallelWrapper, Trainer

__version__ = "0.1.0"

# fmt: off
__all__ = [
    "Backend", "create_backend",
    "Image", "Flat", "Context", "Params", "Layer", "Sequential", "Conv2D", "MaxPool2D", "Dense", "Activation",
    "Flatten", "SoftmaxNLL", "Model",
    "SGD", "Nesterov", "Constant", "OneCycle",
    "Dataset", "Data", "MNIST", "Synthetic", "Loader", "Prefetcher",
    "ParallelWrapper", "Trainer", "Evaluation",
    "CupynetError", "ConfigError", "DivergedError", "DataError", "OutputError", "Interrupted",
]
# fmt: on

_ROOMS = {
    "backend": ("Backend", "create_backend"),
    "nn": (
        *("Image", "Flat", "Context", "Params", "Layer", "Sequential", "Conv2D", "MaxPool2D", "Dense", "Activation"),
        *("Flatten", "SoftmaxNLL", "Model"),
    ),
    "optim": ("SGD", "Nesterov", "Constant", "OneCycle"),
    "data": ("Dataset", "Data", "MNIST", "Synthetic", "Loader", "Prefetcher"),
    "training": ("ParallelWrapper", "Trainer", "Evaluation"),
    "errors": ("CupynetError", "ConfigError", "DivergedError", "DataError", "OutputError", "Interrupted"),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> object:
    """Find a public name in its room (PEP 562); the next use finds it here, without this function."""
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{_ROOM_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ROOM_OF})
