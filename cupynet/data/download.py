"""Downloads files from mirrors. Files are renamed once they are complete and verified."""

from __future__ import annotations

import logging
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from filelock import FileLock

from cupynet.core.wording import one_line
from cupynet.data.files import KnownFile

logger = logging.getLogger(__name__)

WATCH_S = 0.1  # polling interval
MIRROR_S = 10.0  # seconds without data before the next mirror is tried


class Unavailable(Exception):
    """The files cannot be downloaded. The message is the reason."""


def fetch(files: Sequence[KnownFile], folder: Path, mirrors: Sequence[str], timeout_s: float) -> None:
    """Download missing files, each from the first of `mirrors` that has it, while other processes wait.

    Raises Unavailable if a download fails, or if no process receives data for `timeout_s`. Complete files are kept.
    """
    download = _Download(files, folder, mirrors, min(MIRROR_S, timeout_s / (len(mirrors) + 1)))
    download.start()
    size, since = -1, time.monotonic()
    try:
        while download.is_alive():
            download.join(WATCH_S)
            if (found := _size(folder)) != size:
                size, since = found, time.monotonic()
            elif download.is_alive() and time.monotonic() - since > timeout_s:
                raise Unavailable(f"no data arrived for {timeout_s:.3g} s, here or in another process")
    finally:
        download.given_up.set()
    if download.error is not None:
        raise Unavailable(one_line(download.error)) from download.error


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.iterdir())
    except OSError:  # a file was renamed concurrently
        return -1


class _Download(threading.Thread):
    """Downloads files in a thread, because DNS lookups cannot be interrupted."""

    def __init__(self, files: Sequence[KnownFile], folder: Path, mirrors: Sequence[str], silence_s: float) -> None:
        super().__init__(name="cupynet-download", daemon=True)
        self.files, self.folder, self.mirrors, self.silence_s = files, folder, list(mirrors), silence_s
        self.given_up = threading.Event()
        self.error: Exception | None = None

    def run(self) -> None:
        lock = FileLock(self.folder / ".lock", fallback_to_soft=False)  # soft locks would outlive a killed process
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with suppress(OSError):  # without file locks, every process downloads
                lock.acquire()
                for part in self.folder.glob(".*.part"):
                    part.unlink()  # left by a killed process
            for file in self.files:
                if not os.path.lexists(self.folder / file.name):
                    self._fetch(file)
        except Exception as error:
            self.error = error
        finally:
            lock.release()

    def _fetch(self, file: KnownFile) -> None:
        """Download a file from the first working mirror. Failed mirrors are not tried again."""
        reason = "there is no mirror"
        while self.mirrors and not self.given_up.is_set():
            url = self.mirrors[0] + file.name
            logger.info("downloading %s", url)
            try:
                return self._download(url, file)
            except Exception as error:  # urllib raises many types
                reason = f"{url}: {error}"
                logger.info("%s", reason)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()  # the error keeps the connection open
                del self.mirrors[0]
        raise Unavailable(reason)

    def _download(self, url: str, file: KnownFile) -> None:
        part = self.folder / f".{file.name}.{os.getpid()}.part"
        request = urllib.request.Request(url, headers={"User-Agent": "cupynet"})
        try:
            with urllib.request.urlopen(request, timeout=self.silence_s) as response, part.open("wb", 0) as target:
                while chunk := response.read1(1 << 16):
                    target.write(chunk)
                    if target.tell() > file.limit:
                        raise Unavailable(f"the file is larger than the limit of {file.limit} bytes")
                    if self.given_up.is_set():
                        raise Unavailable("the download was canceled")
                os.fsync(target.fileno())
            file.read(part)
            os.replace(part, self.folder / file.name)
        finally:
            part.unlink(missing_ok=True)
