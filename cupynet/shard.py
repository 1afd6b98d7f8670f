"""Cut a training set into shards: `python -m cupynet.shard data=mnist shards=4 to=FOLDER`.

Each worker then needs only its own, so that the data may exceed one machine: copy FOLDER, or of it the one shard of the
worker, to a folder of the same name there, and train with as many workers.
"""

from __future__ import annotations

import logging
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cupynet import config, resume
from cupynet.errors import ConfigError
from cupynet.settings import ShardSettings

if TYPE_CHECKING:
    from cupynet.data import Source

log = logging.getLogger(__name__)


def main() -> None:
    """The command."""
    config.run(shard, prepare, "shard", ShardSettings)


@dataclass(frozen=True)
class Cut:
    """What is cut, into how many shards, and where they go."""

    source: Source
    shards: int
    folder: Path


def prepare(settings: ShardSettings) -> Cut:
    """Refuse what cannot work, before anything is loaded; ConfigError."""
    from cupynet.data import Source, check_target
    from cupynet.parts import build_as

    assert settings.shards is not None and settings.to is not None
    source = build_as(Source, settings.data, "data", settings.trusted_modules)  # type: ignore[type-abstract]
    if source.storage == "sharded":
        raise ConfigError(
            "data: these are shards already: cut the whole data set, with data.storage=shared data.shards=null"
        )
    try:
        return Cut(source, settings.shards, check_target(settings.to))
    except ConfigError as error:
        raise ConfigError(f"to={error}") from error


def shard(cut: Cut, folder: Path) -> None:
    """Load, cut and write, and tell how to train on it. folder: of this command's log and settings."""
    from cupynet.data import write_shards

    source = cut.source
    data = source.load()
    data.check(source.image_shape, source.classes)
    seed = getattr(source, "seed", 12345)  # a source of one's own need not have one, nor a limit
    written = write_shards(data, cut.folder, cut.shards, seed, getattr(source, "limit", None))
    for number, count in enumerate(written.counts):
        log.info("%s: %d of %d training images", written.path(number), count, len(written))
    kept = f"{len(data.test)} test images" + (f" and {len(data.validation)} to choose by" if data.validation else "")
    log.info("each has all %s; to train on them:", kept)
    log.info("%s", command(folder, cut, fallback=data.fallback))


def command(folder: Path, cut: Cut, *, fallback: bool) -> str:
    """The command line that trains on what was cut. folder: of the settings it was cut with; fallback: other data."""
    own = ["workers", "data.storage", "data.shards", *(["data.fallback"] if fallback else [])]
    same = config.arguments_of(folder, ShardSettings, *own)
    where = str(cut.folder) if re.fullmatch(r"[\w./-]+", str(cut.folder)) else resume.quoted(cut.folder)
    words = [*same, f"workers={cut.shards}", "data.storage=sharded", f"data.shards={where}"]
    words += ["data.fallback=synthetic"] if fallback else []
    return shlex.join(["python", "-m", "cupynet.train", *words])


if __name__ == "__main__":
    main()
