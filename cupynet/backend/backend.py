"""The operations that layers, losses and optimizers call.

`reference/` writes each once, against an array module (`numpy` or `cupy`); `cpu/` and `cuda/` override what they do
faster and fall back to `super()`. Layers call these operations and nothing else that is heavy.

Axis letters: N batch, H W image, C channels in, O channels out, K kernel, F features, P parameters.

Ownership, for every operation: what is returned was borrowed from `workspace`; arguments stay the caller's, except for
the one of an in-place operation, which says so. Arrays are C-contiguous, activations in `policy.storage`. Gradients of
weights are *added*, in `policy.accumulate`.
"""

from __future__ import annotations

from cupynet.backend.fusion import FusedPair, Operation
from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.reference.dropout import DropoutOps
from cupynet.backend.reference.loss import LossOps
from cupynet.backend.reference.norm import NormOps
from cupynet.backend.reference.pool import PoolOps
from cupynet.backend.reference.update import UpdateOps


class Backend(ConvOps, PoolOps, NormOps, DropoutOps, LossOps, UpdateOps):
    """A device with every operation, as the reference has it."""

    def fused_pair(self, first: Operation, second: Operation) -> FusedPair | None:
        """Both operations as one that is faster here than the two in turn; None where there is none.

        Asked for when a network is built.
        """
        return None
