from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from cupynet.backend.array import Array
from cupynet.core import checks, wording
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augment, augmentations, check_augmentations
from cupynet.data.dataset import Dataset, held_out_count, hold_out, in_turns
from cupynet.data.normalize import Normalize, checked, pixels_for
from cupynet.data.shards import Shards


@dataclass(frozen=True, eq=False)
class Data:
    """The data sets of a source.

    Attributes:
        train: training images; empty if there are only test images.
        validation: images to evaluate during training, held out from training or separate; None if there are none.
        test: test images; may be empty.
        fallback: True if the requested data were replaced by synthetic digits.
    """

    name: str
    train: Dataset | Shards
    validation: Dataset | None
    test: Dataset
    fallback: bool = False

    def __repr__(self) -> str:
        parts = {"train": self.train, "validation": self.validation, "test": self.test}
        sizes = ", ".join(f"{len(part):,} {name}" for name, part in parts.items() if part is not None)
        return f"<Data {self.name!r}: {sizes} images of {self.test.image_shape}, {self.test.classes} classes>"

    def check(self, image_shape: tuple[int, int, int], classes: int) -> None:
        """Raise DataError if the data differ from the image shape or classes that the source declared."""
        for dataset in (self.train, self.validation, self.test):
            if dataset is not None and (dataset.image_shape, dataset.classes) != (tuple(image_shape), classes):
                raise DataError(
                    f"data {self.name!r}: its source declared images of {tuple(image_shape)} in {classes} classes, but "
                    f"{dataset.name!r} has images of {dataset.image_shape} in {dataset.classes} classes"
                )


@dataclass(eq=False, kw_only=True)
class Source(ABC):
    """Base class of sources. Models can be built from `image_shape` and `classes` before loading the data.

    Args:
        seed: seed of the validation split and of synthetic images.
        validation: number of images to hold out from training, or a fraction below 1 of each class.
        limit: maximum number of training images, and of test images; None for all. If `mixed`, the first images are
            used; otherwise images are taken from the classes in turn.
        normalize: scaling of pixels. None for fractions of 255; "auto" for mean 0 and standard deviation 1 of the
            training images in each channel; or {"mean": [...], "std": [...]} in fractions of 255. Validation and test
            images are scaled like the training images.
        augment: augmentations of the training images in order (see `augmentations`). `load` does not apply them; in
            Python, pass them to a `Loader`.

    Attributes:
        image_shape: (H, W, C).
        class_names: class names in order; may be empty.
        samples: numbers of training, test and separate validation images; empty if unknown or memory-mapped.
        mixed: False if images may be sorted by class.
        on_black: True if images are light on a black background.
        centered: True if images are centered as in MNIST (see `centered_as_mnist`).
    """

    image_shape: tuple[int, int, int] = field(init=False, repr=False)
    classes: int = field(init=False, repr=False)
    class_names: tuple[str, ...] = field(default=(), init=False, repr=False)
    samples: tuple[int, ...] = field(default=(), init=False, repr=False)
    name = "data"
    mixed, on_black, centered = True, False, False

    seed: int = 12345
    validation: float = 0
    limit: int | None = None
    normalize: Normalize = None
    augment: Augment = ()

    def __post_init__(self) -> None:
        self.seed = checks.seed("seed", self.seed)
        if not isinstance(self.validation, float | np.floating) or not 0 < self.validation < 1:
            self.validation = checks.integer("validation", self.validation, 0, ", or a fraction below 1")
        if self.limit is not None:
            self.limit = checks.integer("limit", self.limit, 1, ", or null for no limit")
        self.normalize = checked(self.normalize)
        self.augment = augmentations(self.augment)

    @abstractmethod
    def load(self) -> Data:
        """Load the data. Raise DataError if files are missing or damaged."""

    @property
    def validates(self) -> bool:
        return bool(self.validation)

    def check(self, *, trains: bool = True) -> None:
        """Check `validation`, `normalize` and `augment`. If `trains`, require training and evaluation images."""
        channels = self.image_shape[2]
        if isinstance(self.normalize, Mapping) and len(self.normalize["mean"]) not in (1, channels):
            images = f"images have {wording.counted(channels, 'channel')}"
            raise ConfigError(f"{images}. Give a number for each channel", "normalize", wording.written(self.normalize))
        check_augmentations(augmentations(self.augment), self.image_shape)
        found = self.expected()
        if trains and found.get("train") == 0:
            raise ConfigError(f"{self.name} has test images, but no training images")
        if trains and found.get("test") == 0 and not self.validates:
            reason = f"{self.name} has no images to evaluate on. Hold some out, such as 0.1 of each class"
            raise ConfigError(reason, "validation", "0")
        if self.validation and found.get("train"):
            held_out_count(self.validation, found["train"], "validation")

    def expected(self) -> dict[str, int]:
        """Return the number of images that `load` keeps in memory for each part, or {} if unknown."""
        return dict(zip(("train", "test", "validation"), self.samples, strict=False))

    def _divided(self, name: str, train: Dataset, test: Dataset, validation: Dataset | None = None) -> Data:
        """Apply the validation split, the limit and normalization. Samples keep their order."""
        if self.validation:
            kept, held_out = hold_out(train.labels, self.validation, self.seed, "validation")
            validation = replace(train.take(held_out), name=f"{name}-validation")
            rows: Array | slice = kept[self._limited(train.labels[kept])]
        else:
            rows = self._limited(train.labels)
        train, test = train.take(rows), test.take(self._limited(test.labels))
        pixels = pixels_for(self.normalize, train.images)
        described = partial(replace, pixels=pixels, class_names=self.class_names)
        return Data(name, described(train), validation and described(validation), described(test))

    def _limited(self, labels: Array) -> Array | slice:
        return slice(self.limit) if self.mixed else in_turns(labels, self.limit)
