"""Depthwise convolution: each filter uses one channel. The innermost loops run over the filters."""

from __future__ import annotations

import numpy as np

from cupynet.backend.array import Array
from cupynet.backend.cpu.kernels.jit import kernel
from cupynet.backend.cpu.kernels.narrow import reals, room, scratch, write_back
from cupynet.backend.window import IntPair


@kernel
def forward(x: Array, weight: Array, y: Array, stride: IntPair, padding: IntPair, dilation: IntPair) -> None:
    x, weight, y = reals(x), reals(weight), reals(y)
    floats = room(y[0, 0, 0])
    for n in range(y.shape[0]):
        for row in range(y.shape[1]):
            for col in range(y.shape[2]):
                out = scratch(y[n, row, col], floats)
                out[:] = 0
                for ky in range(weight.shape[0]):
                    down = row * stride[0] - padding[0] + ky * dilation[0]
                    if down < 0 or down >= x.shape[1]:
                        continue
                    for kx in range(weight.shape[1]):
                        across = col * stride[1] - padding[1] + kx * dilation[1]
                        if across < 0 or across >= x.shape[2]:
                            continue
                        pixel, factors = x[n, down, across], weight[ky, kx]
                        for c in range(pixel.size):
                            out[c] += pixel[c] * factors[c]
                write_back(y[n, row, col], floats)


@kernel
def input_gradient(dy: Array, weight: Array, dx: Array, stride: IntPair, padding: IntPair, dilation: IntPair) -> None:
    """dx = gradients times filters, summed over the windows that contain each pixel: (N, H', W', O) -> (N, H, W, O)."""
    dy, weight, dx = reals(dy), reals(weight), reals(dx)
    floats = room(dx[0])
    for n in range(dy.shape[0]):
        image = scratch(dx[n], floats)
        image[...] = 0
        for row in range(dy.shape[1]):
            for col in range(dy.shape[2]):
                gradient = dy[n, row, col]
                for ky in range(weight.shape[0]):
                    down = row * stride[0] - padding[0] + ky * dilation[0]
                    if down < 0 or down >= dx.shape[1]:
                        continue
                    for kx in range(weight.shape[1]):
                        across = col * stride[1] - padding[1] + kx * dilation[1]
                        if across < 0 or across >= dx.shape[2]:
                            continue
                        target, factors = image[down, across], weight[ky, kx]
                        for c in range(target.size):
                            target[c] += gradient[c] * factors[c]
        write_back(dx[n], floats)


@kernel
def weight_gradient(x: Array, dy: Array, grad: Array, stride: IntPair, padding: IntPair, dilation: IntPair) -> None:
    """grad (K_h, K_w, O) += sum of pixels times gradients, summed separately for each image for precision."""
    x, dy = reals(x), reals(dy)
    part = np.empty_like(grad)
    for n in range(dy.shape[0]):
        part[...] = 0
        for row in range(dy.shape[1]):
            for col in range(dy.shape[2]):
                gradient = dy[n, row, col]
                for ky in range(grad.shape[0]):
                    down = row * stride[0] - padding[0] + ky * dilation[0]
                    if down < 0 or down >= x.shape[1]:
                        continue
                    for kx in range(grad.shape[1]):
                        across = col * stride[1] - padding[1] + kx * dilation[1]
                        if across < 0 or across >= x.shape[2]:
                            continue
                        pixel, sums = x[n, down, across], part[ky, kx]
                        for c in range(pixel.size):
                            sums[c] += pixel[c] * gradient[c]
        for ky in range(grad.shape[0]):
            for kx in range(grad.shape[1]):
                for o in range(grad.shape[2]):
                    grad[ky, kx, o] += part[ky, kx, o]
