"""The type of a trainer in annotations of modules that `trainer` imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from cupynet.training.trainer import Trainer

TrainerView: TypeAlias = "Trainer"
