from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import platformdirs

from cupynet.backend.array import Array
from cupynet.core import shared_options
from cupynet.core.errors import DataError
from cupynet.core.wording import setting
from cupynet.data.dataset import Dataset
from cupynet.data.files import FilePath, KnownFile, checked_path, expanded
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.synthetic import Synthetic

logger = logging.getLogger(__name__)


def offline() -> bool:
    return os.environ.get("CUPYNET_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


@dataclass(eq=False)
class Downloaded(Source):
    """Base class of data sets that are downloaded to `<folder>/<name>`, unless CUPYNET_OFFLINE is set.

    If a file is missing and cannot be downloaded, `Synthetic` digits are loaded with a warning if `may_stand_in`;
    otherwise DataError is raised. A damaged file always raises DataError.

    Args:
        folder: the folder that contains `<name>`; by default CUPYNET_DATA or, if it is unset, the user's cache.
        timeout_s: seconds without data until the next mirror is tried.
        seed and others: see `Source`.

    Attributes:
        files: the expected files.
        mirrors: URLs to download them from, ending in /.
    """

    files: ClassVar[Sequence[KnownFile]]
    mirrors: ClassVar[tuple[str, ...]]
    samples = (60_000, 10_000)  # numbers of images, which are all read regardless of `limit`

    folder: FilePath | None = None
    timeout_s: float = field(default=10.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folder = checked_path("folder", self.folder)
        self.timeout_s = shared_options.timeout_s("timeout_s", self.timeout_s)

    @abstractmethod
    def _read(self) -> tuple[Array, Array, Array, Array]:
        """Return training images (S, H, W, C) uint8, training labels (S,), test images and test labels."""

    @property
    def named(self) -> FilePath | None:
        """The folder chosen by the user, in `folder` or CUPYNET_DATA, or None."""
        return self.folder or os.environ.get("CUPYNET_DATA")

    @property
    def place(self) -> Path:
        return (expanded(self.named) if self.named else platformdirs.user_cache_path("cupynet")) / self.name

    def path(self, file: KnownFile) -> Path:
        return self.place / file.name

    @property
    def missing(self) -> list[KnownFile]:
        return [file for file in self.files if not os.path.lexists(self.path(file))]

    @property
    def may_stand_in(self) -> bool:
        """True if synthetic digits may be used instead."""
        return False

    def read(self, file: KnownFile) -> bytes:
        try:
            return file.read(self.path(file))
        except DataError as error:
            remedy = f"Delete it to download it again, or choose another folder in {setting('data', 'folder')}"
            raise DataError(f"{error}. {remedy}") from error

    def fetch(self) -> None:
        """Download missing files and verify existing ones. Raise Unavailable, or DataError if a file is damaged."""
        from cupynet.data.download import Unavailable, fetch  # a slow import

        missing = self.missing
        for file in self.files:
            if file not in missing:  # a damaged file is an error even if others are missing
                self.read(file)
        if missing and offline():
            raise Unavailable("CUPYNET_OFFLINE disables downloads")
        if missing:
            fetch(missing, self.place, self.mirrors, self.timeout_s)

    def load(self) -> Data:
        if missing := self.missing:
            from cupynet.data.download import Unavailable

            try:
                self.fetch()
            except Unavailable as error:
                return self._substitute(f"{self.place} lacks {missing[0].name}, and downloading failed ({error})")
        images, labels, test_images, test_labels = self._read()
        train = Dataset(f"{self.name}-train", images, labels, self.classes)
        return self._divided(self.name, train, Dataset(f"{self.name}-test", test_images, test_labels, self.classes))

    def _substitute(self, reason: str) -> Data:
        title = self.name.upper()
        remedy = f"put its files into {self.place}, or set CUPYNET_DATA to the folder that contains {self.name}/"
        if not self.may_stand_in:
            raise DataError(f"{title} not found: {reason}. To fix this, {remedy}")
        logger.warning(
            f"{title} not found: {reason}. Using synthetic digits instead; results do not apply to {title}. "
            f"To fix this, {remedy}."
        )
        digits = Synthetic(seed=self.seed, validation=self.validation, limit=self.limit, normalize=self.normalize)
        return replace(digits.load(), fallback=True)
