"""Fetching files from mirrors, so that a file under its final name is complete and correct, or is not there.

A file is streamed to `.<name>.part` beside its place, checked, synced and renamed; a lock lets only one process at a
time do so. A part stays where a download breaks off: the next try, of any mirror, goes on from there, and whether it
fits is told by the check of the whole. How long a download takes is the network's business, but nobody waits for one
that has stopped: what is waited in vain is counted over all files, mirrors and tries.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from cupynet.data.mirrors import Opener, Patience, Unfit, Useless, open_url, pieces, resolvable
from cupynet.lock import locked

logger = logging.getLogger(__name__)

TRIES = 3
BACKOFF_S = 0.5  # doubled for each further try
TOLD_S = 10.0  # between two lines about a file that is still coming
JUST_NOW_S = 60.0  # for so long a process believes another that has tried in vain
MAX_BYTES = 12_000_000  # of one file of which nothing else is said
_STARTED = time.time()  # this process
_IN_VAIN = ".unavailable"  # beside the files: which process was the last to try in vain, and why

Check: TypeAlias = Callable[[Path], object]  # raises if the file is not what it has to be


class Unavailable(Exception):
    """The files cannot be obtained here and now; the text says why."""


def fetch(
    checks: dict[str, Check],
    folder: Path,
    mirrors: Sequence[str],
    timeout_s: float,
    opener: Opener = open_url,
    most: Mapping[str, int] | None = None,
) -> None:
    """Fetches the files named by `checks` into `folder` from the first of `mirrors` (URLs ending in /) that has them.

    A file that another process has fetched meanwhile is left as it is; while another fetches, it is waited for.

    timeout_s: in which nothing comes, for all files, mirrors and tries together. Bytes that come may come slowly.
    most: bytes of a file, by its name; `MAX_BYTES` of one that is not named.

    Raises Unavailable. What is complete by then stays, and so does the beginning of what is not.
    """
    patience = Patience(timeout_s, len(mirrors))
    try:
        usable = resolvable(mirrors, timeout_s)
    except Useless as error:
        raise Unavailable(str(error)) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, timeout_s, lambda: _sizes(checks, folder)) as alone:
            missing = {name: check for name, check in checks.items() if not os.path.lexists(folder / name)}
            if missing:
                _ask_others(folder)
            for part in [part for name in missing for part in folder.glob(f".{name}.*.part") if alone]:
                part.unlink(missing_ok=True)  # of a process that died where there were no locks
            try:
                for name, check in missing.items():
                    part = folder / (f".{name}.part" if alone else f".{name}.{os.getpid()}.part")
                    try:
                        _fetch_one(
                            check, folder / name, part, usable, patience, opener, (most or {}).get(name, MAX_BYTES)
                        )
                    finally:
                        if not alone:
                            part.unlink(missing_ok=True)
            except Unavailable as error:
                with contextlib.suppress(OSError):
                    (folder / _IN_VAIN).write_text(f"{os.getpid()} {error}", encoding="utf-8")
                raise
            (folder / _IN_VAIN).unlink(missing_ok=True)
    except TimeoutError as error:
        raise Unavailable(f"another process is still downloading into {folder}") from error
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written ({error.strerror or error})") from error


def _sizes(names: Iterable[str], folder: Path) -> list[int]:
    """By which another process's progress is told: what there is of each file."""
    sizes = []
    for name in names:
        try:
            sizes.append((folder / f".{name}.part").stat().st_size)
        except OSError:  # complete, or not begun
            sizes.append(-1)
    return sizes


def _ask_others(folder: Path) -> None:
    """Raises Unavailable where another process has tried in vain just now, while this one was waiting for its turn.

    Else the processes of a job would one after the other wait for the same mirrors.
    """
    with contextlib.suppress(OSError, ValueError):
        note = folder / _IN_VAIN
        when, (pid, reason) = note.stat().st_mtime, note.read_text(encoding="utf-8").split(" ", 1)
        if int(pid) != os.getpid() and when >= _STARTED and abs(time.time() - when) < JUST_NOW_S:
            raise Unavailable(f"as another process has just found: {reason}")


def _fetch_one(
    check: Check, target: Path, part: Path, mirrors: list[str], patience: Patience, opener: Opener, most: int
) -> None:
    """Tries each mirror in turn, up to TRIES times; one that proves useless is removed from `mirrors` for good."""
    reason = "no mirror was tried"
    for attempt in range(TRIES):
        if attempt and mirrors:
            patience.pause(BACKOFF_S * 2 ** (attempt - 1))
        for mirror in tuple(mirrors):
            if patience.left_s <= 0:
                raise Unavailable(f"{patience.limit_s:.3g} s were waited in vain: {reason}")
            url = mirror + target.name
            logger.info("downloading %s", url)
            try:
                _download(url, target, part, check, patience, opener, most)
                return
            except (Useless, ConnectionError, TimeoutError) as error:
                mirrors.remove(mirror)
                if not isinstance(error, Useless):
                    mirrors.append(mirror)  # to be tried again, but not first
                reason = f"{url}: {' '.join(str(error).split())}"  # one line, whatever a server said
            logger.info("%s", reason)
    raise Unavailable(reason)


def _download(url: str, target: Path, part: Path, check: Check, patience: Patience, opener: Opener, most: int) -> None:
    """Streams to the part what it lacks of `url`, checks it, and gives it the final name in one step.

    The part is left as it is where the mirror breaks off, or is told to stop; it is removed where it is of no use.
    """
    try:
        before = _stream(url, part, patience, opener, most)
        try:
            check(part)
        except Exception as error:
            if before:
                raise Unfit(f"wrong contents, of which {before} bytes had come before: {error}") from error
            raise Useless(f"wrong contents: {error}") from error
        os.replace(part, target)
    except (Useless, Unfit):
        part.unlink(missing_ok=True)
        raise
    except (ConnectionError, TimeoutError):
        if not part.stat().st_size:
            part.unlink()
        raise
    except OSError:  # a full disk
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def _stream(url: str, part: Path, patience: Patience, opener: Opener, most: int) -> int:
    """Appends to the part what it lacks; the number of bytes of it that were there before."""
    with part.open("ab") as file:
        before = file.tell() if file.tell() < most else 0
        with contextlib.closing(pieces(url, before, most, patience, opener)) as stream:
            before = int(next(stream))
            if not before:  # the mirror begins at the beginning
                file.truncate(0)
            size, told = before, time.monotonic()
            for piece in stream:
                size += len(piece)
                if size > most:
                    raise Useless(f"it is larger than the {most} bytes that are allowed")
                file.write(piece)
                if time.monotonic() > told + TOLD_S:
                    logger.info("%.1f MB of %s so far", size / 1e6, part.name[1:].removesuffix(".part"))
                    told = time.monotonic()
        file.flush()
        os.fsync(file.fileno())
    return before
