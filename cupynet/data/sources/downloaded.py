"""Data sets of files that are downloaded if they are not in their folder."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import platformdirs

from cupynet.backend.array import Array
from cupynet.core.checks import number, setting
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.dataset import Dataset
from cupynet.data.download import Downloader, KnownFile, Unavailable
from cupynet.data.idx_file import Damaged, FilePath, expanded
from cupynet.data.normalize import Normalize
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.synthetic import Synthetic

logger = logging.getLogger(__name__)


def data_folder(folder: FilePath | None = None) -> Path:
    """Return the folder of data sets: `folder`, else $CUPYNET_DATA, else the user's cache folder."""
    chosen = folder or os.environ.get("CUPYNET_DATA")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("cupynet")


def offline() -> bool:
    """Return True if CUPYNET_OFFLINE forbids downloads."""
    return os.environ.get("CUPYNET_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


class Downloaded(Source):
    """Files in `<folder>/<name>`, downloaded if they are not there (see `data_folder`, `offline`).

    A missing file that cannot be downloaded is a DataError, unless `may_stand_in`: then a warning is logged and
    `Synthetic` digits are loaded instead. A damaged file is always a DataError, and is left as it is.

    Args:
        folder: the folder with the folder `<name>`; None: CUPYNET_DATA, else the user's cache.
        seed, validation, limit, normalize, augment: see `Source`.
        timeout_s: the largest total time without any data arriving, over all files.

    Attributes:
        files: the expected files. mirrors: URLs that end in /, before the name of a file.
        samples: the numbers of training and test images.
    """

    files: Sequence[KnownFile]
    mirrors: tuple[str, ...]
    fallback: str | None = None

    def __init__(
        self,
        folder: FilePath | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        timeout_s: float = 60.0,
        normalize: Normalize = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(seed, validation, limit, normalize, augment)
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or "\0" in str(folder)):
            raise ConfigError(f"folder={folder!r}: must be a path, or null for CUPYNET_DATA or else the user's cache")
        self._check_validation(self.samples[0], self.name)
        self.folder = folder
        self.timeout_s = number("timeout_s", timeout_s, above=0, infinite=True, unit="seconds")

    @property
    @abstractmethod
    def samples(self) -> tuple[int, int]:
        """The numbers of training and test images."""

    @abstractmethod
    def _read(self, folder: Path) -> tuple[Array, Array, Array, Array]:
        """Return training images (S, H, W, C) uint8 and labels (S,), and those to test on. Raises DataError."""

    def load(self) -> Data:
        """Return the data. Raises DataError if a file is damaged, or missing without a substitute."""
        folder = data_folder(self.folder) / self.name
        missing = [file for file in self.files if not os.path.lexists(folder / file.name)]
        if missing:
            for file in self.files:
                if file not in missing:  # a damaged file is an error even if others are missing
                    self.read(folder, file)
            try:
                self._download(missing, folder)
            except Unavailable as error:
                return self._substitute(f"{folder} lacks {missing[0].name}, and downloading failed ({error})")
        images, labels, test_images, test_labels = self._read(folder)
        train = Dataset(f"{self.name}-train", images, labels, self.classes)
        return self._divided(self.name, train, Dataset(f"{self.name}-test", test_images, test_labels, self.classes))

    def read(self, folder: Path, file: KnownFile) -> bytes:
        """Return the verified contents of a file in the folder. Raises DataError."""
        path = folder / file.name
        try:
            return file.read(path)
        except Damaged as error:
            raise DataError(
                f"{path}: {error}; delete it to download it again, or name a folder with a good "
                f"{folder.name}/{file.name} in CUPYNET_DATA or {setting('data', 'folder')}"
            ) from error.__cause__

    @property
    def may_stand_in(self) -> bool:
        """True if synthetic digits may be used instead."""
        named = self.folder or os.environ.get("CUPYNET_DATA")
        return self.fallback == "synthetic" or (self.fallback == "auto" and not named)

    def expected(self) -> dict[str, int]:
        train, test = self.samples  # all are read, regardless of the limit
        return {"train": train, "test": test}

    @property
    def downloads_to(self) -> Path | None:
        """The folder into which `load` would download files; None if all are there."""
        folder = data_folder(self.folder) / self.name
        return None if all(os.path.lexists(folder / file.name) for file in self.files) else folder

    def _download(self, missing: Sequence[KnownFile], folder: Path) -> None:
        if offline():
            raise Unavailable("CUPYNET_OFFLINE forbids downloads")
        logger.info("%s: downloading %d of %d files to %s", self.name, len(missing), len(self.files), folder)
        Downloader(folder, self.mirrors, self.timeout_s).fetch(missing)

    def _substitute(self, reason: str) -> Data:
        """Return synthetic digits, with a warning, if they may stand in. Raises DataError if not."""
        title = self.name.upper()
        way_out = f"put its files there, or set CUPYNET_DATA to the folder that holds {self.name}/"
        if not self.may_stand_in:
            raise DataError(f"{title} IS NOT THERE: {reason}; {way_out}")
        logger.warning(
            "%s IS NOT THERE: %s; USING SYNTHETIC DIGITS INSTEAD, whose results say nothing about %s. To end this, %s.",
            title,
            reason,
            title,
            way_out,
        )
        digits = Synthetic(seed=self.seed, validation=self.validation, limit=self.limit, normalize=self.normalize)
        return replace(digits.load(), fallback=True)
