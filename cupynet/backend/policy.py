from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet.core import shared_options
from cupynet.core.errors import ConfigError


@dataclass(frozen=True)
class DtypePolicy:
    """The precisions of one run.

    Attributes:
        storage: of activations, their gradients, and weights as layers read them.
        compute: of the operands of products; on a CPU, float for half and bfloat16.
        accumulate: of master weights, weight gradients, optimizer state, losses and averages; at least 32 bits.
        loss_scale: the factor on the gradient of the loss that keeps small gradients from underflow in half
            (Micikevicius et al. 2018, "Mixed precision training"); 1 in other precisions.
    """

    name: str
    storage: np.dtype
    compute: np.dtype
    accumulate: np.dtype
    loss_scale: float = 1.0

    @classmethod
    def of(cls, name: str, *, half_arithmetic: bool = False) -> DtypePolicy:
        """Return the policy half, bfloat16, float or double; `half_arithmetic`: the device multiplies halves."""
        name = shared_options.dtype("dtype", name)
        single, double = np.dtype(np.float32), np.dtype(np.float64)
        if name in ("half", "bfloat16"):
            narrow = stored_dtype("float16" if name == "half" else name)
            scale = 1024.0 if name == "half" else 1.0
            return cls(name, narrow, narrow if half_arithmetic else single, single, loss_scale=scale)
        stored = single if name == "float" else double
        return cls(name, stored, stored, stored)


def stored_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of this name. Raise ConfigError for bfloat16 without ml_dtypes."""
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        reason = f"ml_dtypes is not installed ({error}): pip install ml_dtypes"
        raise ConfigError(reason, "dtype", "bfloat16") from error
    found: np.dtype[Any] = np.dtype(bfloat16)
    return found
