"""A training set cut into shards, so that a worker needs only its own and all of them may exceed one machine.

    FOLDER/shard-0000-of-0004/   images.npy labels.npy     the samples of this shard
                                 samples.npy               which samples of the whole training set these are
                                 test-images.npy ...       the whole test set, and validation set if there is one
                                 manifest.json             what belongs together, see `stored`
    FOLDER/shard-0001-of-0004/   ...

Every manifest says how many samples each of the shards has, and by `set` of which set of shards it is one: two that
were not written together are never mistaken for parts of one training set.
"""

from __future__ import annotations

import copy
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from cupynet import checks
from cupynet.backend import PixelScale
from cupynet.backend.array import Array
from cupynet.data.dataset import Dataset
from cupynet.data.idx import Damaged, expanded
from cupynet.data.stored import MANIFEST, Manifest, check_mapped, map_array, map_dataset, pixels_of, read_manifest
from cupynet.errors import ConfigError, DataError

FORMAT = "cupynet shard 1"
NAME = re.compile(r"shard-(\d{4,})-of-(\d{4,})")
_WAY_OUT = "write the shards again, or copy this one again from where they were written"


def shard_name(number: int, count: int) -> str:
    """The folder of shard `number`, from 0, of `count`."""
    return f"shard-{number:04}-of-{count:04}"


@dataclass(frozen=True, eq=False)
class Shard:
    """One shard: its samples, which of the whole training set they are, (S,) int64, ascending, and its files."""

    dataset: Dataset
    samples: Array
    files: tuple[tuple[Path, os.stat_result], ...]


class Shards:
    """The shards of one training set in `folder`, of which this machine may have only some.

    Nothing but a manifest is read until `open` or `held_out` is called. All workers may use the same object at once.

    Attributes:
        folder: where they are.
        name, classes, image_shape, pixels: of the whole training set; its length is that of all shards together.
        counts: the samples of each shard.
        fallback: whether these are not the data that were asked for when the shards were written.
        manifest: what the first of those that are here says.

    Raises:
        DataError: there are none, or they are damaged, or shards of several sets.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise ConfigError(f"shards={checks.shown(folder)}: must be the folder of the shards")
        self.folder = expanded(folder)
        self._first, count = self._found()
        self.manifest = self._manifest(self._first, count)
        self.name: str = self.manifest["name"]
        self.classes: int = self.manifest["train"]["classes"]
        self.image_shape: tuple[int, ...] = tuple(self.manifest["train"]["images"]["shape"][1:])
        self.pixels: PixelScale = pixels_of(self.manifest["train"])
        self.counts: tuple[int, ...] = tuple(self.manifest["counts"])
        self.fallback: bool = self.manifest["fallback"]
        self._opened: dict[int, Shard] = {}
        self._whole: Shards | None = None  # where these are but the first samples of them

    def __len__(self) -> int:
        return sum(self.counts)

    def _found(self) -> tuple[int, int]:
        """The number of the first shard that is here, and how many there are everywhere."""
        way_out = "name the folder in which they were written"
        try:
            names = sorted(path.name for path in self.folder.iterdir())
        except OSError as error:
            raise DataError(
                f"{self.folder}: expected shards, but it cannot be read ({error.strerror}); {way_out}"
            ) from error
        matches = [match for match in map(NAME.fullmatch, names) if match]
        if not matches:
            raise DataError(f"{self.folder}: expected folders like {shard_name(0, 2)}, found none; {way_out}")
        different = {match[2]: match[0] for match in matches}
        if len(different) > 1:
            several = " and ".join(different.values())
            raise DataError(f"{self.folder}: expected shards of one set, found {several}; remove those of the other")
        return int(matches[0][1]), int(matches[0][2])

    def path(self, number: int, count: int | None = None) -> Path:
        """The folder of one shard."""
        return self.folder / shard_name(number, len(self.counts) if count is None else count)

    def _manifest(self, number: int, count: int) -> Manifest:
        path = self.path(number, count)
        try:
            manifest = read_manifest(path, FORMAT)
        except Damaged as error:
            raise DataError(f"{error}; {_WAY_OUT}") from error.__cause__
        if not _describes_a_shard(manifest):
            raise DataError(f"{path / MANIFEST}: does not describe a shard; {_WAY_OUT}")
        found = manifest["shard"], len(manifest["counts"])
        if found != (number, count):
            own = shard_name(*found)
            raise DataError(f"{path}: expected this shard, found {own} under its name; {_WAY_OUT}")
        return manifest

    def check_workers(self, workers: int) -> None:
        """Raises ConfigError unless there are as many workers as shards."""
        count = len(self.counts)
        if workers != count:
            raise ConfigError(
                f"{self.folder} has {count} {'shard' if count == 1 else 'shards'}, one for each worker, and "
                f"workers={workers}: train with workers={count}, or cut the data into {workers}"
            )

    def head(self, most: int) -> Shards:
        """The first `most` samples of each shard, or as many as it has."""
        few = copy.copy(self)
        few._whole, few.counts = self, tuple(min(count, most) for count in self.counts)
        return few

    def open(self, number: int) -> Shard:
        """One shard, mapped read-only; all of it is compared with its SHA-256 the first time, and then its size.

        Raises DataError, which names the file, what was expected and the way out.
        """
        if self._whole is not None:
            shard, first = self._whole.open(number), slice(self.counts[number])
            return replace(shard, dataset=shard.dataset.take(first), samples=shard.samples[first])
        path = self.path(number)
        try:
            if number not in self._opened:
                self._opened[number] = self._mapped(number, path)
            for file, then in self._opened[number].files:
                check_mapped(file, then)
        except Damaged as error:
            raise DataError(f"{error}; {_WAY_OUT}") from error.__cause__
        return self._opened[number]

    def _mapped(self, number: int, path: Path) -> Shard:
        manifest = self._manifest(number, len(self.counts))
        if manifest["set"] != self.manifest["set"]:
            expected = f"expected a shard of the same set as {self.path(self._first).name}"
            raise DataError(f"{path}: {expected}, found one that was not written together with it; {_WAY_OUT}")
        dataset, which = map_dataset(path, manifest["train"]), map_array(path, manifest["samples"])
        if not len(dataset) == len(which) == self.counts[number]:
            raise Damaged(
                f"{path}: expected {self.counts[number]} samples, found {len(dataset)} and {len(which)} names"
            )
        entries = manifest["train"]["images"], manifest["train"]["labels"], manifest["samples"]
        files = [path / entry["file"] for entry in entries]
        return Shard(dataset, which, tuple((file, file.stat()) for file in files))

    def held_out(self) -> tuple[Dataset | None, Dataset]:
        """The validation set, if there is one, and the test set: every shard has them whole. Raises DataError."""
        path, parts = self.path(self._first), []
        try:
            parts = [map_dataset(path, self.manifest[part]) for part in ("validation", "test") if self.manifest[part]]
        except Damaged as error:
            raise DataError(f"{error}; {_WAY_OUT}") from error.__cause__
        return (parts[0] if len(parts) == 2 else None), parts[-1]


def _describes_a_shard(manifest: Manifest) -> bool:
    """Whether everything is there that is read of a manifest. What it says of files is checked with them."""
    try:
        train, test, source = manifest["train"], manifest["test"], manifest["source"]
        parts = [train, test, *([manifest["validation"]] if manifest["validation"] else [])]
        sizes = [train["classes"], manifest["shard"], *manifest["counts"]]
        pixels_of(train)
        for part in parts:
            sizes += part["images"]["shape"]
        texts = [manifest["name"], manifest["set"]]
        return (
            all(type(size) is int for size in sizes)
            and all(isinstance(text, str) for text in texts)
            and isinstance(manifest["fallback"], bool)
            and isinstance(manifest["samples"], dict)
            and {"seed", "validation", "limit"} <= source.keys()
        )
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError):
        return False
