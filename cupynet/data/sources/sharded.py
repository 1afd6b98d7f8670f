from __future__ import annotations

from collections.abc import Sequence

from cupynet.core.errors import ConfigError
from cupynet.data.augment import Augmentation
from cupynet.data.files import FilePath
from cupynet.data.normalize import Normalize, pixels_for
from cupynet.data.shards import Shards
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.user_files import required_path


class ShardedFiles(Source):
    """Memory-mapped files with a shard for each worker, in `<folder>/0`, `<folder>/1`, ... (see `Shards`).

    `<folder>/test`, and `<folder>/validation` if it exists, contain images.npy and labels.npy.

    Args:
        classes: number of classes; by default the largest training label + 1.
        seed, normalize, augment: see `Source`. `normalize` cannot be "auto".
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
        self.folder = required_path("folder", folder, "the folder that contains the shards")
        if self.normalize == "auto":
            raise ConfigError("would read all shards. Set mean and std", "normalize", "auto")
        self.shards = Shards(self.folder, classes, pixels_for(self.normalize, None))
        self.image_shape, self.classes, self.name = self.shards.image_shape, self.shards.classes, self.shards.name

    @property
    def validates(self) -> bool:
        return (self.shards.folder / "validation").exists()

    def load(self) -> Data:
        shards = self.shards
        validation = shards.dataset("validation") if self.validates else None
        return Data(self.name, shards, validation, shards.dataset("test"))
