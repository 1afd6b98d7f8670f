"""What a source has loaded, kept on disk, so that the processes of one machine share one copy in memory.

Where every worker is a process, each would decode the files and hold the images for itself. Instead the first one to
come writes what it has loaded as NumPy files, and all of them map those. The cache may be missing, damaged, read-only
or full: that is told, and the data are loaded as if there were none.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
from pathlib import Path

import platformdirs

from cupynet.data.idx import Damaged
from cupynet.data.shards import Shards
from cupynet.data.source import Data, Source
from cupynet.data.stored import MANIFEST, map_dataset, read_manifest, write_dataset, write_manifest
from cupynet.errors import OutputError
from cupynet.lock import locked

logger = logging.getLogger(__name__)

FORMAT = "cupynet data 1"
KEPT = 4  # data sets; those used last
WAIT_S = 120.0  # for another process that loads the same, before this one does so for itself
PARTS = ("train", "validation", "test")


def cache_folder() -> Path:
    """Where loaded data are kept: beside the files that a download leaves in the user's cache folder."""
    return platformdirs.user_cache_path("cupynet") / "decoded"


def load_mapped(source: Source, first: bool = True) -> Data:
    """What `source.load()` returns, in files that are mapped read-only; by many processes at once.

    Shards are mapped in any case; a source without a fingerprint, and data in place of those asked for, are not kept.
    Raises what `load` raises.

    first: whether this is the process of its machine that warns where there can be no cache; the others meet the same.
    """
    fingerprint = source.fingerprint() if _speaks_for_load(type(source)) else None
    if fingerprint is None or source.storage == "sharded":
        return source.load()
    place = cache_folder() / hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
    with contextlib.suppress(Damaged):  # or not there; in its turn it is seen to
        return _mapped(place)
    data: Data | None = None
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with locked(place.parent, WAIT_S) as alone:
            if place.exists():
                try:
                    return _mapped(place)  # another process has written it meanwhile
                except Damaged as error:
                    logger.warning("%s; it is written again", error)
            data = source.load()
            if data.fallback:
                return data
            _keep(data, place, alone)
            return _mapped(place)
    except (OSError, OutputError, Damaged) as error:
        reason = " ".join(str(error).split())
        level = logging.WARNING if first else logging.INFO
        logger.log(level, "the data are held in memory by each process, and not kept in %s: %s", place.parent, reason)
    return source.load() if data is None else data


def _speaks_for_load(kind: type[Source]) -> bool:
    """Whether the fingerprint is that of the class whose `load` is called, not of one that it was derived from."""
    classes = kind.__mro__
    defines = {
        name: next(n for n, each in enumerate(classes) if name in vars(each)) for name in ("fingerprint", "load")
    }
    return defines["fingerprint"] <= defines["load"]


def _mapped(place: Path) -> Data:
    """What lies there. Raises Damaged."""
    about = read_manifest(place, FORMAT)
    if not {"name", *PARTS} <= about.keys():
        raise Damaged(f"{place / MANIFEST}: does not describe a data set")
    train, test = map_dataset(place, about["train"]), map_dataset(place, about["test"])
    validation = None if about["validation"] is None else map_dataset(place, about["validation"])
    with contextlib.suppress(OSError):  # it may belong to somebody else
        os.utime(place / MANIFEST)  # when it was used last
    return Data(about["name"], train, validation, test)


def _keep(data: Data, place: Path, alone: bool) -> None:
    """Write the data, whole or not at all; then forget those that were not used for longest.

    alone: whether no other process can be writing here. Raises OSError, OutputError.
    """
    assert not isinstance(data.train, Shards)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    for left in place.parent.glob(".*.part") if alone else ():
        shutil.rmtree(left, ignore_errors=True)  # of a process that died
    try:
        part.mkdir()
        sets = {"train": data.train, "validation": data.validation, "test": data.test}
        entries = {name: each and write_dataset(part, name, each) for name, each in sets.items()}
        write_manifest(part, {"format": FORMAT, "name": data.name, **entries})
        if place.exists():
            shutil.rmtree(place)  # damaged; whoever has mapped it keeps it
        try:
            part.rename(place)
        except OSError:
            if not place.exists():  # without locks another process may have been faster
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in sorted(place.parent.glob(f"[!.]*/{MANIFEST}"), key=_used, reverse=True)[KEPT:]:
        shutil.rmtree(old.parent, ignore_errors=True)


def _used(manifest: Path) -> float:
    try:
        return manifest.stat().st_mtime
    except OSError:  # another process has just forgotten it
        return 0.0
