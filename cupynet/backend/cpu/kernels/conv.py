"""im2col rows of windows, and their transpose."""

from __future__ import annotations

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.window import IntPair


@kernel
def im2col(x: Array, windows: Array, rows: int, stride: IntPair, channels: int) -> None:
    """Copy each window as K_h contiguous segments of K_w·C: (N, H, W·C) -> (N·H', W', K_h, K_w·C)."""
    kernel_height, segment = windows.shape[2], windows.shape[3]
    for line in range(windows.shape[0]):
        image = x[line // rows]
        top = line % rows * stride[0]
        for col in range(windows.shape[1]):
            left = col * stride[1] * channels
            for ky in range(kernel_height):
                source = image[top + ky, left : left + segment]
                target = windows[line, col, ky]
                for j in range(segment):
                    target[j] = source[j]


@kernel
def col2im(windows: Array, x: Array, rows: int, stride: IntPair, channels: int) -> None:
    """The transpose of im2col: x = 0, then every segment is added where it came from."""
    kernel_height, segment = windows.shape[2], windows.shape[3]
    for n in range(x.shape[0]):
        image = x[n]
        image[...] = 0
        for row in range(rows):
            line = n * rows + row
            for col in range(windows.shape[1]):
                left = col * stride[1] * channels
                for ky in range(kernel_height):
                    target = image[row * stride[0] + ky, left : left + segment]
                    source = windows[line, col, ky]
                    for j in range(segment):
                        target[j] += source[j]
