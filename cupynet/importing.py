"""Weights that were trained elsewhere: from PyTorch's state dicts, and from what Keras 3 saves.

Both are brought to the layouts of this project; what PyTorch's are says layouts.py. Keras keeps what we do. The layout
of its files is that of keras/src/saving/saving_lib.py: `layers/<layer>/vars/<number>`, where a layer is called by its
class and a count: conv2d, conv2d_1, dense; those that are trained are numbered first.

Running statistics of batch normalisation are taken over too. What is added to a variance is a setting, and in no such
file: PyTorch has epsilon 1e-5, as `BatchNorm` here, Keras 1e-3.

Nothing of a file is run, and no other file is read for it.
"""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, TypeAlias

from cupynet.errors import ConfigError, DataError
from cupynet.files import load_tensors
from cupynet.layouts import from_torch, name_in_torch, orders
from cupynet.nn import Concat, Layer, Model, Residual

PathLike: TypeAlias = "str | os.PathLike[str]"
_H5_IN_KERAS = "model.weights.h5"
_COUNTERS = "num_batches_tracked"  # of PyTorch's batch normalisation: no weight
_DRAWN = "/seed_generator/"  # of Keras' dropout: the state of its random numbers
_CLASSES = {"BatchNorm": "BatchNormalization", "LayerNorm": "LayerNormalization"}  # here -> Keras


def import_torch(model: Model, path: PathLike, names: Mapping[str, str] | None = None) -> None:
    """Give the model the weights of a PyTorch state dict: `safetensors.torch.save_file(net.state_dict(), path)`.

    Args:
        names: name here -> name there, of layers ("conv1": "features.0") or of single weights ("conv1.weight":
            "features.0.weight"). What is not named has the same name there; of a normalisation `scale`, `shift`,
            `mean` and `variance` are `weight`, `bias`, `running_mean` and `running_var`.

    Raises:
        DataError: the file cannot be read, a weight is missing in it, of another shape, or for no layer here.
        ConfigError: `names` names what this model has not.
    """
    tensors = {name: tensor for name, tensor in load_tensors(path).items() if not name.endswith(_COUNTERS)}
    order = orders(model.network)
    found = {}
    for name, (layer, own) in _wanted(model, names).items():
        there = _renamed(name, names, name_in_torch(layer, own))
        tensor, shape = _taken(tensors, there, name, path), model_shape(model, name)
        brought = partial(from_torch, tensor, None if own == "bias" else order.get(id(layer)))
        found[name] = _fitting(brought, tensor.shape, shape, f"{name} of {there!r}", path)
    _check_all_taken(tensors, path)
    model.load_weights(found)


def import_keras(model: Model, path: PathLike, names: Mapping[str, str] | None = None) -> None:
    """Give the model the weights of `path`, a `.weights.h5` or `.keras` of Keras 3; needs h5py (the extra `keras`).

    Args:
        names: layer here -> layer in the file ("conv1": "conv2d_1"). By default the n-th layer of a class here is the
            n-th of that class there. Layers of one size in different branches must be named: Keras counts those of
            branches by how far they are from the output.

    Raises:
        DataError: the file cannot be read, a weight is missing in it, of another shape, or for no layer here.
        ConfigError: `names` names what this model has not, or not what cannot be told apart; h5py is not installed.
    """
    wanted, layers = _wanted(model, names), _keras_names(model.network)
    _check_told_apart(model, wanted, names or {})
    found: dict[str, str] = {}
    place: dict[int, int] = {}
    for name, (layer, _) in wanted.items():
        number = place[id(layer)] = place.get(id(layer), -1) + 1
        there = (names or {}).get(layer.path, layers[layer.path])
        found[name] = f"layers/{there}/vars/{number}"
    with _opened(path) as stored:
        variables = {name: variable for name, variable in stored.items() if _DRAWN not in name}
        arrays = {}
        for name, there in found.items():
            variable, shape = _taken(variables, there, name, path), model_shape(model, name)
            arrays[name] = _fitting(
                partial(variable.__getitem__, ()), variable.shape, shape, f"{name} of {there!r}", path
            )
        _check_all_taken(variables, path)
    model.load_weights(arrays)


def model_shape(model: Model, name: str) -> tuple[int, ...]:
    """The shape of a weight of the model, or of a buffer."""
    weights, buffers = dict(model.params.named()), dict(model.params.named_buffers())
    return weights[name].shape if name in weights else buffers[name].shape


def _wanted(model: Model, names: Mapping[str, str] | None) -> dict[str, tuple[Layer, str]]:
    """Of each weight of the model, then of each buffer, the layer that it is of, and its name there. ConfigError."""
    layers = {layer.path: layer for layer in model.network.walk()}
    wanted = {}
    for name, _ in [*model.params.named(), *model.params.named_buffers()]:
        path, _, own = name.rpartition(".")
        wanted[name] = layers[path], own
    for name in names or {}:
        if name not in wanted and name not in layers:
            raise ConfigError(f"names: this model has no layer or weight {name!r}, but {', '.join(wanted)}")
    return wanted


def _renamed(name: str, names: Mapping[str, str] | None, rest: str) -> str:
    """What a weight is called there: by its own entry, or by `rest` in that of the nearest layer around it."""
    names = names or {}
    if name in names:
        return names[name]
    layer = name.rpartition(".")[0]
    while layer and layer not in names:
        layer, _, more = layer.rpartition(".")
        rest = f"{more}.{rest}"
    return f"{names[layer]}.{rest}" if layer else rest


def _keras_names(network: Layer) -> dict[str, str]:
    """What Keras calls each layer, by its class and how many of them came before."""
    counts: dict[str, int] = {}
    names = {}
    for layer in network.walk():
        kind = _CLASSES.get(type(layer).__name__, type(layer).__name__)
        kind = re.sub(r"([a-z])([A-Z])", r"\1_\2", re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", kind)).lower()
        names[layer.path] = f"{kind}_{counts[kind]}" if kind in counts else kind
        counts[kind] = counts.get(kind, 0) + 1
    return names


def _check_told_apart(model: Model, wanted: Mapping[str, tuple[Layer, str]], names: Mapping[str, str]) -> None:
    """Refuse to guess which of two branches a layer is in, where the sizes would fit either way. ConfigError.

    Layers one after the other have one order here and there. (keras/src/ops/function.py: layers are numbered by depth.)
    """
    sizes: dict[str, list[Any]] = {}
    for name, (layer, own) in wanted.items():
        sizes.setdefault(layer.path, [type(layer)]).append((own, model_shape(model, name)))
    for whole in model.network.walk():
        for first, second in combinations(_ways(whole), 2):
            for one, other in product(first, second):
                alike = one.path in sizes and sizes[one.path] == sizes.get(other.path)
                if alike and not {one.path, other.path} <= set(names):
                    raise ConfigError(
                        f"layers {one.path!r} and {other.path!r} are of one size, in two branches, and Keras does not "
                        f"say which is which: name both, names={{{one.path!r}: ..., {other.path!r}: ...}}"
                    )


def _ways(layer: Layer) -> list[list[Layer]]:
    """The layers of each of the ways that lead through a layer side by side."""
    if isinstance(layer, Residual):
        return [list(layer.body.walk()), [] if layer.shortcut is None else list(layer.shortcut.walk())]
    return [list(branch.walk()) for _, branch in layer.children()] if isinstance(layer, Concat) else []


def _taken(there: dict[str, Any], name: str, own: str, path: PathLike) -> Any:
    """What the file has under a name; it is not there any more afterwards. DataError."""
    if name not in there:
        has = ", ".join(sorted(there)[:8]) or "nothing more"
        raise DataError(f"{path}: lacks {name!r}, for weight '{own}': it has {has}; say in names which it is")
    return there.pop(name)


def _fitting(
    brought: Callable[[], Any], found: tuple[int, ...], shape: tuple[int, ...], what: str, path: PathLike
) -> Any:
    """The array, if it is of the shape that this model needs. DataError. Nothing larger than that is read."""
    array = brought() if math.prod(found) == math.prod(shape) else None
    if array is None or tuple(array.shape) != shape:
        raise DataError(f"{path}: weight {what}: its shape {tuple(found)} does not become the {shape} of this network")
    return array


def _check_all_taken(left: Mapping[str, Any], path: PathLike) -> None:
    if left:
        raise DataError(f"{path}: {min(left)!r} is for no layer here ({len(left)} such): is it of another network?")


@contextmanager
def _opened(path: PathLike) -> Iterator[dict[str, Any]]:
    """The variables of all layers in a file of Keras, by their place in it. ConfigError, DataError."""
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("files of Keras need h5py, which is not installed: pip install 'cupynet[keras]'") from error
    try:
        with h5py.File(_h5(path), "r") as file:
            yield dict(_variables(file, h5py, "layers"))
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise DataError(f"{path}: cannot be read as .weights.h5 or .keras of Keras 3 ({reason})") from error


def _h5(path: PathLike) -> Any:
    """What HDF5 is to open: the file, or what a .keras archive holds."""
    if not zipfile.is_zipfile(path):
        return Path(path)
    with zipfile.ZipFile(path) as archive:
        return io.BytesIO(archive.read(_H5_IN_KERAS))


def _variables(file: Any, h5py: Any, place: str) -> Iterator[tuple[str, Any]]:
    """The arrays below a group that lie in this file themselves: links to others are not followed."""
    group = file[place]
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise DataError(f"{file.filename}: {place}/{name} is a link, which is not followed")
        inside = group[name]
        if isinstance(inside, h5py.Group):
            yield from _variables(file, h5py, f"{place}/{name}")
        elif inside.external or inside.is_virtual:
            raise DataError(f"{file.filename}: {place}/{name} lies in another file, which is not read")
        else:
            yield f"{place}/{name}", inside
