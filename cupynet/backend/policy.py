from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.core import shared_options
from cupynet.core.errors import ConfigError


@dataclass(frozen=True)
class DtypePolicy:
    """Dtypes of a run.

    Attributes:
        storage: dtype of activations, their gradients, and the weights that layers read.
        compute: dtype of matrix-product operands; on a CPU, float for half and bfloat16 (except on AMX units).
        accumulate: dtype of master weights, weight gradients, optimizer state, losses and averages; at least 32 bits.
        loss_scale: initial factor of the loss gradient, which prevents underflow in half; 1 for other dtypes.
    """

    name: str
    storage: np.dtype
    compute: np.dtype
    accumulate: np.dtype
    loss_scale: float = 1.0

    @classmethod
    def of(cls, name: str, *, half_arithmetic: bool = False) -> DtypePolicy:
        """Return the policy for a dtype name. half_arithmetic: True if the device multiplies 16-bit numbers."""
        name = shared_options.dtype("dtype", name)
        single, double = np.dtype(np.float32), np.dtype(np.float64)
        if name in ("half", "bfloat16"):
            sixteen_bit = stored_dtype("float16" if name == "half" else name)
            scale = 1024.0 if name == "half" else 1.0
            return cls(name, sixteen_bit, sixteen_bit if half_arithmetic else single, single, loss_scale=scale)
        stored = single if name == "float" else double
        return cls(name, stored, stored, stored)


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype with this name. Raise ConfigError for bfloat16 if ml_dtypes is not installed."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        reason = f"ml_dtypes is not installed ({error}). Run pip install ml_dtypes"
        raise ConfigError(reason, "dtype", "bfloat16") from error
    result: np.dtype[Any] = np.dtype(bfloat16)
    return result
