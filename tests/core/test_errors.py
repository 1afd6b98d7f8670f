"""Errors and their causes."""

from __future__ import annotations

from cupynet.core.errors import causes


def test_causes_are_yielded_from_the_outermost_error_inwards() -> None:
    first, second, third = ValueError("first"), TypeError("second"), OSError("third")
    first.__cause__, first.__context__, second.__context__ = second, third, third
    assert list(causes(first)) == [first, second, third]
    assert list(causes(None)) == []
