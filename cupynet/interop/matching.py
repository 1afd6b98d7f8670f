"""Match a model's weights to the entries of a file from another framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import PathLike
from cupynet.core.wording import one
from cupynet.nn import Layer, Model


def check_known(network: Layer, known: Collection[type[Layer]], target: str) -> None:
    """Raise ConfigError for layers whose types are not in `known`, because they have no equivalent in `target`."""
    for layer in network.walk():
        if type(layer) not in known:
            kind, name = type(layer), layer.path or "network"
            raise ConfigError(
                f"layer '{name}' is {one(kind.__name__)} of {kind.__module__}, which has no known equivalent in "
                f"{target}. Only layers of cupynet.nn can be exported"
            )


class Weight(NamedTuple):
    """A weight or buffer of a model: its layer, its name within the layer, and its shape."""

    layer: Layer
    name: str
    shape: tuple[int, ...]


def weights_of(model: Model, names: Iterable[str] = ()) -> dict[str, Weight]:
    """Return all weights and buffers by name. Raise ConfigError if an entry in `names` is not a weight or layer."""
    layers = {layer.path: layer for layer in model.network.walk()}
    arrays: dict[str, Any] = {**dict(model.params.named()), **dict(model.params.named_buffers())}
    weights = {}
    for name, array in arrays.items():
        path, _, weight_name = name.rpartition(".")
        weights[name] = Weight(layers[path], weight_name, array.shape)
    for name in names:
        if name not in weights and name not in layers:
            known = ", ".join(weights)
            raise ConfigError(f"names: the model has no layer or weight {name!r}. Its weights are {known}")
    return weights


def take(stored: dict[str, Any], entry: str, name: str, path: PathLike) -> Any:
    """Remove the entry for weight `name` from `stored` and return it. Raise DataError if it is missing."""
    if entry not in stored:
        entries = ", ".join(sorted(stored)[:8]) or "no other weights"
        raise DataError(
            f"{path}: lacks {entry!r} for weight '{name}'. It has {entries}. If the weight has another name there, map "
            "it with `names`"
        )
    return stored.pop(entry)


def check_shape(
    read: Callable[[], Any],
    actual: tuple[int, ...],
    shape: tuple[int, ...],
    description: str,
    path: PathLike,
    axes: Sequence[int] = (),
) -> Any:
    """Return `read()`. Raise DataError if its shape is wrong. Arrays of the wrong size are not read.

    axes: permutation from `shape` to the shape that the file needs, which applies to weights with as many axes.
    """
    array = read() if math.prod(actual) == math.prod(shape) else None
    if array is None or tuple(array.shape) != shape:
        needed = tuple(shape[axis] for axis in axes) if len(axes) == len(shape) else shape
        raise DataError(f"{path}: weight {description} has shape {tuple(actual)}, but must have shape {needed}")
    return array


def check_all_taken(remaining: Mapping[str, Any], path: PathLike) -> None:
    if remaining:
        raise DataError(
            f"{path}: unexpected weight {min(remaining)!r} ({len(remaining)} in total). The file may belong to another "
            "network"
        )
