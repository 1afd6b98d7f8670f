"""Which precision is stored, computed in and accumulated in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupynet import checks
from cupynet.errors import ConfigError


@dataclass(frozen=True)
class DtypePolicy:
    """The precisions of one run.

    storage: what weights as the layers read them, activations and their gradients are kept in.
    compute: what a GEMM's operands are; on a CPU half is stored but computed in float, as it has no half kernels.
    accumulate: at least 32 bits: master weights, weight gradients, optimizer state, losses and averages.
    loss_scale: the factor on the loss's gradient that keeps small gradients above half's underflow (Micikevicius et al.
        2018, "Mixed precision training"); the optimizer divides by it. 1 where storage is not half.
    """

    name: str
    storage: np.dtype
    compute: np.dtype
    accumulate: np.dtype
    loss_scale: float = 1.0

    @classmethod
    def of(cls, name: str, *, half_arithmetic: bool = False) -> DtypePolicy:
        """The policy called `name` (half, float or double, or NumPy's float16, float32, float64).

        Args:
            half_arithmetic: whether the device multiplies halves.

        Raises:
            ConfigError: there is no such policy.
        """
        name = checks.dtype("dtype", name)
        half, single, double = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
        if name == "half":
            return cls(name, half, half if half_arithmetic else single, single, loss_scale=1024.0)
        stored = single if name == "float" else double
        return cls(name, stored, stored, stored)


def stored_dtype(name: str) -> np.dtype[Any]:
    """The dtype of this name.

    Raises:
        ConfigError: it is bfloat16, and ml_dtypes is missing.
    """
    if name != "bfloat16":
        return np.dtype(name)
    try:
        from ml_dtypes import bfloat16
    except ImportError as error:
        raise ConfigError(f"dtype=bfloat16: ml_dtypes is not installed ({error}): pip install ml_dtypes") from error
    found: np.dtype[Any] = np.dtype(bfloat16)
    return found
