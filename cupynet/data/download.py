"""Downloads files from mirrors. Files are renamed once they are complete and verified."""

from __future__ import annotations

import logging
import os
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from cupynet.core.wording import one_line
from cupynet.data.files import KnownFile

logger = logging.getLogger(__name__)


class Unavailable(Exception):
    """The files cannot be downloaded. The message is the reason."""


def fetch(files: Sequence[KnownFile], folder: Path, mirrors: Sequence[str], timeout_s: float) -> None:
    """Download missing files, each from the first of `mirrors` that has it, while other processes wait.

    A mirror that fails, or sends no data for `timeout_s` seconds, is not tried again.

    Raises Unavailable if a download fails. Complete files are kept.
    """
    mirrors = list(mirrors)
    lock = FileLock(folder / ".lock", fallback_to_soft=False)  # soft locks would outlive a killed process
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # without file locks, every process downloads
            lock.acquire()
            for part in folder.glob(".*.part"):
                part.unlink()  # left by a killed process
        for file in files:
            if not os.path.lexists(folder / file.name):
                _fetch(file, folder, mirrors, timeout_s)
    except OSError as error:
        raise Unavailable(one_line(error)) from error
    finally:
        lock.release()


def _fetch(file: KnownFile, folder: Path, mirrors: list[str], timeout_s: float) -> None:
    """Download a file from the first working mirror. Failed mirrors are removed from the list."""
    reason = "there is no mirror"
    while mirrors:
        url = mirrors[0] + file.name
        logger.info("downloading %s", url)
        try:
            return _download(url, file, folder, timeout_s)
        except Exception as error:  # urllib raises many types
            reason = f"{url}: {one_line(error)}"
            logger.info("%s", reason)
            if isinstance(error, urllib.error.HTTPError):
                error.close()  # the error keeps the connection open
            del mirrors[0]
    raise Unavailable(reason)


def _download(url: str, file: KnownFile, folder: Path, timeout_s: float) -> None:
    part = folder / f".{file.name}.{os.getpid()}.part"
    request = urllib.request.Request(url, headers={"User-Agent": "cupynet"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response, part.open("wb", 0) as target:
            while chunk := response.read1(1 << 16):
                target.write(chunk)
                if target.tell() > file.limit:
                    raise Unavailable(f"the file is larger than the limit of {file.limit} bytes")
            os.fsync(target.fileno())
        file.read(part)
        os.replace(part, folder / file.name)
    finally:
        part.unlink(missing_ok=True)
