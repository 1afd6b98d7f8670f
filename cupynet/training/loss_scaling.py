"""Dynamic loss scaling (Micikevicius et al. 2018, "Mixed precision training").

When a gradient overflows, the step is skipped and the scale is halved. After 2,000 iterations without overflow, the
scale is doubled. A non-finite loss is an error, and so is an overflow at the smallest scale.
"""

from __future__ import annotations

from typing import Any

from cupynet.backend import Backend, Scaling
from cupynet.parallel import Communicator

GROW_AFTER = 2000  # iterations without overflow
MIN_SCALE, MAX_SCALE = 1.0, 2.0**24


class LossScaler:
    """Adapts the `loss_scale` of a backend. Every worker must make the same calls.

    Args:
        together: the workers that skip steps together: the stages of a replica, or all workers.
        joint: True if these are all workers, because the gradient of a replica depends on the other replicas.
    """

    def __init__(self, backend: Backend, together: Communicator, *, joint: bool = False) -> None:
        self._backend, self._together, self.joint = backend, together, joint
        self.skipped, self.skipping = 0, False  # skipping: the step of this iteration is skipped
        self.steady = 0  # iterations since the scale changed (see `skips`)
        if together.size > 1:  # an earlier wrapper may have changed the scale of the model
            backend.loss_scale = float(together.gather_numbers(backend.loss_scale)[0, 0])

    @property
    def scale(self) -> float:
        return self._backend.loss_scale * (2 if self._grows else 1)

    @property
    def _grows(self) -> bool:
        return self.steady >= GROW_AFTER and self._backend.loss_scale < MAX_SCALE

    def grow(self) -> None:
        """Double the scale if due. Call this between iterations, because an update divides by the scale."""
        if self._grows:
            self._set(self.scale)

    def skips(self, *, overflow: bool, failed: bool, idle: bool = False) -> bool:
        """Adapt the scale. Return True to skip this step.

        Args:
            failed: this worker's loss is not finite.
            idle: this worker has no batch. Workers that skip steps independently do not count such an iteration.
        """
        failed = failed or (overflow and self.scale <= MIN_SCALE)
        if self._together.size > 1:
            table = self._together.gather_numbers(overflow, failed, self.scale)  # (W, 3)
            overflow, failed = bool(table[:, 0].any()), bool(table[:, 1].any())
            self._backend.loss_scale = float(table[-1, 2])  # the scale of the current gradients
        self.skipping = overflow and not failed
        if not idle or self._together.size > 1:
            self.steady += 1
        if self.skipping:
            self._set(max(self._backend.loss_scale / 2, MIN_SCALE))
            self.skipped += 1
        return self.skipping

    @property
    def scaling(self) -> Scaling:
        return Scaling(GROW_AFTER, MIN_SCALE, MAX_SCALE)

    def count(self, steady: int, skipped: int) -> None:
        self.steady, self.skipped = steady, self.skipped + skipped

    def of_all(self, replicas: Communicator) -> int:
        """Return the number of skipped steps over all replicas, counting joint skips once."""
        return self.skipped if self.joint else int(replicas.gather_numbers(self.skipped).sum())

    def state(self) -> dict[str, Any]:
        self.grow()
        return {"scale": self.scale, "rounds": self.steady, "skipped": self.skipped}

    def restore(self, state: dict[str, Any]) -> None:
        if state:
            self._set(float(state["scale"]))
            self.steady, self.skipped = int(state["rounds"]), int(state["skipped"])

    def restored(self) -> None:
        """Agree on a scale after `restore`, because these workers may have adapted their scales separately."""
        if self._together.size > 1:
            table = self._together.gather_numbers(self._backend.loss_scale, self.steady)  # (W, 2)
            self._backend.loss_scale, self.steady = float(table[:, 0].min()), int(table[:, 1].min())

    def _set(self, scale: float) -> None:
        self._backend.loss_scale, self.steady = scale, 0
