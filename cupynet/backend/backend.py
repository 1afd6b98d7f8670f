"""The operations that layers, losses and optimizers call (see README.md).

Axes: N batch, H and W image, C input channels, O output channels, K kernel, F features, P parameters.

Results are borrowed from `workspace`. Operations do not modify their arguments unless documented. Arrays are
C-contiguous. Activations have dtype `policy.storage`. Weight gradients are accumulated in `policy.accumulate`. Kernels
do not check shapes or layouts, so test a new layer on the `numpy` backend first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cupynet.backend.reference.conv import ConvOps
from cupynet.backend.reference.dropout import DropoutOps
from cupynet.backend.reference.loss import LossOps
from cupynet.backend.reference.norm import NormOps
from cupynet.backend.reference.pool import PoolOps
from cupynet.backend.reference.update import UpdateOps
from cupynet.backend.transfer import BatchOps

if TYPE_CHECKING:
    from cupynet.backend.cuda.graph_capture import Recorder


class Backend(BatchOps, ConvOps, NormOps, PoolOps, DropoutOps, LossOps, UpdateOps):
    """A device with all reference operations."""

    def recorder(self) -> Recorder | None:
        """Return a recorder for graph capture, or None if the backend does not support it."""
        return None
