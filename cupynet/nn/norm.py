from __future__ import annotations

from typing import Any

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.nn.context import Context
from cupynet.nn.dense import Activation
from cupynet.nn.init import ones, zeros
from cupynet.nn.layer import Backward, Layer, no_backward
from cupynet.nn.params import Scope
from cupynet.nn.types import InputType


class BatchNorm(Layer):
    """Batch normalization (Ioffe & Szegedy 2015): (x - mean) / sqrt(variance + epsilon) · scale + shift per channel.

    Channels are the last axis. Training uses the statistics of the worker's batch or micro-batch; evaluation uses
    running statistics, which are buffers (`norm1.mean`, `norm1.variance`), averaged and saved with the weights. `scale`
    and `shift` have no weight decay.

    Without `sync`, the result depends on the number of workers. With `sync`, if weights or gradients are averaged in
    every iteration, several workers compute the same result as one worker on all samples (for plain SGD or momentum).

    As in PyTorch, batches are normalized with the biased variance (divided by n), and the running variance is unbiased
    (n - 1). If `scale` and `shift` are frozen (`Model.freeze`), training uses the running statistics unchanged, as in
    Keras. If a batch has one value per channel, the output is `shift`, and the running statistics do not change.

    Args:
        momentum: decay of the running statistics: 0.99 in Keras, 0.9 in Deeplearning4j (`decay`). PyTorch's momentum is
            1 minus this value.
        epsilon: added to the variance; 1e-5 in PyTorch and Deeplearning4j, 1e-3 in Keras.
        sync: True to compute statistics over the batches of all replicas, with three exchanges per forward pass and one
            per backward pass. This disables graph capture, and is not supported in pipelines.
    """

    capturable = True

    def __init__(self, momentum: float = 0.9, epsilon: float = 1e-5, sync: bool = False) -> None:
        self.momentum = checks.number("BatchNorm momentum", momentum, minimum=0, below=1)
        self.epsilon = checks.number("BatchNorm epsilon", epsilon, above=0)
        self.sync = self.syncs_replicas = checks.flag("BatchNorm sync", sync)

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        channels = input.shape[-1:]
        self.scale = params.add("scale", channels, ones, decay=False)
        self.shift = params.add("shift", channels, zeros, decay=False)
        self.mean = params.add_buffer("mean", channels)
        self.variance = params.add_buffer("variance", channels, 1.0)
        return input

    @property
    def frozen(self) -> bool:
        """True if `scale` and `shift` are frozen. Training then uses the running statistics."""
        return self.scale.frozen and self.shift.frozen

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        return self.normalized(x, context, relu=False)

    def fuse(self, following: Layer) -> Layer | None:
        own = type(self) is BatchNorm and type(following) is Activation  # subclasses may compute something else
        return BatchNormReLU(self) if own and following.output_activation == "relu" else None

    def normalized(
        self, x: Array, context: Context, *, relu: bool, around: Array | None = None
    ) -> tuple[Array, Backward]:
        """Normalize x (N, ..., C), add `around`, and apply a ReLU if `relu`.

        With `around`, `backward` returns dx in a new array and overwrites dy with the gradient of `around`.
        """
        backend, epsilon, scale, shift = self.backend, self.epsilon, self.scale, self.shift
        has_residual = around is not None
        affine, frozen = (scale.data, shift.data), self.frozen
        if not context.train:
            moments = self.mean.data, self.variance.data
            return backend.normalize(x, *moments, *affine, epsilon, relu=relu, around=around), no_backward
        count, group = x.size // x.shape[-1], context.replicas if self.sync and not frozen else None
        mean, variance = self.mean.data, self.variance.data
        if not frozen:
            mean, variance = self._moments(x, count, context, group)
        y = backend.normalize(x, mean, variance, *affine, epsilon, relu=relu, around=around)
        output = y if relu else None

        def backward(dy: Array) -> Array | None:
            dx = None
            sums = backend.normalize_sums(dy, x, output, mean, variance, epsilon)
            shift_grad, scale_grad = shift.grad, scale.grad
            shift_grad += sums[0]
            scale_grad += sums[1]
            if self.needs_dx:
                if frozen:
                    sums[...] = 0  # the statistics do not depend on x
                elif group is not None:
                    group.allreduce_mean([sums.reshape(-1)], count if context.counts else 0)
                out = backend.borrow(dy.shape) if has_residual else None
                dx = backend.normalize_backward(dy, x, mean, variance, scale.data, sums, count, epsilon, out)
            return dx

        return y, backward

    def _moments(self, x: Array, count: int, context: Context, group: Any) -> Array:
        """Return the mean and variance, (2, C), of `count` values per channel, and update the running statistics."""
        moments = self.backend.channel_moments(x)
        total = count if group is None else self._merge(moments, count if context.counts else 0, group)
        counts = context.counts or group is not None
        if counts and total > 1:  # a single value has no variance; the total is 0 if no replica has a batch
            unbiased = total / (total - 1)
            self.backend.track_moments(self.mean.data, self.variance.data, moments, self.momentum, unbiased)
        return moments

    def _merge(self, moments: Array, count: int, group: Any) -> int:
        """Merge the moments over all replicas in place (Chan et al. 1979). Return the total count."""
        total = int(group.gather_numbers(count).sum())
        difference = self.backend.borrow(moments[0].shape, moments.dtype)
        difference[...] = moments[0]
        group.allreduce_mean([moments[0]], count)
        difference -= moments[0]
        difference *= difference
        spread = moments[1]
        spread += difference
        group.allreduce_mean([spread], count)
        return total


class BatchNormReLU(Layer):
    capturable = True

    def __init__(self, norm: BatchNorm) -> None:
        self.norm = norm

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        return self.norm.normalized(x, context, relu=True)


class LayerNorm(Layer):
    """Layer normalization (Ba et al. 2016): (x - mean) / sqrt(variance + epsilon) · scale + shift.

    axis: `features` to normalize over all values of a sample, `channels` over the channels of each pixel. `scale` and
    `shift` have one element per value or channel, respectively, and no weight decay.
    """

    capturable = True

    def __init__(self, axis: str = "features", epsilon: float = 1e-5) -> None:
        self.axis = checks.one_of("LayerNorm axis", axis, ("features", "channels"))
        self.epsilon = checks.number("LayerNorm epsilon", epsilon, above=0)

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        shape = input.shape if self.axis == "features" else input.shape[-1:]
        self.scale = params.add("scale", shape, ones, decay=False)
        self.shift = params.add("shift", shape, zeros, decay=False)
        return input

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, scale, shift = self.backend, self.scale, self.shift
        rows = x.reshape(-1, scale.size)
        y, moments = backend.normalize_rows(rows, scale.data.reshape(-1), shift.data.reshape(-1), self.epsilon)
        if not context.train:
            return y.reshape(x.shape), no_backward

        def backward(dy: Array) -> Array | None:
            grads = scale.grad.reshape(-1), shift.grad.reshape(-1)
            flat = dy.reshape(rows.shape)
            dx = backend.normalize_rows_backward(
                flat, rows, moments, scale.data.reshape(-1), *grads, need_dx=self.needs_dx
            )
            return None if dx is None else dx.reshape(x.shape)

        return y.reshape(x.shape), backward
