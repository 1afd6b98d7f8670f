"""What numba's kernels can take, and batches made by one of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import images as images_kernels
from cupynet.backend.device import Device
from cupynet.backend.pixels import FRACTIONS, PixelScale
from cupynet.backend.window import Window


class NumbaDevice(Device):
    """Arrays of NumPy, and rules for the compiled loops (`kernels/`) that work on them.

    The kernels read and write float and double, trust the shapes they are given and take contiguous arrays alone: each
    operation checks the shapes, and leaves arrays of another kind to NumPy. Under `half` a fused convolution works on
    copies in float; the other operations that touch stored activations are NumPy's.
    """

    def _compiles(self, *arrays: Array) -> bool:
        """Whether compiled code takes these: contiguous, and all in one precision. NumPy takes the others."""
        return all(array.flags.c_contiguous and array.dtype == arrays[0].dtype for array in arrays)

    def _stores(self, *arrays: Array) -> bool:
        """Whether compiled code takes these activations: contiguous, and stored in the compute precision."""
        return self.policy.compute == self.policy.storage == arrays[0].dtype and self._compiles(*arrays)

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        samples = np.asarray(samples)
        if samples.size and not -1 < samples.min() <= samples.max() < len(images):  # compiled code reads anywhere
            raise IndexError(f"samples {samples.min()} to {samples.max()}: there are {len(images)} images")
        whole = samples.ndim == 1 and samples.dtype.kind in "iu" and samples.size and images.size
        halved = self.policy.compute != self.policy.storage
        whole = whole and len(pixels.scale) in (1, images.shape[-1])  # NumPy says what is wrong with another number
        if halved or not whole or images.dtype != np.uint8 or not images.flags.c_contiguous:
            return super().load_images(images, samples, pixels)
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        rows, wide = images.reshape(len(images), -1), self.policy.storage.type
        rows.flags.writeable = False  # of this view: files are mapped read-only, and both kinds run the same code
        target = batch.reshape(len(samples), -1)
        if len(pixels.scale) == 1:
            images_kernels.gather_scale(rows, samples, wide(pixels.scale[0]), wide(pixels.shift[0]), target)
        else:
            repeats = rows.shape[1] // len(pixels.scale)  # tables of a whole image: the loop has no inner one
            scale, shift = (np.tile(np.array(each, wide), repeats) for each in (pixels.scale, pixels.shift))
            images_kernels.gather_scale_each(rows, samples, scale, shift, target)
        return batch


def window_numbers(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Kernel, stride, and the zeros (above, left of) images, as kernels take them."""
    (above, _), (left, _) = window.padding
    return window.kernel, window.stride, (above, left)
