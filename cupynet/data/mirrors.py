"""What mirrors are asked, and what they answer.

A name lookup or a connection attempt (one time-out per address!) cannot be interrupted, so connecting and reading run
in a thread that may be abandoned, and how long they are waited for is decided here. Nothing is opened but the URLs of
the mirrors: redirects are not followed.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeAlias

NAME_TIMEOUT_S = 2.0  # no mirror's name resolved by then: there is no network
MIRROR_S = 10.0  # without a byte from a mirror; then another is asked
_CHUNK = 1 << 16


class Opener(Protocol):
    """Asks for a URL."""

    def __call__(self, url: str, start: int, timeout_s: float, /) -> Any:
        """The response to a GET of `url`, from byte `start` on: status, headers, read1(n), a context manager."""


class Useless(Exception):
    """A mirror does not have the file: asking it again will not help."""


class Unfit(ConnectionError):
    """What came before is not the beginning of what a mirror has: it has to be asked for all of it."""


class Patience:
    """How long may still be waited in vain: of a try that failed, the time since its last byte; and between tries."""

    def __init__(self, limit_s: float, mirrors: int) -> None:
        self.limit_s = self.left_s = limit_s
        self.each_s = min(MIRROR_S, limit_s / max(1, mirrors))  # of one try: all mirrors are to be asked

    def pause(self, seconds: float) -> None:
        """Wait before another try."""
        pause_s = max(0.0, min(seconds, self.left_s))
        time.sleep(pause_s)
        self.left_s -= pause_s


def open_url(url: str, start: int, timeout_s: float) -> Any:
    """The response to a GET of `url`, from byte `start` on; `timeout_s` bounds each step on the socket."""
    opener = urllib.request.OpenerDirector()  # of urllib's handlers, those for the web; that for redirects is left out
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    headers = {"User-Agent": "cupynet"} | ({"Range": f"bytes={start}-"} if start else {})
    return opener.open(urllib.request.Request(url, headers=headers), timeout=timeout_s)


def pieces(url: str, start: int, most: int, patience: Patience, opener: Opener) -> Generator[Any, None, None]:
    """At which byte a mirror begins, `start` or 0; and then the body of `url` from there on, in pieces (bytes).

    Of a file of more than `most` bytes not many more come. Raises TimeoutError, ConnectionError (ask again) or Useless
    (do not).
    """
    answers: _Answers = queue.SimpleQueue()
    left = threading.Event()
    arguments = (url, start, most, opener, answers, left)
    threading.Thread(target=_read, args=arguments, name="cupynet-download", daemon=True).start()
    doing = "connecting"
    try:
        while True:
            since, wait_s = time.monotonic(), max(0.0, min(patience.each_s, patience.left_s))
            try:
                answer = answers.get(timeout=wait_s)
                if isinstance(answer, Exception):
                    raise _sorted_out(answer) from answer
            except queue.Empty:
                patience.left_s -= wait_s
                raise TimeoutError(f"no answer within {wait_s:.3g} s of {doing}") from None
            except Exception:
                patience.left_s -= time.monotonic() - since
                raise
            if answer == b"":
                return
            doing = "reading"
            yield answer
    finally:
        left.set()


_Answers: TypeAlias = (
    "queue.SimpleQueue[int | bytes | Exception]"  # as `pieces` yields them; b"" at the end, or an error
)


def _read(url: str, start: int, most: int, opener: Opener, answers: _Answers, left: threading.Event) -> None:
    """The thread of `pieces`: writes no file; once abandoned, it ends at its next piece or time-out."""
    try:
        with opener(url, start, 2 * MIRROR_S) as response:  # who waits gives up first, in words of our own
            first = _first_byte(response, start)
            answers.put(first)
            promised, size = response.headers.get("Content-Length"), 0
            # what is there now, not as much as fits: a slow mirror is no silent one
            while not left.is_set() and first + size <= most and (chunk := response.read1(_CHUNK)):
                size += len(chunk)
                answers.put(chunk)
            if promised is not None and size < int(promised):  # http.client does not tell when it reads in pieces
                raise ConnectionError(f"the connection ended after {size} of {promised} bytes")
        answers.put(b"")
    except Exception as error:
        if isinstance(error, urllib.error.HTTPError):  # it is the response too, and holds the connection
            error.close()
        answers.put(error)


def _first_byte(response: Any, start: int) -> int:
    """At which byte of the file the answer begins, which was asked to begin at `start`: there, or at the beginning."""
    if response.status != 206:
        return 0
    part = response.headers.get("Content-Range", "")
    if not start or not part.startswith(f"bytes {start}-"):
        raise Unfit(f"expected the bytes from {start} on, got {part or 'others'}")
    return start


def _sorted_out(error: Exception) -> Exception:
    """`error` as one that is worth another try (ConnectionError, TimeoutError) or is not (Useless)."""
    if isinstance(error, Unfit):
        return error
    if isinstance(error, urllib.error.HTTPError):
        text = f"HTTP status {error.code} ({error.reason})"
        if error.code == 416:
            return Unfit(text)  # it has no more than what came before
        if 300 <= error.code < 400:
            return Useless(f"{text}: it redirects to another place, which is not followed")
        return ConnectionError(text) if error.code >= 500 or error.code in (408, 429) else Useless(text)
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, socket.gaierror):
        return Useless(f"its name cannot be resolved ({reason.strerror or reason})")
    if isinstance(reason, OSError):
        return ConnectionError(str(reason.strerror or reason))
    return ConnectionError(f"{type(error).__name__}: {error}")  # a malformed answer, http.client.HTTPException


def resolvable(mirrors: Sequence[str], timeout_s: float) -> list[str]:
    """The mirrors whose names resolve, if any does in time (`timeout_s` at most); those not known yet by then are kept.

    A machine without a network is recognised at once, one whose packets vanish within NAME_TIMEOUT_S. Behind a proxy,
    names are the proxy's business. Raises Useless.
    """
    timeout_s = min(NAME_TIMEOUT_S, timeout_s)
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
    raise Useless(f"no network: none of its mirrors' names can be resolved ({reason})")
