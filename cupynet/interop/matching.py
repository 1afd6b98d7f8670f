"""Matching the weights of a model with those of another program's file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import PathLike
from cupynet.core.wording import one
from cupynet.nn import Layer, Model


def check_known(network: Layer, known: Collection[type[Layer]], target: str) -> None:
    """Refuse layers that are not in `known`, which have an equivalent in `target`. ConfigError."""
    for layer in network.walk():
        if type(layer) not in known:
            kind, name = type(layer), layer.path or "network"
            raise ConfigError(
                f"layer '{name}' is {one(kind.__name__)} of {kind.__module__}, which has no known equivalent in "
                f"{target}. Only layers of cupynet.nn can be exported."
            )


class Weight(NamedTuple):
    """A weight or buffer of a model, with its layer, its name within the layer, and its shape."""

    layer: Layer
    name: str
    shape: tuple[int, ...]


def weights_of(model: Model, names: Iterable[str] = ()) -> dict[str, Weight]:
    """Return all weights and buffers by name.

    Args:
        names: of layers and weights, which must exist.

    Raises:
        ConfigError: `names` has one that is neither a weight nor a layer of the model.
    """
    layers = {layer.path: layer for layer in model.network.walk()}
    arrays: dict[str, Any] = {**dict(model.params.named()), **dict(model.params.named_buffers())}
    found = {}
    for name, array in arrays.items():
        path, _, own = name.rpartition(".")
        found[name] = Weight(layers[path], own, array.shape)
    for name in names:
        if name not in found and name not in layers:
            raise ConfigError(f"names: this model has no layer or weight {name!r}, but {', '.join(found)}")
    return found


def take(stored: dict[str, Any], there: str, name: str, path: PathLike) -> Any:
    """Remove and return the entry `there` of a file, for our weight `name`. DataError."""
    if there not in stored:
        has = ", ".join(sorted(stored)[:8]) or "nothing more"
        raise DataError(f"{path}: lacks {there!r}, for weight '{name}'. It has {has}. Give its name there in names.")
    return stored.pop(there)


def check_shape(
    read: Callable[[], Any], found: tuple[int, ...], shape: tuple[int, ...], what: str, path: PathLike
) -> Any:
    """Return `read()` if it has the shape of our weight. Arrays of another size are not read. DataError."""
    array = read() if math.prod(found) == math.prod(shape) else None
    if array is None or tuple(array.shape) != shape:
        raise DataError(f"{path}: weight {what}: its shape {tuple(found)} does not fit the {shape} of this network")
    return array


def check_all_taken(left: Mapping[str, Any], path: PathLike) -> None:
    """Refuse a file with weights that belong to no layer. DataError."""
    if left:
        raise DataError(
            f"{path}: {min(left)!r} belongs to no layer of this model ({len(left)} such): is it from another network?"
        )
