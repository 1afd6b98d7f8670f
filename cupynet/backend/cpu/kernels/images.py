from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals


@kernel
def gather_scale(images: Array, samples: Array, scale: Array, shift: Array, batch: Array) -> None:
    """batch[i] = images[samples[i]] · scale + shift. images: (S, F) uint8; scale, shift: (F,); batch: (N, F)."""
    batch = reals(batch)
    for i in range(samples.size):
        source = images[samples[i]]
        target = batch[i]
        for j in range(target.size):
            target[j] = source[j] * scale[j] + shift[j]
