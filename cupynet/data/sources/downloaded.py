"""Data sets of files that are looked for in a folder, and downloaded where they are not there."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import platformdirs

from cupynet.backend.array import Array
from cupynet.core.checks import number, setting
from cupynet.core.errors import ConfigError, DataError
from cupynet.data.augment import Augmentation
from cupynet.data.dataset import Dataset
from cupynet.data.download import Check, Downloader, Unavailable
from cupynet.data.idx_file import Damaged, expanded
from cupynet.data.sources.source import Data, Source
from cupynet.data.sources.synthetic import Synthetic

logger = logging.getLogger(__name__)

INSTEAD = setting("data", "fallback", "synthetic")


class KnownFile(Protocol):
    """A file of which it is known beforehand what it has to be."""

    @property
    def name(self) -> str:
        """In the folder, and at the mirrors."""

    @property
    def most_packed(self) -> int:
        """Bytes that it does not exceed."""

    @property
    def digest(self) -> str:
        """What is known of its contents, as hexadecimal digits."""


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets lie: `folder`, else $CUPYNET_DATA, else the user's cache folder."""
    chosen = folder or os.environ.get("CUPYNET_DATA")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("cupynet")


def offline() -> bool:
    """Whether CUPYNET_OFFLINE forbids every download."""
    return os.environ.get("CUPYNET_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


class Downloaded(Source):
    """Files in `<folder>/<name>`, downloaded if they are not there (see `data_folder`, `offline`).

    If they cannot be downloaded either, `fallback` says what to do: "synthetic" warns and loads `Synthetic` digits
    instead, None raises DataError. "auto" is None for who said where the data are, with `folder` or CUPYNET_DATA, and
    "synthetic" for who said nothing. A file that is there but wrong is a DataError in any case, and is left as it is.
    `timeout_s` bounds the seconds that are waited in vain, for all files together; bytes that come may come slowly.

    Attributes:
        files: what there has to be. mirrors: URLs that end in /, before the name of a file.
        samples: how many training and test images there are.
        digits: whether drawn digits may stand in for these.
    """

    files: Sequence[KnownFile]
    mirrors: tuple[str, ...]
    digits = False

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        fallback: str | None,
        seed: int,
        validation: int,
        limit: int | None,
        timeout_s: float,
        normalize: str | Mapping[str, Sequence[float]] | None,
        augment: Sequence[Augmentation],
    ) -> None:
        super().__init__(seed, validation, limit, normalize, augment)
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or "\0" in str(folder)):
            raise ConfigError(f"folder={folder!r}: must be a path, or null for CUPYNET_DATA or else the user's cache")
        if fallback not in ("auto", "synthetic", None):
            raise ConfigError(f"fallback={fallback!r}: must be 'auto', 'synthetic', or null for an error instead")
        self._check_validation(self.samples[0], self.name)
        self.folder = folder
        self.fallback = fallback
        self.timeout_s = number("timeout_s", timeout_s, above=0, infinite=True, unit="seconds")

    @property
    @abstractmethod
    def samples(self) -> tuple[int, int]:
        """How many training and test images there are."""

    @abstractmethod
    def verify(self, path: Path, file: KnownFile) -> object:
        """Look through a file. Raises Damaged where it is not what it has to be."""

    @abstractmethod
    def _read(self, folder: Path) -> tuple[Array, Array, Array, Array]:
        """Training images (S, H, W, C) uint8 and labels (S,), and those to test on. Raises DataError."""

    def load(self) -> Data:
        """The data. Raises DataError if a file is damaged, or if one is missing and there is no fallback."""
        folder = data_folder(self.folder) / self.name
        try:
            missing = [file for file in self.files if not _is_there(folder / file.name)]
        except OSError as error:
            return self._without("CANNOT BE READ", f"{folder} ({error.strerror})")
        if missing:
            for file in self.files:
                if file not in missing:  # a damaged file is an error, whatever comes of the others
                    self.check_file(folder, file)
            try:
                self._download(missing, folder)
            except Unavailable as error:
                others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                lacks = f"{folder} lacks {missing[0].name}{others}" if folder.is_dir() else f"there is no {folder}"
                return self._without("IS NOT THERE", f"{lacks}, and downloading failed ({error})")
        train_images, train_labels, test_images, test_labels = self._read(folder)
        train = Dataset(f"{self.name}-train", train_images, train_labels, self.classes)
        test = Dataset(f"{self.name}-test", test_images, test_labels, self.classes)
        return self._divided(self.name, train, test)

    def check_file(self, folder: Path, file: KnownFile) -> object:
        """What `verify` makes of a file in the folder; DataError with the way out where it is not what it has to be."""
        path = folder / file.name
        try:
            return self.verify(path, file)
        except Damaged as error:
            good = f"{folder.name}/{file.name}"
            way_out = (
                f"delete it to download it again, or name a folder with a good {good} in CUPYNET_DATA or "
                f"{setting('data', 'folder')}"
            )
            raise DataError(f"{path}: {error}; {way_out}") from error.__cause__

    @property
    def may_stand_in(self) -> bool:
        """Whether synthetic digits are taken where these cannot be had."""
        named = self.folder or os.environ.get("CUPYNET_DATA")
        return self.fallback == "synthetic" or (self.fallback == "auto" and not named)

    def expected(self) -> dict[str, int]:
        train, test = self.samples  # a limit shows a part of them
        return {"train": train, "test": test}

    @property
    def downloads_to(self) -> Path | None:
        folder = data_folder(self.folder) / self.name
        with suppress(OSError):  # reported by `load`
            return None if all(_is_there(folder / file.name) for file in self.files) else folder
        return None

    def _download(self, missing: Sequence[KnownFile], folder: Path) -> None:
        if offline():
            raise Unavailable("CUPYNET_OFFLINE forbids downloads")
        logger.info("%s: downloading %d of %d files to %s", self.name, len(missing), len(self.files), folder)
        checks: dict[str, Check] = {file.name: partial(self.verify, file=file) for file in missing}
        most = {file.name: file.most_packed for file in missing}
        Downloader(folder, self.mirrors, self.timeout_s).fetch(checks, most)

    def _without(self, state: str, reason: str) -> Data:
        """What is done when files can neither be found nor downloaded: raise, or warn and go on with other digits."""
        title, above, environment = self.name.upper(), data_folder(self.folder), os.environ.get("CUPYNET_DATA")
        named = f"folder={self.folder}" if self.folder else f"CUPYNET_DATA={environment}" if environment else ""
        absent = f"{title} {state}: {named and f'{named} was given, and '}{reason}"
        what = f"its {len(self.files)} .gz files" if len(self.files) > 1 else self.files[0].name
        way_out = f"put {what} there, or set CUPYNET_DATA to the folder that holds {self.name}/"
        if os.path.lexists(above / self.files[0].name):
            way_out = f"{above} itself has such files: they belong into a folder {self.name}/ in the one that is named"
        if not self.may_stand_in:
            raise DataError(f"{absent}; {way_out}" + (f", or set {INSTEAD}" * self.digits))
        logger.warning(
            "%s; USING SYNTHETIC DIGITS INSTEAD, whose results say nothing about %s. To end this, %s.",
            absent,
            title,
            way_out,
        )
        digits = Synthetic(seed=self.seed, validation=self.validation, limit=self.limit, normalize=self.normalize)
        data = digits.load()
        return Data(data.name, data.train, data.validation, data.test, fallback=True)


class Irreplaceable(Downloaded):
    """A set for which nothing stands in: one that is not there, and cannot be had, is an error."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        timeout_s: float = 60.0,
        normalize: str | Mapping[str, Sequence[float]] | None = None,
        augment: Sequence[Augmentation] = (),
    ) -> None:
        super().__init__(folder, None, seed, validation, limit, timeout_s, normalize, augment)


def _is_there(path: Path) -> bool:
    """Whether there is something at `path`. Raises OSError where that cannot be told."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
