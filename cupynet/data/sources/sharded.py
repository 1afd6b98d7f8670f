"""A training set in shards, one for each worker, and its test set."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from cupynet.core import checks
from cupynet.core.errors import ConfigError
from cupynet.data.augment import Augmentation
from cupynet.data.files import FilePath, checked_path
from cupynet.data.normalize import Normalize, pixels_for
from cupynet.data.shards import Shards
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.user_files import classes_of


class Sharded(Source):
    """`<folder>/0`, `1`, ...: the shard of each worker, see `Shards`; `<folder>/test`: images.npy and labels.npy.

    Validation images, if there are any, are in `<folder>/validation`. All files are mapped, not read into memory.

    Args:
        folder: its path.
        classes: the number of classes; None: the largest training label + 1.
    """

    def __init__(
        self,
        folder: FilePath | None = None,
        classes: int | None = None,
        seed: int = 12345,
        normalize: Normalize = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(seed=seed, normalize=normalize, augment=augment)
        self.folder = checked_path("folder", folder)
        self._asked_classes = classes_of(classes)
        if self.normalize == "auto":
            raise ConfigError("normalize=auto: would read all shards: set mean and deviation")
        self.name = Path(self.folder).resolve().name if self.folder else "shards"

    @cached_property
    def shards(self) -> Shards:
        """The training set. ConfigError, DataError."""
        if self.folder is None:
            raise ConfigError(f"{checks.setting('data', 'folder', None)}: name the folder that holds the shards")
        return Shards(self.folder, self._asked_classes, pixels_for(self.normalize, None))

    @cached_property
    def image_shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        height, width, channels = self.shards.image_shape
        return height, width, channels

    @cached_property
    def classes(self) -> int:  # type: ignore[override]
        return self.shards.classes

    def load(self) -> Data:
        """Return the data, mapped. ConfigError; DataError for missing or damaged files."""
        shards = self.shards
        validation = shards.dataset("validation") if (shards.folder / "validation").exists() else None
        return Data(self.name, shards, validation, shards.dataset("test"))
