"""Cutting a training set into shards (see `shards` for what is written)."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from cupynet import checks
from cupynet.backend.array import Array
from cupynet.data.dataset import SHARD_STREAM, philox
from cupynet.data.shards import FORMAT, NAME, Shards, shard_name
from cupynet.data.source import Data
from cupynet.data.stored import MANIFEST, Manifest, digest, write_array, write_dataset, write_manifest
from cupynet.errors import ConfigError, OutputError

_FILES = {
    MANIFEST,
    "samples.npy",
    *(f"{part}{what}.npy" for part in ("", "validation-", "test-") for what in ("images", "labels")),
}


def check_target(folder: str | os.PathLike[str]) -> Path:
    """The folder that shards are to be written to, where that does no harm.

    It is not there, or empty, or holds shards and nothing else: those are replaced. Raises ConfigError.
    """
    path = Path(folder).expanduser()
    if not path.exists():
        return path
    if not path.is_dir():
        raise ConfigError(f"{path}: is a file: name a folder that is not there yet")
    try:
        strange = next((inside for inside in sorted(path.iterdir()) if not _is_shard(inside)), None)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): name another folder") from error
    if strange is not None:
        raise ConfigError(f"{path}: has {strange.name} in it, which is no shard: name an empty or a new folder")
    return path


def _is_shard(path: Path) -> bool:
    """Whether this is the folder of a shard and holds nothing else, a file that was not finished apart."""
    return (
        NAME.fullmatch(path.name) is not None
        and path.is_dir()
        and all(inside.name in _FILES or _unfinished(inside) for inside in path.iterdir())
    )


def _unfinished(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(".part")


def write_shards(
    data: Data, folder: str | os.PathLike[str], shards: int, seed: int = 12345, limit: int | None = None
) -> Shards:
    """Cut the training set of `data` into so many shards and write them to `folder`; the same bytes every time.

    Which samples a shard has follows from `seed`: a random share of all, so that each is like the whole. The shares
    differ by one sample at most. Each shard has the test and the validation set, too.

    Args:
        data: what a source has loaded, `fallback` or not.
        folder: new or empty; or one with shards only, which are replaced.
        shards: how many, at least 1 and at most as many as there are training images.
        seed: of the source.
        limit: of the source; it is remembered, so that nobody takes these shards for all of the data.

    Raises:
        ConfigError: an argument cannot work; OutputError: the folder cannot be written.
    """
    shards, train = checks.integer("shards", shards, 1), data.train
    if isinstance(train, Shards):
        raise ConfigError(f"{train.folder}: these are shards already: cut the whole data set")
    if shards > len(train):
        raise ConfigError(f"shards={shards}: must be at most {len(train)}, the training images of {data.name!r}")
    path, order = check_target(folder), philox(checks.seed("seed", seed), SHARD_STREAM).permutation(len(train))
    shares = [np.sort(share) for share in np.array_split(order.astype(np.int64, copy=False), shards)]
    try:
        _remove_shards(path)
        folders = [path / shard_name(number, shards) for number in range(shards)]
        for each in folders:
            each.mkdir(parents=True)
        parts = [_write_arrays(data, each, share) for each, share in zip(folders, shares, strict=True)]
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error})") from error
    about: Manifest = {
        **{"format": FORMAT, "name": data.name, "fallback": data.fallback, "counts": [len(share) for share in shares]},
        "source": {"seed": seed, "validation": 0 if data.validation is None else len(data.validation), "limit": limit},
    }
    about["set"] = digest([about, parts])
    for number, (each, part) in enumerate(zip(folders, parts, strict=True)):
        write_manifest(each, {**about, "shard": number, **part})
    return Shards(path)


def _write_arrays(data: Data, folder: Path, share: Array) -> Manifest:
    """The files of one shard but its manifest; what that says of them."""
    assert not isinstance(data.train, Shards)
    validation = data.validation
    return {
        "train": write_dataset(folder, "train", data.train, share),
        "samples": write_array(folder / "samples.npy", share),
        "validation": None if validation is None else write_dataset(folder, "validation", validation),
        "test": write_dataset(folder, "test", data.test),
    }


def _remove_shards(path: Path) -> None:
    """Remove the shards in `path`, manifests first: what is left of a shard without one is no shard."""
    folders = sorted(path.iterdir()) if path.exists() else []
    for each in folders:
        (each / MANIFEST).unlink(missing_ok=True)
    for each in folders:
        for file in each.iterdir():
            file.unlink()
        each.rmdir()
