"""What kernels over windows of images are given."""

from __future__ import annotations

from cupynet.backend.cuda.device import MOST_VALUES, CudaDevice
from cupynet.backend.window import Window


class CudaWindows(CudaDevice):
    """The geometry of images and windows, as kernels take it."""

    def _geometry(self, shape: tuple[int, ...], window: Window) -> tuple[int, ...]:
        """What kernels over windows are told of images (N, H, W, C)."""
        (top, _), (left, _) = window.padding
        return (*shape[1:], *window.output(*shape[1:3]), *window.kernel, *window.stride, top, left)

    def _values(self, shape: tuple[int, ...], window: Window) -> int | None:
        """How many values the windows of one image have; None where they are more than kernels can number."""
        _, height, width, channels = shape
        rows, cols = window.output(height, width)
        values = rows * cols * window.places * channels
        padded_height, padded_width = window.padded(height, width)
        return values if max(values, padded_height * padded_width * channels, shape[0]) < MOST_VALUES else None
