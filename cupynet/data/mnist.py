"""MNIST (LeCun, Cortes, Burges): 60,000 + 10,000 handwritten digits of 28 x 28 bytes, from its four IDX files.

The `mnist` package parses what was verified here; its downloader is not used (no time-out, no check, no atomic write,
and an address that has refused everybody since 2024).
"""

from __future__ import annotations

import io
import logging
import os
from functools import partial
from pathlib import Path

import mnist
import numpy as np
import platformdirs

from cupynet.backend.array import Array
from cupynet.checks import number
from cupynet.data.dataset import Dataset
from cupynet.data.download import Check, Unavailable, fetch
from cupynet.data.idx import IdxFile, expanded, read_idx, unpack
from cupynet.data.shards import Shards
from cupynet.data.source import Data, Source
from cupynet.data.synthetic import Synthetic
from cupynet.errors import ConfigError, DataError

logger = logging.getLogger(__name__)


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Where data sets lie: `folder`, else $CUPYNET_DATA, else the user's cache folder."""
    chosen = folder or os.environ.get("CUPYNET_DATA")
    return expanded(chosen) if chosen else platformdirs.user_cache_path("cupynet")


def offline() -> bool:
    """Whether CUPYNET_OFFLINE forbids every download."""
    return os.environ.get("CUPYNET_OFFLINE", "").strip().lower() not in ("", "0", "false", "no")


class MNIST(Source):
    """The four files in `<folder>/mnist`, downloaded if they are not there (see `data_folder`, `offline`).

    If they cannot be downloaded either, `fallback` says what to do: "synthetic" warns and loads `Synthetic` digits
    instead, None raises DataError. "auto" is None for who said where the data are, with `folder` or CUPYNET_DATA, and
    "synthetic" for who said nothing. A file that is there but wrong is a DataError in any case, and is left as it is.
    `timeout_s` bounds what is waited in vain, for all four files together; bytes that come may come slowly.
    """

    image_shape = (28, 28, 1)
    classes = 10
    name = "mnist"
    files = (  # training images and labels, test images and labels
        IdxFile(
            "train-images-idx3-ubyte.gz",
            (60_000, 28, 28),
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        IdxFile(
            "train-labels-idx1-ubyte.gz",
            (60_000,),
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        IdxFile(
            "t10k-images-idx3-ubyte.gz",
            (10_000, 28, 28),
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        IdxFile(
            "t10k-labels-idx1-ubyte.gz",
            (10_000,),
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    )
    mirrors: tuple[str, ...] = (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "https://raw.githubusercontent.com/fgnt/mnist/master/",
    )

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        fallback: str | None = "auto",
        seed: int = 12345,
        validation: int = 0,
        limit: int | None = None,
        timeout_s: float = 30.0,
        storage: str = "shared",
        shards: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(seed, validation, limit, storage, shards)
        if folder is not None and (not isinstance(folder, (str, os.PathLike)) or "\0" in str(folder)):
            raise ConfigError(f"folder={folder!r}: must be a path, or null for CUPYNET_DATA or else the user's cache")
        if fallback not in ("auto", "synthetic", None):
            raise ConfigError(f"fallback={fallback!r}: must be 'auto', 'synthetic', or null for an error instead")
        self._check_validation(self.files[0].shape[0], self.name)
        self.folder = folder
        self.fallback = fallback
        self.timeout_s = number("timeout_s", timeout_s, above=0, infinite=True, unit="seconds")

    def load(self) -> Data:
        """The data. Raises DataError if a file is damaged, or if one is missing and there is no fallback."""
        if self.storage == "sharded":
            return self._sharded()
        folder = data_folder(self.folder) / self.name
        try:
            missing = [file for file in self.files if not _is_there(folder / file.name)]
        except OSError as error:
            return self._without("CANNOT BE READ", f"{folder} ({error.strerror})")
        if missing:
            for file in self.files:
                if file not in missing:  # a damaged file is an error, whatever comes of the others
                    read_idx(folder / file.name, file, self.files)
            try:
                self._download(missing, folder)
            except Unavailable as error:
                others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
                lacks = f"{folder} lacks {missing[0].name}{others}" if folder.is_dir() else f"there is no {folder}"
                return self._without("IS NOT THERE", f"{lacks}, and downloading failed ({error})")
        train_images, train_labels, test_images, test_labels = (
            self._parsed(folder / file.name, file) for file in self.files
        )
        train = Dataset(f"{self.name}-train", train_images, train_labels, self.classes)
        test = Dataset(f"{self.name}-test", test_images, test_labels, self.classes)
        return self._divided(self.name, train, test)

    @property
    def may_stand_in(self) -> bool:
        """Whether synthetic digits are taken where these cannot be had."""
        named = self.folder or os.environ.get("CUPYNET_DATA")
        return self.fallback == "synthetic" or (self.fallback == "auto" and not named)

    def expected(self) -> dict[str, int]:
        if len(self.files) != 4:
            return {}
        whole = {"train": self.files[0].shape[0], "test": self.files[2].shape[0]}  # a limit shows a part of them
        return {} if self.storage == "sharded" else whole

    def fingerprint(self) -> str:
        """The digests of the files, and what is made of them."""
        parts = [self.name, *(file.sha256 for file in self.files), self.validation, self.limit]
        return " ".join(map(str, [*parts, self.seed] if self.validation else parts))

    def _download(self, missing: list[IdxFile], folder: Path) -> None:
        if offline():
            raise Unavailable("CUPYNET_OFFLINE forbids downloads")
        logger.info("%s: downloading %d of %d files to %s", self.name, len(missing), len(self.files), folder)
        checks: dict[str, Check] = {file.name: partial(unpack, file=file, siblings=self.files) for file in missing}
        fetch(checks, folder, self.mirrors, self.timeout_s)

    def _shards(self) -> Shards:
        shards = super()._shards()
        if shards.fallback and self.fallback != "synthetic":
            way_out = f"cut {self.name} again, or pass fallback='synthetic' to train on them"
            raise DataError(f"{shards.folder}: holds {shards.name} digits in place of {self.name}; {way_out}")
        return shards

    def _without(self, state: str, reason: str) -> Data:
        """What is done when files can neither be found nor downloaded: raise, or warn and go on with other digits."""
        title, above, environment = self.name.upper(), data_folder(self.folder), os.environ.get("CUPYNET_DATA")
        named = f"folder={self.folder}" if self.folder else f"CUPYNET_DATA={environment}" if environment else ""
        absent = f"{title} {state}: {named and f'{named} was given, and '}{reason}"
        way_out = (
            f"put its {len(self.files)} .gz files there, or set CUPYNET_DATA to the folder that holds {self.name}/"
        )
        if os.path.lexists(above / self.files[0].name):
            way_out = f"{above} itself has such files: they belong into a folder {self.name}/ in the one that is named"
        if not self.may_stand_in:
            raise DataError(f"{absent}; {way_out}, or pass fallback='synthetic'")
        logger.warning(
            "%s; USING SYNTHETIC DIGITS INSTEAD, whose results say nothing about %s. To end this, %s.",
            absent,
            title,
            way_out,
        )
        data = Synthetic(seed=self.seed, validation=self.validation, limit=self.limit).load()
        return Data(data.name, data.train, data.validation, data.test, fallback=True)

    def _parsed(self, path: Path, file: IdxFile) -> Array:
        """A file as images (S, H, W, 1) uint8, or as labels (S,) int64."""
        values = mnist.parse_idx(io.BytesIO(read_idx(path, file, self.files)))
        return values[..., np.newaxis] if values.ndim > 1 else values.astype(np.int64)


def _is_there(path: Path) -> bool:
    """Whether there is something at `path`. Raises OSError where that cannot be told."""
    try:
        path.lstat()
    except FileNotFoundError:
        return False
    return True
