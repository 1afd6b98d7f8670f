from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from cupynet.backend.array import Array
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.dataset import check_layout, count_classes, label_array, read_dataset, read_from
from cupynet.data.files import FilePath, checked_path, expanded
from cupynet.data.sources.source import Data, Source


class UserFiles(Source):
    """Base class for data sets in user files. The constructor inspects the files without reading images."""

    place: Path

    @abstractmethod
    def _read(self, part: str) -> tuple[Array, Array]:
        """Read images (S, H, W, C) or (S, H, W), and labels (S,), of `train`, `test` or `validation`."""

    def _describe(self, image_shape: tuple[int, int, int], classes: int, samples: Mapping[str, int]) -> None:
        """Set the attributes that are known before `load`. `samples` has the number of images of each existing part."""
        if 0 in (*image_shape, *samples.values()):
            found = ", ".join(f"{count} {part} images" for part, count in samples.items())
            raise DataError(f"{self.place}: expected images, found {found} of {image_shape}")
        self.image_shape, self.classes = image_shape, classes
        self.samples = samples.get("train", 0), samples.get("test", 0)
        if "validation" in samples:
            self.samples += (samples["validation"],)

    def load(self) -> Data:
        found = {
            part: read_dataset(self.place, f"{self.name}-{part}", *self._read(part), self.classes)
            for part, count in self.expected().items()
            if count
        }
        none = next(iter(found.values())).take(slice(0))
        train, test = (found.get(part) or replace(none, name=f"{self.name}-{part}") for part in ("train", "test"))
        return self._divided(self.name, train, test, found.get("validation"))


@dataclass(eq=False)
class UserArrays(UserFiles):
    """Base class for data sets stored as arrays: `train_images`, `train_labels`, `test_images`, `test_labels`.

    The training or the test arrays may be missing. The constructor reads shapes and one array of labels.
    """

    mixed = False

    classes: int | None = field(default=None, kw_only=True)  # type: ignore[assignment]

    @abstractmethod
    def _has(self, name: str) -> bool:
        """Return True if an array exists or was specified by the user."""

    @abstractmethod
    def _shape(self, name: str) -> tuple[int, ...]:
        """Read the shape of an array."""

    @abstractmethod
    def _array(self, name: str) -> Array:
        """Read an array."""

    def _inspect(self) -> None:
        parts = [part for part in ("train", "test") if self._has(f"{part}_images") or self._has(f"{part}_labels")]
        parts = parts or ["train"]
        shapes = {part: self._shape(f"{part}_images") for part in parts}
        for part in parts:
            self._shape(f"{part}_labels")  # raises DataError if they are missing
        images, first = shapes[parts[0]], parts[0]
        if len(images) not in (3, 4) or not all(shapes.values()):
            raise DataError(f"{self.place}: expected images (S, H, W) or (S, H, W, C), found {images}")
        height, width, channels = (*images[1:], 1)[:3]
        with read_from(self.place):
            check_layout(f"{first}_images", images)
        classes = count_classes(self.place, [self._labels(f"{first}_labels")], self.classes)
        self._describe((height, width, channels), classes, {part: shape[0] for part, shape in shapes.items()})

    def _labels(self, name: str) -> Array:
        with read_from(self.place):
            labels = label_array(name, self._array(name))
        if labels.ndim != 1:
            raise DataError(f"{self.place}: {name}: expected integer labels, found floating-point numbers")
        return labels

    def _read(self, part: str) -> tuple[Array, Array]:
        return self._array(f"{part}_images"), self._labels(f"{part}_labels")


def required_path(name: str, value: FilePath | None, what: str) -> Path:
    path = checked_path(name, value)
    if path is None:
        raise ConfigError(f"set {what}", name, "null")
    return expanded(path)
