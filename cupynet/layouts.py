"""What PyTorch calls a weight and how it keeps it, where it is kept here: one rule, for both ways.

Images are (H, W, C) here and (C, H, W) there. A convolution's weight is (K_h, K_w, C, O) here and (O, C, K_h, K_w)
there, that of a dense layer (F, O) here and (O, F) there. An image is flattened in the order of its axes: behind it
PyTorch has the values of a vector in another order, and what looks at such a vector (the rows of a dense layer, the
values of a normalisation) has its weights so.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupynet.errors import ConfigError
from cupynet.nn import BatchNorm, Concat, Dense, Flat, Flatten, Image, Layer, LayerNorm, Residual, Sequential

Order = NDArray[np.int64]  # (F,): which of our values stands at each place of PyTorch's vector
NORMS = (BatchNorm, LayerNorm)
_OF_NORMS = {"scale": "weight", "shift": "bias", "mean": "running_mean", "variance": "running_var"}  # here -> PyTorch
_TO = {4: (3, 2, 0, 1), 3: (2, 0, 1), 2: (1, 0)}  # of three: images, normalised value by value
_FROM = {4: (2, 3, 1, 0), 3: (1, 2, 0), 2: (1, 0)}


def name_in_torch(layer: Layer, own: str) -> str:
    """What PyTorch calls a layer's weight that is called `own` here."""
    return _OF_NORMS.get(own, own) if isinstance(layer, NORMS) else own


def to_torch(weight: Any, order: Order | None) -> Any:
    """A weight in PyTorch's layout; order: of the vector that it looks at, see `orders`."""
    if order is not None and weight.ndim in (1, 2):
        weight = weight[order]
    return weight.transpose(_TO.get(weight.ndim, tuple(range(weight.ndim))))


def from_torch(tensor: Any, order: Order | None) -> Any:
    """A tensor of PyTorch in the layout of this project; order: of the vector that it looks at."""
    tensor = tensor.transpose(_FROM.get(tensor.ndim, tuple(range(tensor.ndim))))
    if order is None or tensor.ndim not in (1, 2) or len(tensor) != len(order):
        return tensor
    weight = np.empty_like(tensor)
    weight[order] = tensor
    return weight


def orders(network: Layer) -> dict[int, Order]:
    """By `id`, of each layer of a built network that looks at a flattened image, the order PyTorch has its values in.

    Raises:
        ConfigError: two ways are added up that PyTorch would have in two orders.
    """
    found: dict[int, Order] = {}
    _passed(network, None, found)
    return found


def _passed(layer: Layer, order: Order | None, found: dict[int, Order]) -> Order | None:
    """The order of what the layer makes of a vector in this order, or of an image; None for our own."""
    if isinstance(layer, Sequential):
        for _, inner in layer.children():
            order = _passed(inner, order, found)
        return order
    if isinstance(layer, Residual):
        through = _passed(layer.body, order, found)
        around = order if layer.shortcut is None else _passed(layer.shortcut, order, found)
        if not np.array_equal(_spelt(through, layer), _spelt(around, layer)):
            raise ConfigError(
                f"Residual '{layer.path}': adds a flattened image to what is none, which PyTorch has in two orders: "
                "flatten in front of it, and begin with a Dense"
            )
        return through
    if isinstance(layer, Concat):
        made = [(_passed(branch, order, found), branch) for _, branch in layer.children()]
        if isinstance(layer.output, Image) or all(each is None for each, _ in made):
            return None
        starts = [sum(layer.widths[:i]) for i in range(len(made))]
        return np.concatenate([_spelt(each, branch) + at for (each, branch), at in zip(made, starts, strict=True)])
    return _passed_by_one(layer, order, found)


def _passed_by_one(layer: Layer, order: Order | None, found: dict[int, Order]) -> Order | None:
    """`_passed` by a layer that holds no others."""
    flattens = layer.input.features == layer.output.features and isinstance(layer.output, Flat)
    if isinstance(layer.input, Image):
        order = _flattened(layer.input) if flattens or isinstance(layer, Dense | Flatten) else None
    if order is not None and isinstance(layer, (Dense, *NORMS)):
        found[id(layer)] = order
    return order if flattens and not isinstance(layer, Dense) else None


def _spelt(order: Order | None, layer: Layer) -> Order:
    return np.arange(layer.output.features) if order is None else order


def _flattened(image: Image) -> Order | None:
    """The order C, H, W of its values; None where that is our own."""
    if image.channels == 1 or image.height * image.width == 1:
        return None
    order: Order = np.arange(image.features).reshape(image.shape).transpose(2, 0, 1).reshape(-1)
    return order
