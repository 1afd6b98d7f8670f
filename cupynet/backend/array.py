"""What an array is to the type checker: NumPy's or CuPy's, which share no type."""

from __future__ import annotations

from typing import Any, TypeAlias

Array: TypeAlias = Any
