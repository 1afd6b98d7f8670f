"""The type of arrays in annotations: NumPy's or CuPy's, which share no base class."""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
