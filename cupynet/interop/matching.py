"""Matches the weights of a model with those in the file of another program."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import PathLike
from cupynet.core.wording import one
from cupynet.nn import Layer, Model


def check_known(network: Layer, known: Collection[type[Layer]], target: str) -> None:
    """Raise ConfigError for layers whose type is not in `known`, the types with an equivalent in `target`."""
    for layer in network.walk():
        if type(layer) not in known:
            kind, name = type(layer), layer.path or "network"
            raise ConfigError(
                f"layer '{name}' is {one(kind.__name__)} of {kind.__module__}, which has no known equivalent in "
                f"{target}. Only layers of cupynet.nn can be exported."
            )


class Weight(NamedTuple):
    """A weight or buffer of a model: its layer, its name within the layer, and its shape."""

    layer: Layer
    name: str
    shape: tuple[int, ...]


def weights_of(model: Model, names: Iterable[str] = ()) -> dict[str, Weight]:
    """Return all weights and buffers by name.

    Raises:
        ConfigError: an entry of `names` is neither a weight nor a layer of the model.
    """
    layers = {layer.path: layer for layer in model.network.walk()}
    arrays: dict[str, Any] = {**dict(model.params.named()), **dict(model.params.named_buffers())}
    found = {}
    for name, array in arrays.items():
        path, _, own = name.rpartition(".")
        found[name] = Weight(layers[path], own, array.shape)
    for name in names:
        if name not in found and name not in layers:
            raise ConfigError(f"names: the model has no layer or weight {name!r}. It has {', '.join(found)}.")
    return found


def take(stored: dict[str, Any], there: str, name: str, path: PathLike) -> Any:
    """Remove and return the entry `there` of a file, for the weight `name`. Raises DataError."""
    if there not in stored:
        has = ", ".join(sorted(stored)[:8]) or "no other weights"
        raise DataError(f"{path}: lacks {there!r} for weight '{name}'. It has {has}. Map the weight with names.")
    return stored.pop(there)


def check_shape(
    read: Callable[[], Any], found: tuple[int, ...], shape: tuple[int, ...], what: str, path: PathLike
) -> Any:
    """Return `read()` if it has the right shape; arrays of another size are not read. Raises DataError."""
    array = read() if math.prod(found) == math.prod(shape) else None
    if array is None or tuple(array.shape) != shape:
        raise DataError(f"{path}: weight {what} has shape {tuple(found)}, but the network needs {shape}")
    return array


def check_all_taken(left: Mapping[str, Any], path: PathLike) -> None:
    """Raise DataError if weights of the file are left over."""
    if left:
        raise DataError(
            f"{path}: unexpected weight {min(left)!r} ({len(left)} in total). The file may belong to another network."
        )
