"""The factor on the loss that keeps small gradients above what 16 bits can hold, found while training.

It is halved where a gradient overflows, and that step is left out; after a while without one it is doubled
(Micikevicius et al. 2018, "Mixed precision training", and the practice of NVIDIA's apex). That is how the largest
factor is found, and no failure: one is a loss that is not finite, or a gradient that is not with the smallest factor.
"""

from __future__ import annotations

from typing import Any

from cupynet.backend import Backend, Scaling
from cupynet.parallel import Communicator, Groups

GROW_AFTER = 2000  # rounds without an overflow
LEAST, MOST = 1.0, 2.0**24


class LossScaler:
    """One worker's part in the factor of its replica. Every worker makes the same calls.

    Args:
        backend: whose `loss_scale` is set.
        together: the workers that leave a step out together: the stages of a replica, or all where gradients are
            shared. The last of them computes the loss, or all do.
        shared: whether these are all.

    Attributes:
        skipped: steps that were left out.
        skipping: whether that of this round is.
        steady: rounds since the factor was changed.
    """

    def __init__(self, backend: Backend, together: Communicator, *, shared: bool = False) -> None:
        self._backend, self._together, self._shared = backend, together, shared
        self.skipped, self.skipping = 0, False
        self.steady = 0

    @classmethod
    def of(cls, backend: Backend, groups: Groups, *, shared: bool) -> LossScaler | None:
        """For what is stored in 16 bits; None where nothing can get lost."""
        if backend.policy.loss_scale == 1:
            return None
        return cls(backend, groups.world if shared else groups.stages, shared=shared)

    @property
    def scale(self) -> float:
        """The factor of the next step."""
        return self._backend.loss_scale

    def skips(self, *, overflow: bool, failed: bool) -> bool:
        """After the gradients of a round: whether its step is left out, on all that do so together.

        Args:
            overflow: whether this worker's gradient is not finite.
            failed: whether its loss is not, which a smaller factor does not mend.
        """
        failed = failed or (overflow and self.scale <= LEAST)
        if self._together.size > 1:
            told = self._together.gather_numbers(overflow, failed, self.scale)  # (W, 3)
            overflow, failed = bool(told[:, 0].any()), bool(told[:, 1].any())
            self._backend.loss_scale = float(told[-1, 2])  # what the gradients of this round were made with
        self.skipping = overflow and not failed
        return self.skipping

    def updated(self) -> None:
        """At the end of a round: the factor of the next one."""
        self.steady += 1
        if self.skipping:
            self._set(max(self.scale / 2, LEAST))
            self.skipped += 1
        elif self.steady >= GROW_AFTER and self.scale < MOST:
            self._set(self.scale * 2)
        self.skipping = False

    @property
    def scaling(self) -> Scaling:
        """The same rule for steps that run ahead of the host."""
        return Scaling(GROW_AFTER, LEAST, MOST)

    def learn(self, steady: int, skipped: int) -> None:
        """Steps that ran ahead have found the factor, which the backend has; they left some out."""
        self.steady, self.skipped = steady, self.skipped + skipped

    def meet(self, replicas: Communicator) -> None:
        """At an average: all replicas take the least factor, whose own last step had room for it."""
        least = float(replicas.gather_numbers(self.scale).min()) if replicas.size > 1 else self.scale
        if least != self.scale:
            self._set(least)

    def of_all(self, replicas: Communicator) -> int:
        """Steps that were left out, of all replicas; those that were left out together count once."""
        return self.skipped if self._shared else int(replicas.gather_numbers(self.skipped).sum())

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold."""
        return {"scale": self.scale, "rounds": self.steady, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what `state` returned; {} where what it is of had no factor. ValueError: it is no such state."""
        if state:
            scale, rounds, skipped = float(state["scale"]), int(state["rounds"]), int(state["skipped"])
            if not LEAST <= scale <= MOST or min(rounds, skipped) < 0:
                raise ValueError(
                    f"scaling: expected a factor from {LEAST:g} to {MOST:g} and counts, found {state!r:.80}"
                )
            self._set(scale)
            self.steady, self.skipped = rounds, skipped

    def _set(self, scale: float) -> None:
        self._backend.loss_scale, self.steady = scale, 0
