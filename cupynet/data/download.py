"""Downloads from mirrors: a file under its final name is complete and correct, or it is not there.

A slow download may take any time. Only the time without any data is limited, summed over all files and mirrors.
Redirects are not followed, so only the URLs of the mirrors are ever opened.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from cupynet.core.checks import one_line

logger = logging.getLogger(__name__)

MIRROR_S = 10.0  # of silence, before the next mirror is tried


class Unavailable(Exception):
    """The files cannot be obtained here and now; the text says why."""


class _Failed(Exception):
    """A mirror has not delivered a file; the message says why."""


class KnownFile(Protocol):
    """A file with known contents."""

    @property
    def name(self) -> str:
        """The name in the folder and on the mirrors."""

    @property
    def most_packed(self) -> int:
        """An upper bound of its size in bytes."""

    def read(self, path: Path) -> bytes:
        """Return the contents of `path`. Raises an exception if they are not as expected."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Follow none: urllib then raises the answer as an HTTPError."""


class Downloader:
    """Downloads files into `folder`, each from the first of `mirrors` that has it; `timeout_s` limits silence in all.

    One process downloads while others wait.
    """

    def __init__(self, folder: Path, mirrors: Sequence[str], timeout_s: float) -> None:
        self.folder, self.mirrors, self.timeout_s = folder, list(mirrors), timeout_s
        self._left_s, self._each_s = timeout_s, min(MIRROR_S, timeout_s / max(1, len(mirrors)))

    def fetch(self, files: Sequence[KnownFile]) -> None:
        """Download the files that are not there. Raises Unavailable; files that are complete by then stay."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._turn():
                for file in files:
                    if not os.path.lexists(self.folder / file.name):
                        self._fetch_one(file)
        except OSError as error:
            raise Unavailable(f"{self.folder} cannot be written ({error.strerror or error})") from error

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Wait for another process that downloads into the folder, as long as its files grow."""
        lock = FileLock(self.folder / ".lock", fallback_to_soft=False)  # soft locks outlive a killed process
        size, since = -1, time.monotonic()
        while not lock.is_locked:
            try:
                lock.acquire(timeout=0.1)
            except Timeout:
                grown = sum(part.stat().st_size for part in self.folder.glob(".*.part") if part.exists())
                if grown != size:
                    size, since = grown, time.monotonic()
                elif time.monotonic() - since >= self.timeout_s:
                    raise Unavailable(f"another process is still downloading into {self.folder}") from None
            except OSError:  # the file system has no locks: every process downloads for itself
                break
        try:
            self._left_s -= time.monotonic() - since
            for part in self.folder.glob(".*.part") if lock.is_locked else ():
                part.unlink()  # of a process that was killed
            yield
        finally:
            lock.release()

    def _fetch_one(self, file: KnownFile) -> None:
        """Download a file from the first mirror that has it. A mirror that fails is not tried again."""
        reason = "there is no mirror"
        while self.mirrors:
            if self._left_s <= 0:
                raise Unavailable(f"{self.timeout_s:.3g} s passed without any data: {reason}")
            url = self.mirrors[0] + file.name
            logger.info("downloading %s", url)
            try:
                return self._download(url, file)
            except _Failed as error:
                reason = f"{url}: {error}"
                logger.info("%s", reason)
                del self.mirrors[0]
        raise Unavailable(reason)

    def _download(self, url: str, file: KnownFile) -> None:
        """Write the file next to its place, check it, and rename it."""
        part = self.folder / f".{file.name}.{os.getpid()}.part"
        try:
            with part.open("wb") as target:
                for chunk in self._body(url):
                    target.write(chunk)
                    if target.tell() > file.most_packed:
                        raise _Failed(f"it is larger than the allowed {file.most_packed} bytes")
                target.flush()
                os.fsync(target.fileno())
            try:
                file.read(part)
            except Exception as error:
                raise _Failed(f"wrong contents: {error}") from error
            os.replace(part, self.folder / file.name)
        finally:
            part.unlink(missing_ok=True)

    def _body(self, url: str) -> Iterator[bytes]:
        """Yield the bytes of `url`. A thread reads them: a name lookup cannot be interrupted, only abandoned."""
        answers: queue.Queue[bytes | Exception] = queue.Queue(maxsize=16)
        threading.Thread(target=_read, args=(url, answers), name="cupynet-download", daemon=True).start()
        while True:
            began, wait_s = time.monotonic(), max(0.0, min(self._each_s, self._left_s))
            try:
                answer = answers.get(timeout=wait_s)
            except queue.Empty:
                answer = TimeoutError(f"no answer within {wait_s:.3g} s")
            if isinstance(answer, Exception):
                self._left_s -= time.monotonic() - began
                reason = getattr(getattr(answer, "reason", None), "strerror", None)  # of urllib's errors
                raise _Failed(one_line(reason or answer)) from answer
            if not answer:
                return
            yield answer


def _read(url: str, answers: queue.Queue[bytes | Exception]) -> None:
    """Put the bytes of `url` into the queue, then b"" or the error."""
    last: bytes | Exception = b""
    request = urllib.request.Request(url, headers={"User-Agent": "cupynet"})
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=2 * MIRROR_S) as response:
            promised, size = int(response.headers.get("Content-Length", 0)), 0
            while chunk := response.read1(1 << 16):
                size += len(chunk)
                answers.put(chunk, timeout=2 * MIRROR_S)
            if size < promised:
                raise ConnectionError(f"the connection ended after {size} of {promised} bytes")
    except queue.Full:  # this thread was abandoned
        return
    except Exception as error:
        last = error
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is the response too, and holds the connection
    answers.put(last)
