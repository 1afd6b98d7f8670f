"""Fetching files from mirrors, so that a file under its final name is complete and correct, or is not there.

A file is streamed to `.<name>.<pid>.part` beside its place, checked, synced and renamed; a lock lets only one process
at a time do so. All of it together ends within a time limit, whatever the network does: a name lookup or a connection
attempt (one time-out per address!) cannot be interrupted, so connecting and reading run in a thread that may be
abandoned, while all writing is done by the caller.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from cupynet.data.lock import locked

logger = logging.getLogger(__name__)

NAME_TIMEOUT_S = 2.0  # no mirror's name resolved by then: there is no network
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 30.0
TRIES = 3
BACKOFF_S = 0.5  # doubled for each further try
MAX_BYTES = 12_000_000  # of one file, packed: the largest of MNIST has 9.9 MB
_CHUNK = 1 << 16

Opener: TypeAlias = Callable[[str, float], Any]  # (url, timeout_s) -> a response: read(n), headers, a context manager
Check: TypeAlias = Callable[[Path], object]  # raises if the file is not what it has to be


class Unavailable(Exception):
    """The files cannot be obtained here and now; the text says why."""


class _Useless(Exception):
    """A mirror does not have the file: asking it again will not help."""


def open_url(url: str, timeout_s: float) -> Any:
    """The response to a GET of `url`; `timeout_s` bounds each step on the socket."""
    request = urllib.request.Request(url, headers={"User-Agent": "cupynet"})
    return urllib.request.urlopen(request, timeout=timeout_s)


def fetch(
    checks: dict[str, Check], folder: Path, mirrors: Sequence[str], timeout_s: float, opener: Opener = open_url
) -> None:
    """Fetches the files named by `checks` into `folder` from the first of `mirrors` (URLs ending in /) that has them.

    A file that another process has fetched meanwhile is left as it is. Raises Unavailable after `timeout_s` seconds at
    the latest, for all files together; those that are complete by then stay.
    """
    deadline = time.monotonic() + timeout_s
    usable = _resolvable(list(mirrors), min(NAME_TIMEOUT_S, timeout_s))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, deadline) as alone:
            for part in [part for name in checks for part in folder.glob(f".{name}.*.part") if alone]:
                part.unlink(missing_ok=True)  # its writer is gone: it would hold the lock
            for name, check in checks.items():
                if not os.path.lexists(folder / name):
                    _fetch_one(name, check, folder, usable, deadline, opener)
    except TimeoutError as error:
        raise Unavailable(f"another process is still downloading into {folder}") from error
    except OSError as error:
        raise Unavailable(f"{folder} cannot be written ({error.strerror or error})") from error


def _fetch_one(name: str, check: Check, folder: Path, mirrors: list[str], deadline: float, opener: Opener) -> None:
    """Tries each mirror in turn, up to TRIES times; one that proves useless is removed from `mirrors` for good."""
    reason = "no mirror was tried"
    for attempt in range(TRIES):
        if attempt and mirrors:
            time.sleep(max(0.0, min(BACKOFF_S * 2 ** (attempt - 1), deadline - time.monotonic())))
        for mirror in tuple(mirrors):
            if time.monotonic() >= deadline:
                raise Unavailable(f"time ran out: {reason}")
            url = mirror + name
            logger.info("downloading %s", url)
            try:
                _download(url, folder / name, check, deadline, opener)
                return
            except (_Useless, ConnectionError, TimeoutError) as error:
                mirrors.remove(mirror)
                if not isinstance(error, _Useless):
                    mirrors.append(mirror)  # to be tried again, but not first
                reason = f"{url}: {' '.join(str(error).split())}"  # one line, whatever a server said
            logger.info("%s", reason)
    raise Unavailable(reason)


def _download(url: str, target: Path, check: Check, deadline: float, opener: Opener) -> None:
    """Streams `url` to a part file, checks it, and gives it the final name in one step."""
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            size = 0
            for chunk in _chunks(url, deadline, opener):
                size += len(chunk)
                if size > MAX_BYTES:
                    raise _Useless(f"it is larger than the {MAX_BYTES} bytes that are allowed")
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        try:
            check(part)
        except Exception as error:
            raise _Useless(f"wrong contents: {error}") from error
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _chunks(url: str, deadline: float, opener: Opener) -> Iterator[bytes]:
    """The body of `url` in pieces. Raises TimeoutError, ConnectionError (ask again) or _Useless (do not)."""
    pieces: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()  # b"" first: connected; b"" again: the end
    left = threading.Event()
    threading.Thread(target=_read, args=(url, opener, pieces, left), name="cupynet-download", daemon=True).start()
    limit_s, doing = CONNECT_TIMEOUT_S, "connecting"
    try:
        while True:
            wait_s = min(limit_s, max(0.0, deadline - time.monotonic()))
            try:
                piece = pieces.get(timeout=wait_s)
            except queue.Empty:
                raise TimeoutError(f"no answer within {wait_s:.3g} s of {doing}") from None
            if isinstance(piece, Exception):
                raise _sorted_out(piece) from piece
            if doing == "connecting":
                limit_s, doing = READ_TIMEOUT_S, "reading"
            elif piece:
                yield piece
            else:
                return
    finally:
        left.set()


def _read(url: str, opener: Opener, pieces: queue.SimpleQueue[bytes | Exception], left: threading.Event) -> None:
    """The thread of `_chunks`: writes no file; once abandoned, it ends at its next chunk or time-out."""
    try:
        with opener(url, 2 * READ_TIMEOUT_S) as response:  # the reader of `pieces` gives up first, in its own words
            pieces.put(b"")
            promised, size = response.headers.get("Content-Length"), 0
            while not left.is_set() and size <= MAX_BYTES and (chunk := response.read(_CHUNK)):
                size += len(chunk)
                pieces.put(chunk)
            if promised is not None and size < int(promised):  # http.client does not tell when it reads in pieces
                raise ConnectionError(f"the connection ended after {size} of {promised} bytes")
        pieces.put(b"")
    except Exception as error:
        pieces.put(error)


def _sorted_out(error: Exception) -> Exception:
    """`error` as one that is worth another try (ConnectionError, TimeoutError) or is not (_Useless)."""
    if isinstance(error, urllib.error.HTTPError):
        text = f"HTTP status {error.code} ({error.reason})"
        return ConnectionError(text) if error.code >= 500 or error.code in (408, 429) else _Useless(text)
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, socket.gaierror):
        return _Useless(f"its name cannot be resolved ({reason.strerror or reason})")
    if isinstance(reason, OSError):
        return ConnectionError(str(reason.strerror or reason))
    return ConnectionError(f"{type(error).__name__}: {error}")  # a malformed answer, http.client.HTTPException


def _resolvable(mirrors: list[str], timeout_s: float) -> list[str]:
    """The mirrors whose names resolve, if any does within `timeout_s`; those not known yet by then are kept.

    A machine without a network is recognised at once, one whose packets vanish within `timeout_s`. Behind a proxy,
    names are the proxy's business. Raises Unavailable.
    """
    answers: queue.SimpleQueue[tuple[str, OSError | None]] = queue.SimpleQueue()

    def resolve(mirror: str, host: str, port: int) -> None:
        try:
            socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            answers.put((mirror, error if isinstance(error, OSError) else OSError(str(error))))
        else:
            answers.put((mirror, None))

    proxies = urllib.request.getproxies()
    for mirror in mirrors:
        url = urllib.parse.urlsplit(mirror)
        host = url.hostname or ""
        if url.scheme in proxies and not urllib.request.proxy_bypass(host):
            answers.put((mirror, None))
            continue
        port = url.port or (443 if url.scheme == "https" else 80)
        threading.Thread(target=resolve, args=(mirror, host, port), name="cupynet-resolve", daemon=True).start()

    end, reason, left = time.monotonic() + timeout_s, f"no answer within {timeout_s:.3g} s", list(mirrors)
    for _ in mirrors:
        try:
            mirror, error = answers.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            break
        if error is None:
            return left
        left.remove(mirror)
        reason = str(error.strerror or error)
    raise Unavailable(f"no network: none of its mirrors' names can be resolved ({reason})")
