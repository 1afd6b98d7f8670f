from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from cupynet.backend import Backend
from cupynet.backend.array import Array
from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.nn.context import Context
from cupynet.nn.dense import Activation
from cupynet.nn.layer import Backward, Layer, Sequential, no_backward
from cupynet.nn.norm import BatchNorm
from cupynet.nn.params import Scope
from cupynet.nn.types import Flat, Image, InputType

Layers: TypeAlias = "Layer | Mapping[str, Layer] | Iterable[Layer]"


class Residual(Layer):
    """Residual connection: layers(x) + shortcut(x) (He et al. 2015).

    The shortcut is the identity by default. If the layers change the shape, it must be a layer with the same output
    shape, such as a 1x1 convolution. A ReLU after the sum is a separate layer. Weights have names such as
    `block1.conv1.weight` and `block1.shortcut.weight`.
    """

    capturable = True

    def __init__(self, layers: Layers, shortcut: Layer | None = None) -> None:
        if isinstance(layers, Layer) and not isinstance(layers, Sequential):
            layers = [layers]
        self.body = layers if isinstance(layers, Sequential) else Sequential(layers)
        self.shortcut = None
        if shortcut is not None:
            self.shortcut = checks.instance("Residual shortcut", shortcut, Layer, "Conv2D(64, 1)")

    def children(self) -> Iterable[tuple[str, Layer]]:
        around = [] if self.shortcut is None else [("shortcut", self.shortcut)]
        return [*self.body.children(), *around]

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        output = self.body.build(input, params, backend)
        around = input if self.shortcut is None else self.shortcut.build(input, params.scope("shortcut"), backend)
        if around != output:
            raise ConfigError(
                f"Residual '{params.layer}': the layers map {input} to {output}, but the shortcut to {around}. Add a "
                "shortcut with the same output, such as Conv2D(filters, 1, stride) or Dense(units)"
            )
        return output

    def fuse(self, following: Layer) -> Layer | None:
        own = type(self) is Residual and type(self.body) is Sequential and type(following) is Activation
        if not own or following.output_activation != "relu":
            return None
        last = self.body.steps[-1][1]
        return ResidualReLU(self, last) if type(last) is BatchNorm else None

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend = self.backend
        through, through_backward = self.body.forward(x, context)
        around, around_backward = (x, _itself) if self.shortcut is None else self.shortcut.forward(x, context)
        y = backend.add(through, around, backend.borrow(through.shape))
        derivatives: list[Backward] = [around_backward, through_backward]

        def backward(dy: Array) -> Array | None:
            gradients = [dy]  # see `Sequential`
            del dy
            dx = derivatives.pop()(_copied(backend, gradients[0]))  # each branch may overwrite its dy
            return _sum(backend, [dx, derivatives.pop()(gradients.pop())])

        return y, backward if context.train else no_backward


class ResidualReLU(Layer):
    """A residual block fused with the ReLU after it. Computes the last norm, the sum and the ReLU in one pass."""

    capturable = True

    def __init__(self, block: Residual, norm: BatchNorm) -> None:
        self.block, self.norm = block, norm
        self.before = copy.copy(block.body)  # the layers before the norm, possibly none
        self.before.steps = block.body.steps[:-1]

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, shortcut = self.block.backend, self.block.shortcut
        through, through_backward = self.before.forward(x, context)
        around, around_backward = (x, _itself) if shortcut is None else shortcut.forward(x, context)
        y, norm_backward = self.norm.normalized(through, context, relu=True, around=around)
        derivatives: list[Backward] = [around_backward, through_backward, norm_backward]

        def backward(dy: Array) -> Array | None:
            gradients = [dy]  # see `Sequential`
            del dy
            # the norm's backward function overwrites gradients[0] with the gradient of the sum
            inner, through_backward = [derivatives.pop()(gradients[0])], derivatives.pop()
            dx = None if inner[0] is None else through_backward(inner.pop())
            del through_backward
            return _sum(backend, [dx, derivatives.pop()(gradients.pop())])

        return y, backward if context.train else no_backward


class Concat(Layer):
    """Concatenates the outputs of branches along the last axis (channels or features).

    branches: a list (named branch1, branch2 ...) or a mapping from name to branch. Each branch is a layer or a sequence
    of layers. Weights have names such as `mixed.narrow.conv1.weight`.
    """

    capturable = True

    def __init__(self, branches: Mapping[str, Any] | Iterable[Layers]) -> None:
        if not isinstance(branches, Mapping):
            branches = {f"branch{number}": branch for number, branch in enumerate(branches, 1)}
        together = {
            name: branch if isinstance(branch, Layer) else Sequential(branch) for name, branch in branches.items()
        }
        self.branches: dict[str, Layer] = Sequential(together).layers  # checks the names

    def children(self) -> Iterable[tuple[str, Layer]]:
        return self.branches.items()

    def build(self, input: InputType, params: Scope, backend: Backend) -> InputType:
        made = {name: branch.build(input, params.scope(name), backend) for name, branch in self.branches.items()}
        first = next(iter(made.values()))
        for name, output in made.items():
            if type(output) is not type(first) or output.shape[:-1] != first.shape[:-1]:
                raise ConfigError(
                    f"Concat '{params.layer}': branch '{name}' returns {output}, but '{next(iter(made))}' {first}. "
                    "Use equal strides and padding='same' in all branches, or end each branch with Flatten"
                )
        ends = [0, *accumulate(output.shape[-1] for output in made.values())]
        self.places = [slice(*bounds) for bounds in pairwise(ends)]
        return Image(first.height, first.width, ends[-1]) if isinstance(first, Image) else Flat(ends[-1])

    def forward(self, x: Array, context: Context) -> tuple[Array, Backward]:
        backend, places = self.backend, self.places
        y = backend.borrow((len(x), *self.output.shape))
        derivatives: deque[Backward] = deque()
        for branch, place in zip(self.branches.values(), places, strict=True):
            part, derivative = branch.forward(x, context)
            y[..., place] = part
            derivatives.append(derivative)
            del part, derivative

        def backward(dy: Array) -> Array | None:
            parts = deque(_copied(backend, dy[..., place]) for place in places)
            del dy
            return _sum(backend, [derivatives.popleft()(parts.popleft()) for _ in places])

        return y, backward if context.train else no_backward


def _itself(dy: Array) -> Array:
    return dy


def _copied(backend: Backend, dy: Array) -> Array:
    copy = backend.borrow(dy.shape)
    copy[...] = dy
    return copy


def _sum(backend: Backend, gradients: list[Array | None]) -> Array | None:
    """Add the dx of all branches to the first one in place and return it, or None if a branch has no dx."""
    total, *rest = gradients
    for dx in rest:
        if total is None or dx is None:
            return None
        backend.add(total, dx, total)
    return total
