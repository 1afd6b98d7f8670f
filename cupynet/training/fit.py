from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from cupynet.backend import FRACTIONS, PixelScale
from cupynet.backend.array import Array, layout_hint, on_host
from cupynet.core.checks import number
from cupynet.core.errors import ConfigError, DataError, errors_of
from cupynet.core.wording import one, shown
from cupynet.data import Data, Dataset, LabeledData, Loader, Shards, Source, as_loader, read_pairs
from cupynet.data.dataset import balanced_weights, is_one_hot, split_views, weight_array
from cupynet.nn import Loss, Model, check_output
from cupynet.parallel import Communicator
from cupynet.training.metrics import Metric, metrics_of

Examples: TypeAlias = Loader | Dataset | Shards | tuple[Array, Array] | Iterable[Any] | Array
ClassWeight: TypeAlias = Mapping[int, float] | str | None


@dataclass
class Fit:
    """The arguments of `Trainer.fit`."""

    train: Loader
    epochs: int  # additional epochs; 0 only to finish a restored, unfinished fit
    evaluate_on: Loader | None = None  # evaluated every `evaluate_every` epochs and after the last epoch
    evaluate_every: int = 1
    split: str = "test"  # or "validation"


def examples(x: Examples, y: Any = None) -> Loader | Dataset | Shards | tuple[Array, Array]:
    if isinstance(x, Loader | Dataset | Shards):
        if y is not None:
            raise ConfigError(f"{one(type(x).__name__)} contains its labels. Remove this argument", "y")
        return x
    if y is not None:
        return x, y
    parts = x if isinstance(x, tuple | list) else ()
    pair = len(parts) == 2 and not isinstance(parts[0], tuple | Mapping)
    if pair and parts[1] is not None:
        return parts  # type: ignore[return-value]
    if pair or hasattr(x, "shape") or (len(parts) == 1 and hasattr(parts[0], "shape")):
        raise ConfigError("the labels are missing. Pass (images, labels). Only predict works without labels")
    if isinstance(x, Data | Source):
        loaded = "" if isinstance(x, Data) else ".load()"
        raise ConfigError(f"pass one part of the data, such as data{loaded}.train, and another as validation_data")
    if len(parts) == 3 and hasattr(parts[0], "shape"):
        raise ConfigError("must be (images, labels). Pass weights as sample_weight=", "x", "<3 arrays>")
    return read_pairs(x)


def loader_of(
    data: Examples,
    batch_size: int | None,
    model: Model,
    pixels: PixelScale,
    *,
    shuffle: bool = True,
    sample_weight: Any = None,
    class_weight: ClassWeight = None,
) -> Loader:
    """Check data and return a loader for them. `pixels` is the pixel scale to use if `data` is a pair of arrays."""
    data, outputs = examples(data), model.output.features
    if isinstance(data, Loader) and batch_size not in (None, data.batch_size):
        raise ConfigError(
            f"the Loader has batches of {data.batch_size}. Remove this argument", "batch_size", shown(batch_size)
        )
    if isinstance(data, tuple | list):
        images, labels = data[0], on_host(data[1])
        several = model.loss.applies == "sigmoid" and labels.ndim == 2 and labels.shape[1] > 1  # even if one-hot
        if labels.dtype.kind in "biu" and (several or (model.loss.applies != "softmax" and outputs == 1)):
            labels = labels.astype(np.float32)  # regression; a single output cannot represent classes
        elif model.loss.applies == "softmax" and is_one_hot(labels) and labels.shape[1] == outputs:
            labels = labels.argmax(axis=1)
        data = images, labels
    size = 128 if batch_size is None else batch_size
    loader = as_loader(data, size, shuffle=shuffle, classes=outputs, pixels=pixels)
    loader = weighted(loader, sample_weight, class_weight)
    check_data(loader, model)
    return loader


def weighted(loader: Loader, sample_weight: Any, class_weight: ClassWeight) -> Loader:
    if sample_weight is None and class_weight is None:
        return loader
    data, argument = loader.dataset, "class_weight" if sample_weight is None else "sample_weight"
    if not isinstance(data, Dataset):
        raise ConfigError("needs a data set in memory, not shards", argument)
    weights = np.ones(len(data), np.float32) if data.weights is None else data.weights
    if sample_weight is not None:
        weights = weights * weight_array("sample_weight", sample_weight, len(data))
    if class_weight is not None:
        weights = weights * _class_factors(data, class_weight)[data.labels]
    if not weights.any():
        raise ConfigError("every sample has weight 0", argument)
    return with_dataset(loader, replace(data, weights=weights))


def with_dataset(loader: Loader, data: Dataset) -> Loader:
    return Loader(data, loader.batch_size, loader.seed, loader.shuffle, loader.augment)


def _class_factors(data: Dataset, class_weight: ClassWeight) -> Array:
    if data.labels.ndim == 2:
        raise ConfigError("needs class indices as labels. For targets, use sample_weight", "class_weight")
    if isinstance(class_weight, str) and class_weight == "balanced":
        return balanced_weights("class_weight", data.labels, data.classes)
    if not isinstance(class_weight, Mapping):
        raise ConfigError("must be a dictionary {class: weight}, or 'balanced'", "class_weight", shown(class_weight))
    factors = np.ones(data.classes)
    for each, weight in class_weight.items():
        if isinstance(each, float) or each not in range(data.classes):
            raise ConfigError(f"must be a class from 0 to {data.classes - 1}", "class_weight", shown(each))
        factors[int(each)] = number(f"class_weight[{each}]", weight, minimum=0)  # a bool would select all classes
    return factors


def evaluation_loader(data: Examples, batch_size: int | None, model: Model, train: LabeledData | None = None) -> Loader:
    """Check evaluation data and return a loader for them.

    data: like `x` in `ParallelWrapper.fit`, or x, y and sample_weight in a tuple or list.
    train: the training data, whose pixel scale and classes the data must have; by default the model's.
    """
    pixels = None if train is None else train.pixels
    if pixels is None and (model.trained_on == "pixels" or model.pixels != FRACTIONS):  # an untrained one allows any
        pixels = model.pixels
    if isinstance(data, Loader) and data.augment:
        data = Loader(data.dataset, data.batch_size, data.seed, data.shuffle)
    weights = None
    if isinstance(data, list) and len(data) == 3 and hasattr(data[0], "shape"):  # not a list of three examples
        data = tuple(data)
    if isinstance(data, tuple) and len(data) == 3 and not isinstance(data[0], tuple):
        *data, weights = data
    loader = loader_of(data, batch_size, model, pixels or FRACTIONS, shuffle=False, sample_weight=weights)
    dataset = loader.dataset
    if pixels is not None and dataset.pixels != pixels and not dataset.scaled:
        raise ConfigError(
            f"data set {dataset.name!r}: its pixel scale differs from the training data's. Use "
            "Dataset(..., pixels=model.pixels), or a pair (images, labels)"
        )
    names, expected = _class_names(dataset), model.class_names if train is None else _class_names(train)
    if names and expected and names != expected:
        raise ConfigError(
            f"data set {dataset.name!r} has other classes than the training data: {shown([*names])} instead of "
            f"{shown([*expected])}. For images in folders, pass ImageFolder(..., class_names=model.class_names)"
        )
    return loader


def held_out_of(
    loader: Loader,
    model: Model,
    validation_split: float,
    validation_data: Examples | None,
    evaluate_on: Examples | None,
) -> tuple[Loader, Loader | None, str]:
    """Return the training loader, the evaluation loader or None, and the name of the split."""
    fraction = number("validation_split", validation_split, minimum=0, below=1)
    given = {"validation_split": fraction or None, "validation_data": validation_data, "evaluate_on": evaluate_on}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ConfigError("pass only one of validation_split, validation_data and evaluate_on", named[1])
    data = evaluate_on if validation_data is None else validation_data
    if data is not None:
        size = None if isinstance(data, Loader) else loader.batch_size
        with errors_of(named[0], ()):
            held_out = evaluation_loader(data, size, model, loader.dataset)
        return loader, held_out, "validation" if evaluate_on is None else "test"
    if not fraction:
        return loader, None, "validation"
    if not isinstance(loader.dataset, Dataset):
        raise ConfigError("needs a data set in memory. Use validation_data", "validation_split", str(fraction))
    train, kept = split_views(loader.dataset, fraction, loader.seed)
    held_out = Loader(kept, loader.batch_size, loader.seed, shuffle=False)
    held_out.split = kept.images.rows
    return with_dataset(loader, train), held_out, "validation"


def classifies(dataset: LabeledData, loss: Loss) -> bool:
    return not isinstance(dataset, Dataset) or dataset.labels.ndim == 1 or loss.applies == "softmax"


def check_metrics(metrics: Sequence[Metric], loader: Loader | None, loss: Loss) -> None:
    if loader is None:
        return
    kind = classifies(loader.dataset, loss)
    metrics_of(metrics, classifies=kind)
    if not kind and "auc" in metrics and not np.isin(loader.dataset.labels, (0, 1)).all():
        raise ConfigError("needs classes, or targets that are 0 or 1", "metrics", "auc")
    if not kind and "accuracy" in metrics and loss.applies != "sigmoid":
        raise ConfigError("needs classes, or binary_cross_entropy", "metrics", "accuracy")


def check_data(loader: Loader, model: Model) -> None:
    """Raise ConfigError if the data set is empty, or if its shapes, labels or targets do not fit the model."""
    dataset = loader.dataset
    if not len(dataset):
        raise ConfigError(f"data set {dataset.name!r} is empty. It needs at least one sample")
    shape = tuple(dataset.image_shape)
    if shape != model.input.shape:
        hint = layout_hint((len(dataset), *shape), model.input.shape)
        raise ConfigError(
            f"data set {dataset.name!r} has images of {shape} (height, width, channels), but the model takes "
            f"{model.input}. Build the model for Image{shape}, or reshape the images{hint}"
        )
    one_target = model.output.features == 1 and model.loss.applies != "softmax"
    if one_target and isinstance(dataset, Dataset) and dataset.labels.ndim == 1:
        raise ConfigError(
            f"data set {dataset.name!r} has class indices as labels, but the network returns a single number. For "
            "targets, pass floating-point labels: labels.astype('float32')"
        )
    check_output(model.network, dataset.classes)
    if isinstance(dataset, Dataset) and dataset.labels.ndim == 2:
        model.loss.check_targets(dataset.labels)
    elif loader.mixing or getattr(dataset, "weights", None) is not None:
        model.loss.check_targets(np.eye(dataset.classes, dtype=np.float32))


@contextmanager
def named(model: Model, dataset: LabeledData, iteration: Callable[[], int]) -> Iterator[None]:
    """Store in the model how its training images are scaled, and their class names.

    This is undone if `iteration()` has not changed at the end, because the model was not trained.
    """
    before, begun = (model.pixels, model.class_names, model.trained_on), iteration()
    model.class_names = _class_names(dataset) or model.class_names
    model.pixels = dataset.pixels
    model.trained_on = "floats" if dataset.scaled else "pixels"
    try:
        yield
    finally:
        if iteration() == begun:
            model.pixels, model.class_names, model.trained_on = before


def _class_names(dataset: LabeledData) -> tuple[str, ...]:
    return tuple(getattr(dataset, "class_names", ()))


def check_same_data(loader: Loader, world: Communicator) -> None:
    """Raise DataError if the data, their order or the batches differ between workers. Every worker must call this."""
    signatures = world.gather_numbers(loader.signature)[:, 0]  # (W,)
    others = np.flatnonzero(signatures != signatures[0]).tolist()
    if others:
        raise DataError(
            f"ranks {others} do not have the same data in the same order as rank 0. Copy the data to all machines, and "
            "use the same settings"
        )
