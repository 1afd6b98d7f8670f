"""Build a layer with given weights, and run passes with inputs and outputs on the host."""

from typing import Any

import numpy as np

from cupynet.backend import Backend
from cupynet.nn import INFERENCE, Context, Flat, Image, Layer, Params


def built(layer: Layer, shape: tuple[int, ...], backend: Backend, **weights: Any) -> Params:
    """Build a layer for shape (H, W, C) or (features,), with weights by the last part of their name, such as `bias`."""
    params = Params()
    layer.build(Image(*shape) if len(shape) == 3 else Flat(*shape), params.scope("it"), backend)
    params.allocate(backend, seed=1)
    for name, p in params.named():
        kind = name.rpartition(".")[2]
        if kind in weights:
            p.master[...] = backend.asarray(np.asarray(weights[kind], p.master.dtype))
    params.publish()
    return params


def passed(layer: Layer, x: Any, dy: Any = 1.0, **context: Any) -> tuple[Any, Any]:
    """Return y and dx of a training pass in double, after checking that no buffer is on loan.

    x and dy, which may be one number, are rounded to the storage precision. context: arguments of `Context`.
    """
    backend, storage = layer.backend, layer.backend.policy.storage
    y, backward = layer.forward(backend.asarray(np.asarray(x, storage)), Context(train=True, **context))
    found, gradient = np.array(backend.to_host(y), np.float64), backend.borrow(y.shape)
    gradient[...] = backend.asarray(np.broadcast_to(dy, y.shape).astype(storage))
    dx = np.array(backend.to_host(backward(gradient)), np.float64)
    del y, backward, gradient
    assert backend.workspace.on_loan == 0, "a borrowed array is kept"
    return found, dx


def inferred(layer: Layer, x: Any) -> Any:
    x = layer.backend.asarray(np.asarray(x, layer.backend.policy.storage))
    return np.array(layer.backend.to_host(layer.forward(x, INFERENCE)[0]))
