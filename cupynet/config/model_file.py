"""Read files written by `Model.save`, which are untrusted input."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from os import PathLike
from typing import Any

from cupynet.backend import FRACTIONS, PixelScale, create_backend, select_backend
from cupynet.config.instantiate import build_as
from cupynet.config.removed import translated
from cupynet.core import checks, shared_options
from cupynet.core.errors import ConfigError, DataError
from cupynet.core.files import load_described
from cupynet.data.normalize import checked
from cupynet.nn import Flat, InputType, Layer, Loss, Model, Params, input_type


def read_model(
    path: str | PathLike[str], backend: str = "auto", dtype: str | None = None, trusted_modules: Iterable[str] = ()
) -> Model:
    """Load a model (see `cupynet.load`)."""
    weights, description = load_described(path)
    trusted = list(trusted_modules)
    name, _ = select_backend(backend)
    try:
        network = build_as(Layer, translated(description["network"]), "network", trusted)
        loss = build_as(Loss, translated(description["loss"]), "loss", trusted)
        if type(loss) is Loss:
            raise ConfigError("must be a subclass of Loss", "loss")
        own = shared_options.dtype("dtype", description["dtype"] if dtype is None else dtype)
        shape, seed = description["input"], checks.seed("seed", description["seed"])
        input = Flat(*shape) if isinstance(shape, list) and len(shape) == 1 else input_type(shape)
        _check_shapes(network, input, weights)
        model = Model(network, input, create_backend(name, own), seed, loss)
        model.load_weights(weights)
        set_image_metadata(model, checked(description["normalize"]), description["class_names"])
        model.set_learning_rate_factors(description.get("learning_rate_factors", {}))
        model.trained_on = checks.one_of("trained_on", description["trained_on"], ("", "pixels", "floats"))
    except ConfigError as error:
        if error.setting.endswith("_target_") or dtype is not None and error.setting == "dtype":
            raise  # caused by the caller's arguments
        raise DataError(f"{path}: {error}") from error
    except Exception as error:  # anything can fail with an untrusted file
        raise DataError(f"{path}: its metadata are invalid ({type(error).__name__}: {error})") from error
    return model


def set_image_metadata(model: Model, normalize: Any, class_names: Sequence[str]) -> None:
    """Set a model's pixel scale and class names. Raise ConfigError if they do not match the network."""
    pixels = FRACTIONS if normalize is None else PixelScale.of(normalize["mean"], normalize["std"])
    if len(pixels.scale) != len(pixels.shift) or len(pixels.scale) not in (1, model.input.shape[-1]):
        raise ConfigError("does not match the number of channels", "normalize")
    model.pixels, model.class_names = pixels, class_names


def _check_shapes(network: Layer, input: InputType, weights: dict[str, Any]) -> None:
    """Raise ConfigError if the network does not match the weights in the file. Call this before allocating memory."""
    params = Params()
    copy.deepcopy(network).build(input, params.scope(), create_backend("numpy"))
    shapes = {name: tuple(each.shape) for name, each in (*params.named(), *params.named_buffers())}
    found = {name: tuple(each.shape) for name, each in weights.items()}
    if shapes != found:
        differing = sorted(name for name in shapes.keys() | found.keys() if shapes.get(name) != found.get(name))
        raise ConfigError(f"does not match the weights in the file: {', '.join(differing[:3])}", "network")
