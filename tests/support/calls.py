"""Watch the calls of a method."""

from collections.abc import Callable
from typing import Any

import pytest


def watch(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> None:
    """Call `note(result, *arguments)` after each call of a method. The first argument is the object."""
    original = getattr(owner, name)

    def call(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        note(result, *arguments)
        return result

    monkeypatch.setattr(owner, name, call)
