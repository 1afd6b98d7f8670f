"""Backends that this machine can test, and parameters for tests that run on each of them."""

import importlib.util
import os
from typing import Any

import pytest

from cupynet.backend import BACKENDS, select_backend
from cupynet.core.errors import ConfigError
from tests.standin import machine


def works(name: str) -> bool:
    try:
        return select_backend(name)[0] == name
    except ConfigError:
        return False


WORKING = [pytest.param(name, id=name, marks=[pytest.mark.gpu] * (name == "cupy")) for name in BACKENDS if works(name)]
WORKING.append(pytest.param("cupy", id="standin", marks=pytest.mark.standin))  # simulated: see tests/conftest.py
GPU = works("cupy")
REAL_GPU = GPU and machine.switched_on() is None  # not the stand-in of `python -m tests.standin`
# tests of GPU code run unchanged on the stand-in, and on a GPU if there is one
ON_DEVICES = [
    pytest.param("standin", marks=pytest.mark.standin),
    *([pytest.param("gpu", marks=pytest.mark.gpu)] if GPU else []),
]
every_backend = pytest.mark.parametrize("name", WORKING)
every_compiled_backend = pytest.mark.parametrize(  # NumPy runs the reference itself
    "name", [each for each in WORKING if each.values[0] != "numpy"]
)
every_dtype = pytest.mark.parametrize("dtype", ["half", "float", "double"])
NO_BFLOAT16 = "CUPYNET_TEST_ALL" not in os.environ and importlib.util.find_spec("ml_dtypes") is None
needs_bfloat16 = pytest.mark.skipif(NO_BFLOAT16, reason="ml_dtypes is not installed: pip install ml_dtypes")
every_narrow_dtype = pytest.mark.parametrize("dtype", ["half", pytest.param("bfloat16", marks=needs_bfloat16)])


def on_devices(*cases: Any, count: int = 1) -> list[Any]:
    """Return parameters for each case on the stand-in, and on GPUs if there are any. count: devices needed."""
    marks = [pytest.mark.gpu, *([pytest.mark.multi_gpu] if count > 1 else [])]
    found = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        name = "-".join(map(str, values))
        found.append(pytest.param(*values, id=name, marks=pytest.mark.standin))
        if GPU:
            found.append(pytest.param(*values, id=f"{name}-gpu", marks=marks))
    return found
