"""Batches made by a numba kernel, and the geometry of windows as kernels take it."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels import images as images_kernels
from cupynet.backend.device import Device
from cupynet.backend.transfer import FRACTIONS, PixelScale
from cupynet.backend.window import Window


class NumbaDevice(Device):
    """See `Device`."""

    def load_images(self, images: Any, samples: Any, pixels: PixelScale = FRACTIONS) -> Array:
        samples = np.asarray(samples)
        if samples.size and not -1 < samples.min() <= samples.max() < len(images):  # the kernel would read anywhere
            raise IndexError(f"samples {samples.min()} to {samples.max()}: there are {len(images)} images")
        if not samples.size or not images.flags.c_contiguous or len(pixels.scale) not in (1, images.shape[-1]):
            return super().load_images(images, samples, pixels)
        batch = self.allocate((len(samples), *images.shape[1:]), self.policy.storage)
        rows, wide = images.reshape(len(images), -1), self.policy.storage.type
        rows.flags.writeable = False  # as memory-mapped files: one kernel for both
        target = batch.reshape(len(samples), -1)
        repeats = rows.shape[1] // len(pixels.scale)  # tables for a whole image, so that the kernel has one loop
        scale, shift = (np.tile(np.array(each, wide), repeats) for each in (pixels.scale, pixels.shift))
        images_kernels.gather_scale(rows, samples, scale, shift, target)
        return batch


def flat(*arrays: Array) -> bool:
    """Return True if kernels take these arrays as flat vectors: of one shape, without gaps. They check no bounds."""
    return all(array.shape == arrays[0].shape and array.flags.c_contiguous for array in arrays)


def window_numbers(window: Window) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Kernel, stride, and padding (above, left), as kernels take them."""
    (above, _), (left, _) = window.padding
    return window.kernel, window.stride, (above, left)
