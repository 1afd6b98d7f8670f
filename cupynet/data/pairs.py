"""Reads data sets from other libraries as (image, label) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from cupynet.backend.array import Array, on_host
from cupynet.core.errors import ConfigError
from cupynet.core.wording import one, shown

IMAGES, LABELS = ("image", "img", "pixel_values", "x"), ("label", "labels", "target", "y")  # keys of samples


def read_pairs(data: Any) -> tuple[Array, Array]:
    """Read (image, label) pairs into memory. Return images (S, ...) and labels (S, ...).

    data: an iterable or map-style data set, as in PyTorch or Hugging Face. Its samples are pairs, or mappings with
        keys such as `image` and `label`.
    """
    if isinstance(data, Iterable) and not isinstance(data, Mapping):
        found: Iterable[Any] = data
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, Mapping):
        found = (data[index] for index in range(len(data)))
    else:
        kinds = "images and labels, a Dataset, Shards, a Loader, or pairs (image, label)"
        raise ConfigError(f"data must be {kinds}, got {one(type(data).__name__)}")
    images, labels = [], []
    for number, example in enumerate(found):
        image, label = map(on_host, _pair(number, example))
        if image.ndim == 4:
            remedy = "Instead of a PyTorch DataLoader, pass its data set (loader.dataset)"
            raise ConfigError(f"data: examples must be single images, not batches of {image.shape}. {remedy}")
        images.append(image)
        labels.append(label)
    if not images:
        raise ConfigError("data: there are no examples. If this is a generator, it can be read only once")
    for number, image in enumerate(images):
        if (image.dtype.kind == "f") != (images[0].dtype.kind == "f"):
            raise ConfigError(
                f"data: image {number} is {image.dtype}, but image 0 is {images[0].dtype}. Integers are scaled and "
                "floating-point images are not, so all must be of one kind"
            )
        if image.shape != images[0].shape:
            raise ConfigError(
                f"data: image {number} has shape {image.shape}, but image 0 has {images[0].shape}. "
                "Examples must be single images, not batches"
            )
    return np.array(images), np.array(labels)


def _pair(number: int, example: Any) -> tuple[Any, Any]:
    if isinstance(example, Mapping):
        values = [[example[key] for key in keys if key in example][:1] for keys in (IMAGES, LABELS)]
        if all(values):
            return values[0][0], values[1][0]
    elif isinstance(example, tuple | list) and len(example) == 2:
        return example[0], example[1]
    raise ConfigError(
        f"data: example {number} must be a pair (image, label), or a mapping with `image` and `label`, got "
        f"{shown(type(example).__name__, str)}"
    )
