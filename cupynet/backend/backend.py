"""The operations that layers, losses and optimizers call.

`reference/` implements each once, for NumPy and CuPy; `cpu/` and `cuda/` override those that they accelerate. Kernels
do not check shapes and layouts: try a new layer on numpy first.

Axis letters: N batch, H W image, C channels in, O channels out, K kernel, F features, P parameters.

Results are borrowed from `workspace`. Operations do not change their arguments unless documented. Arrays are
C-contiguous, activations in `policy.storage`. Weight gradients are accumulated, in `policy.accumulate`.
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


class Backend(BatchOps, ConvOps, PoolOps, NormOps, DropoutOps, LossOps, UpdateOps):
    """A device with every operation of the reference."""

    def recorder(self) -> Recorder | None:
        """Return the recorder that captures steps as graphs, or None if the device cannot."""
        return None
