from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cupynet.core.errors import ConfigError

IntPair: TypeAlias = tuple[int, int]  # (height, width)


@dataclass(frozen=True)
class Window:
    """Sliding window of a convolution or pooling layer.

    Attributes:
        kernel: (K_h, K_w), height and width in pixels.
        stride: step in pixels between neighboring windows, (vertical, horizontal).
        padding: rows (top, bottom) and columns (left, right) of zeros around the image. Pooling ignores them.
        dilation: distance in pixels between neighbors in the window, (vertical, horizontal).
    """

    kernel: IntPair
    stride: IntPair = (1, 1)
    padding: tuple[IntPair, IntPair] = ((0, 0), (0, 0))
    dilation: IntPair = (1, 1)

    @property
    def extent(self) -> IntPair:
        """Height and width that the dilated window covers."""
        rows, cols = ((self.kernel[i] - 1) * self.dilation[i] + 1 for i in (0, 1))
        return rows, cols

    @property
    def dilates(self) -> bool:
        return self.dilation != (1, 1)

    @property
    def size(self) -> int:
        """Number of pixels in the window. Pixel (ky, kx) has index ky · K_w + kx."""
        return self.kernel[0] * self.kernel[1]

    @property
    def index_dtype(self) -> np.dtype[Any]:
        """Dtype of pixel indices plus a value for "none" (cuda/kernels/pool.cu): uint8 if possible, otherwise int32."""
        return np.dtype(np.uint8 if self.size <= 255 else np.int32)

    @property
    def pads(self) -> bool:
        return any(self.padding[0]) or any(self.padding[1])

    def padded(self, height: int, width: int) -> IntPair:
        return height + sum(self.padding[0]), width + sum(self.padding[1])

    def output(self, height: int, width: int) -> IntPair:
        """Return the number of windows (H', W'); 0 or negative if none fits."""
        padded, extent = self.padded(height, width), self.extent
        rows, cols = ((padded[i] - extent[i]) // self.stride[i] + 1 for i in (0, 1))
        return rows, cols

    def fits(self, height: int, width: int) -> bool:
        return min(self.output(height, width)) > 0

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ConfigError unless images are (N, H, W, C) and large enough for the window. Kernels do not check."""
        if len(shape) != 4 or not self.fits(*shape[1:3]):
            raise ConfigError(f"images of shape {tuple(shape)}: must be (N, H, W, C) and large enough for {self}")

    def check_weight(self, shape: tuple[int, ...], weight: tuple[int, ...], groups: int = 1) -> None:
        """Raise ConfigError unless a weight (K_h, K_w, C / groups, O) fits images of `shape`."""
        self.check(shape)
        fits = weight[:3] == (*self.kernel, shape[3] / groups) and len(weight) == 4 and weight[3] % groups == 0
        if not fits:
            raise ConfigError(
                f"a weight of shape {tuple(weight)}: must be (K_h, K_w, C / {groups}, a multiple of {groups}) for "
                f"{self} on images with {shape[3]} channels"
            )

    def inside(self, height: int, width: int) -> tuple[slice, ...]:
        """Return the slices that select the original images from padded images (N, H, W, C)."""
        (top, _), (left, _) = self.padding
        return slice(None), slice(top, top + height), slice(left, left + width)

    def slices(self, ky: int, kx: int, output: IntPair) -> tuple[slice, ...]:
        """Return the slices that select pixel (ky, kx) of all `output` windows from padded images (N, H, W, C)."""
        (down, across), (rows, cols) = self.stride, output
        ky, kx = ky * self.dilation[0], kx * self.dilation[1]
        return slice(None), slice(ky, ky + down * rows, down), slice(kx, kx + across * cols, across)
