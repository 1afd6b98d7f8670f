"""Validators and names shared by settings and constructor arguments: dtypes, launch limits, worker counts.

This module does not import NumPy, to keep --help fast.
"""

from __future__ import annotations

from functools import partial
from threading import TIMEOUT_MAX
from typing import Any

from cupynet.core.checks import flag, integer, is_bool, number, one_of
from cupynet.core.errors import ConfigError
from cupynet.core.wording import guess, shown

DTYPES = ("half", "bfloat16", "float", "double")
DTYPE_ALIASES = {"float16": "half", "float32": "float", "float64": "double"}  # NumPy's names
BACKENDS = ("numpy", "numba", "cupy")
SCALES = ("none", "linear", "sqrt")  # scaling of the learning rate with the number of workers
LAUNCHERS = ("thread", "mpi")
REDUCES = ("auto", "nccl", "device", "host")  # how arrays on GPUs are averaged
MOST_WORKERS = 10_000  # each worker is a thread with a replica

# validators, called with a name and a value
workers = partial(integer, minimum=1, most=MOST_WORKERS)
prefetch_buffer = partial(integer, minimum=0)
accumulation_steps = partial(integer, minimum=1)
log_every = partial(integer, minimum=0)
timeout_s = partial(number, above=0, below=TIMEOUT_MAX, unit="seconds")
launcher = partial(one_of, names=LAUNCHERS)
reduce = partial(one_of, names=REDUCES)


def on_device(name: str, value: Any, backend: str = "cupy") -> bool | str:
    """Validate a setting that is `auto`, true or false. True requires a GPU."""
    if isinstance(value, str) and value == "auto":
        return value
    if not is_bool(value):
        raise ConfigError("must be auto, true or false", name, shown(value, str))
    if value and backend != "cupy":
        raise ConfigError(f"requires a GPU, but backend {backend} runs on the CPU. Remove this setting", name, "true")
    return bool(value)


def dtype(name: str, value: Any) -> str:
    """Return the name of a dtype in `DTYPES`, given that name or NumPy's."""
    return one_of(name, DTYPE_ALIASES.get(value, value) if isinstance(value, str) else value, DTYPES)


def block_size(name: str, value: Any) -> int:
    """Validate the maximum number of threads per GPU block, which is at least one warp."""
    return integer(name, value, 32, most=1024, why="the limit of the hardware")


def grid_size(name: str, value: Any) -> int | None:
    """Validate the maximum number of blocks per kernel launch; None for no limit."""
    return None if value is None else integer(name, value, 1, ", or null for no limit", most=(1 << 31) - 1)


def tf32_products(name: str, value: Any, backend: str, dtype: str) -> bool:
    """Validate the setting for TF32, which requires a GPU and dtype=float."""
    if flag(name, value) and backend != "cupy":
        raise ConfigError(f"requires a GPU, but backend {backend} runs on the CPU. Remove this setting", name, "true")
    if value and DTYPE_ALIASES.get(dtype, dtype) != "float":
        reason = f"requires dtype=float, but dtype={dtype}. Remove this setting, or use dtype=float"
        raise ConfigError(reason, name, "true")
    return bool(value)


def learning_rate_scale(name: str, value: Any) -> str | float:
    """Validate a name in `SCALES` or a factor above 0."""
    if isinstance(value, str) and value in SCALES:
        return value
    return number(name, value, above=0, also=f", or one of {', '.join(SCALES)}{guess(value, SCALES)}")
