"""Import of weights from Keras 3, which uses the same order of axes.

Keras stores weights as `layers/<layer>/vars/<number>` (keras/src/saving/saving_lib.py). Layers are named by class and
count (conv2d, conv2d_1, dense). Trainable weights are numbered first, then running statistics.
"""

from __future__ import annotations

import io
import json
import math
import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import PathLike, require_plain, widened
from cupynet.core.wording import one_line
from cupynet.interop.matching import Weight, check_all_taken, check_shape, take, weights_of
from cupynet.nn import BatchNorm, Concat, Conv2D, Layer, LayerNorm, Model, Residual

H5_IN_KERAS, CONFIG_IN_KERAS = "model.weights.h5", "config.json"
MAX_CONFIG = 1 << 24  # maximum size of config.json in bytes
DROPOUT_STATE = "/seed_generator/"
# Keras names of layers with weights, if they differ
CLASSES: dict[type[Layer], str] = {BatchNorm: "BatchNormalization", LayerNorm: "LayerNormalization"}


def import_keras(model: Model, path: PathLike, names: Mapping[str, str] | None = None) -> None:
    """Load the weights of a `.weights.h5` or `.keras` file of Keras 3. Requires h5py (the extra `keras`).

    Only weights are imported, so the model needs the same layers, with the same strides, padding and activations, and
    the same pixel scaling as `Rescaling`. The epsilon of normalization layers, which is 1e-3 in Keras and 1e-5 in
    `BatchNorm`, is compared with a `.keras` archive. A `.weights.h5` file does not contain it.

    A `Conv2D` with one group per channel loads the weights of a `DepthwiseConv2D`, or of a `Conv2D` given in `names`.

    Args:
        names: maps layers of the model to layers in the file ("conv1": "conv2d_1"). By default, the n-th layer of a
            class corresponds to the n-th layer of this class in the file. Layers in branches must be named, because
            Keras numbers them by their distance from the output.

    Raises:
        DataError: the file cannot be read; a weight is missing, unexpected, or has the wrong shape; or epsilon
            differs from that in a `.keras` archive.
        ConfigError: `names` contains unknown layers or omits ambiguous layers, or h5py is not installed.
    """
    names = names or {}
    weights = weights_of(model, names)
    if wrong := next((name for name in names if name in weights), None):
        raise ConfigError(f"names must map layers, but {wrong!r} is a weight. Use {weights[wrong].layer.path!r}")
    _check_unambiguous(model, weights, names)
    with _opened(path) as stored:
        variables = {name: variable for name, variable in stored.items() if DROPOUT_STATE not in name}
        layers = {**_keras_names(model.network), **names}
        counts: Counter[str] = Counter()
        arrays = {}
        for name, (layer, _, shape) in weights.items():
            entry = f"layers/{layers[layer.path]}/vars/{counts[layer.path]}"
            counts[layer.path] += 1
            variable = take(variables, entry, name, path)
            read = partial(_read, variable, shape)
            arrays[name] = check_shape(read, variable.shape, shape, f"{name} of {entry!r}", path)
        check_all_taken(variables, path)
    _check_epsilons(model, layers, path)
    model.load_weights(arrays)
    model.trained_on = ""


def _read(variable: Any, shape: tuple[int, ...]) -> Any:
    array = variable[()]
    if variable.attrs.get("dtype") == "bfloat16":  # stored as byte pairs
        array = widened(array.tobytes(), array.shape)
    channels = math.prod(array.shape[2:])
    if array.ndim == 4 and shape == (*array.shape[:2], 1, channels):
        return array.reshape(shape)  # a DepthwiseConv2D: (K_h, K_w, C, multiplier) -> (K_h, K_w, 1, O)
    return array


def _keras_names(network: Layer) -> dict[str, str]:
    counts: Counter[str] = Counter()
    names = {}
    for layer in network.walk():
        depthwise = isinstance(layer, Conv2D) and layer.groups == layer.input.shape[-1] > 1
        keras_class = "DepthwiseConv2D" if depthwise else CLASSES.get(type(layer), type(layer).__name__)
        names[layer.path] = _numbered(keras_class, counts)
    return names


def _numbered(keras_class: str, counts: Counter[str]) -> str:
    """Return the name of the next layer of a class in snake case, as in Keras: batch_normalization_1."""
    words = re.sub(r"(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", keras_class))
    name = re.sub(r"([a-z])([A-Z])", r"\1_\2", words).lower()
    counts[name] += 1
    return f"{name}_{counts[name] - 1}" if counts[name] > 1 else name


def _check_unambiguous(model: Model, weights: Mapping[str, Weight], names: Mapping[str, str]) -> None:
    with_weights = {layer.path for layer, _, _ in weights.values()}
    for parent in model.network.walk():
        if isinstance(parent, Concat) or (isinstance(parent, Residual) and parent.shortcut is not None):
            unnamed = with_weights.intersection(layer.path for layer in parent.walk()) - set(names)
            if unnamed:
                raise ConfigError(
                    f"layer {min(unnamed)!r} is in one of several branches, whose order in Keras is unknown. "
                    f"Specify its name in the file: names={{{min(unnamed)!r}: 'conv2d_1'}}"
                )


@contextmanager
def _opened(path: PathLike) -> Iterator[dict[str, Any]]:
    try:
        import h5py
    except ImportError as error:
        raise ConfigError("Keras files require h5py. Install it with pip install 'cupynet[keras]'") from error
    require_plain(path)
    try:
        with h5py.File(_h5(path), "r") as file:
            if "layers" not in file:
                raise DataError(
                    f"{path}: is not a Keras 3 file. Convert a legacy .h5 file in Keras 3: "
                    "keras.models.load_model(path), or model.load_weights(path), and then model.save('digits.keras')"
                )
            yield dict(_variables(file, h5py, "layers"))
    except (OSError, zipfile.BadZipFile, zlib.error, KeyError, RuntimeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or one_line(error)
        raise DataError(f"{path}: cannot be read as a .weights.h5 or .keras file of Keras 3 ({reason})") from error


def _h5(path: PathLike) -> Any:
    if not zipfile.is_zipfile(path):
        return Path(path)
    with zipfile.ZipFile(path) as archive:
        return io.BytesIO(archive.read(H5_IN_KERAS))


def _check_epsilons(model: Model, names: Mapping[str, str], path: PathLike) -> None:
    """Raise DataError if the epsilon of a normalization layer differs from the archive."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            if CONFIG_IN_KERAS not in archive.namelist():
                return
            with archive.open(CONFIG_IN_KERAS) as file:
                text = file.read(MAX_CONFIG + 1)
        if len(text) > MAX_CONFIG:
            raise ValueError("it is too large")
        stored = {name: float(epsilon) for name, epsilon in _epsilons(json.loads(text))}
    except Exception as error:  # anything can fail with an untrusted file
        raise DataError(f"{path}: its {CONFIG_IN_KERAS} cannot be read ({one_line(error)})") from error
    for layer in model.network.walk():
        name = names[layer.path]
        if not isinstance(layer, BatchNorm | LayerNorm) or name not in stored:
            continue
        if not math.isclose(layer.epsilon, stored[name], rel_tol=1e-6):
            reason = f"epsilon is {layer.epsilon}, but {stored[name]} in the file. Change the model to match the file"
            raise DataError(f"{path}: layer '{layer.path}' ({name!r} in the file): {reason}")


def _epsilons(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the names, as in the weights file, and the epsilons of normalization layers, including nested models."""
    counts: Counter[str] = Counter()
    for layer in config.get("config", {}).get("layers", ()):
        name, arguments = f"{prefix}{_numbered(layer['class_name'], counts)}", layer.get("config", {})
        if "layers" in arguments:
            yield from _epsilons(layer, f"{name}/layers/")
        elif "epsilon" in arguments:
            yield name, arguments["epsilon"]


def _variables(file: Any, h5py: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and arrays in a group, recursively. Raise DataError for links and for data in other files."""
    group = file[prefix]
    for name in group:
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise DataError(f"{file.filename}: {prefix}/{name} is a link, which is not supported")
        item = group[name]
        if isinstance(item, h5py.Group):
            yield from _variables(file, h5py, f"{prefix}/{name}")
        elif item.external or item.is_virtual:
            raise DataError(f"{file.filename}: {prefix}/{name} is stored in another file, which is not supported")
        else:
            yield f"{prefix}/{name}", item
