"""Downloads from a local server that fails as networks do: a file under its final name is always correct."""

from __future__ import annotations

import errno
import hashlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from cupynet.data import download
from cupynet.data.download import Unavailable, fetch
from cupynet.data.files import KnownFile
from tests.support.mirrors import Mirror, Reply

NAME, GOOD = "digits.gz", b"the right bytes" * 10_000


def good(name: str = NAME) -> KnownFile:
    """Return a file that must have the contents `GOOD`."""
    return KnownFile(name, hashlib.sha256(GOOD).hexdigest(), len(GOOD))


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def get(folder: Path, *mirrors: str, timeout_s: float = 10.0, names: Any = (NAME,)) -> None:
    fetch([good(name) for name in names], folder, mirrors, timeout_s)
    assert left_in(folder) == sorted(names) and all((folder / name).read_bytes() == GOOD for name in names)


def refused(folder: Path, *mirrors: str, **options: Any) -> str:
    """The reason; nothing is left behind."""
    with pytest.raises(Unavailable) as caught:
        get(folder, *mirrors, **options)
    assert left_in(folder) == [] and "\n" not in str(caught.value)
    return str(caught.value)


def test_a_download_has_the_right_contents(mirror: Mirror, tmp_path: Path) -> None:
    agents = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        agents.append(handler.headers["User-Agent"])
        mirror.body(GOOD)(handler)

    mirror.replies["/" + NAME] = reply
    get(tmp_path / "new" / "folder", mirror.url)
    assert mirror.requests == ["/" + NAME] and agents == ["cupynet"]


def test_a_file_that_is_there_is_left_alone(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"the user's own")
    fetch([good()], tmp_path, [mirror.url], 10)
    assert (tmp_path / NAME).read_bytes() == b"the user's own" and mirror.requests == []


FAILURES: dict[str, Callable[[Mirror], Reply]] = {
    "not found": lambda mirror: mirror.status(404),
    "other contents": lambda mirror: mirror.body(GOOD[:-1] + b"x"),
    "too large": lambda mirror: mirror.body(GOOD + b"x"),
    "cut": lambda mirror: mirror.body(GOOD[:700], len(GOOD)),
    "silent": lambda mirror: mirror.hang(),
    "silent after a few bytes": lambda mirror: mirror.hang(b"some"),
    "no HTTP": lambda mirror: lambda handler: handler.wfile.write(b"no HTTP\r\n\r\n"),
    "closed": lambda mirror: lambda handler: None,
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_download_names_its_address(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    if "silent" in failure:
        monkeypatch.setattr(download, "MIRROR_S", 0.3)
    mirror.replies["/" + NAME] = FAILURES[failure](mirror)
    assert mirror.url + NAME in refused(tmp_path, mirror.url)
    assert len(mirror.requests) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_redirects_are_not_followed(mirror: Mirror, tmp_path: Path, code: int) -> None:
    mirror.offer({"elsewhere": GOOD})
    (tmp_path / "from").write_bytes(GOOD)
    for place in (f"{mirror.url}elsewhere", (tmp_path / "from").as_uri(), "ftp://127.0.0.1/x", "data:,right"):

        def redirect(handler: BaseHTTPRequestHandler, place: str = place) -> None:
            handler.send_response(code)
            handler.send_header("Location", place)
            handler.end_headers()

        mirror.replies["/" + NAME] = redirect
        assert str(code) in refused(tmp_path / "to", mirror.url)
    assert set(mirror.requests) == {"/" + NAME}


def test_mirrors_are_tried_in_order(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MIRROR_S", 0.5)
    mirror.replies |= {
        "/b/" + NAME: mirror.body(b"wrong"),
        "/c/" + NAME: mirror.hang(),
        "/d/" + NAME: mirror.body(GOOD),
    }
    get(tmp_path, *(mirror.url + part for part in ("a/", "b/", "c/", "d/", "e/")))
    assert mirror.requests == ["/a/" + NAME, "/b/" + NAME, "/c/" + NAME, "/d/" + NAME]


def test_the_next_file_does_not_start_with_a_bad_mirror(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MIRROR_S", 0.5)
    mirror.offer({"one": GOOD, "two": GOOD}, "/good/")
    mirror.replies["/slow/one"] = mirror.hang()
    get(tmp_path, mirror.url + "slow/", mirror.url + "good/", names=("one", "two"))
    assert mirror.requests == ["/slow/one", "/good/one", "/good/two"]


def test_a_slow_mirror_is_waited_for(mirror: Mirror, tmp_path: Path) -> None:
    """The time-out is for silence: the whole may take as long as it takes."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        mirror.body(b"", promised=len(GOOD))(handler)
        for start in range(0, len(GOOD), len(GOOD) // 20):
            mirror.released.wait(0.04)
            handler.wfile.write(GOOD[start : start + len(GOOD) // 20])

    mirror.replies["/" + NAME] = drip
    get(tmp_path, mirror.url, timeout_s=0.6)
    assert mirror.requests == ["/" + NAME]


@pytest.mark.parametrize("first", [b"", b"some"])
def test_silence_is_counted_over_all_files_and_mirrors(mirror: Mirror, tmp_path: Path, first: bytes) -> None:
    """0.12 s for each of four mirrors."""
    for part in "abcd":
        mirror.replies |= {f"/{part}/{name}": mirror.hang(first) for name in ("one", "two")}
    urls = [f"{mirror.url}{part}/" for part in "abcd"]
    began = time.monotonic()
    refused(tmp_path, *urls, timeout_s=0.6, names=("one", "two"))
    assert time.monotonic() - began < 5
    assert mirror.requests == ["/a/one", "/b/one", "/c/one", "/d/one"]


def test_a_name_server_that_is_silent_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up cannot be interrupted."""
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(20))
    began = time.monotonic()
    refused(tmp_path, "https://a.test/", "https://b.test/", timeout_s=0.4)
    released.set()
    assert time.monotonic() - began < 10


def test_an_interrupted_download_leaves_nothing(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    halves = threading.Event()

    def reply(handler: BaseHTTPRequestHandler) -> None:
        mirror.body(GOOD[:100], promised=len(GOOD))(handler)
        halves.wait(20)
        handler.wfile.write(GOOD[100:])

    mirror.replies["/" + NAME] = reply
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", interrupted)
        fetch([good()], tmp_path, [mirror.url], 10)
    halves.set()
    for thread in threading.enumerate():
        if thread.name == "cupynet-download":
            thread.join(10)
    assert left_in(tmp_path) == []


def test_leftovers_of_a_killed_process_are_removed(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / f".{NAME}.999999.part").write_bytes(GOOD[:700])
    mirror.offer({NAME: GOOD})
    get(tmp_path, mirror.url)


def test_an_idle_lock_of_another_process_times_out(mirror: Mirror, tmp_path: Path) -> None:
    with FileLock(tmp_path / ".lock"):
        refused(tmp_path, mirror.url, timeout_s=0.3)
    assert mirror.requests == []


def test_a_download_by_another_process_is_awaited(mirror: Mirror, tmp_path: Path) -> None:
    part, held = tmp_path / f".{NAME}.1.part", threading.Event()

    def hold() -> None:
        with FileLock(tmp_path / ".lock"):
            held.set()
            for size in range(10):
                part.write_bytes(GOOD[: 100 * size])
                time.sleep(0.1)
            part.write_bytes(GOOD)
            part.rename(tmp_path / NAME)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    get(tmp_path, mirror.url, timeout_s=0.7)
    thread.join()
    assert mirror.requests == []


def test_a_file_system_without_locks(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", none)
    mirror.offer({NAME: GOOD})
    get(tmp_path, mirror.url)


PROCESS = """
import sys
from pathlib import Path
from cupynet.data.download import fetch
from cupynet.data.files import KnownFile

files = [KnownFile(name, sys.argv[3], 150_000) for name in ("one", "two")]
fetch(files, Path(sys.argv[1]), [sys.argv[2]], 20)
"""


def test_two_processes_at_once_download_once(mirror: Mirror, tmp_path: Path) -> None:
    both = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        both.wait(0.5)  # time for the second process to find the lock taken
        mirror.body(GOOD)(handler)

    mirror.replies |= {"/one": slow, "/two": slow}
    command = [sys.executable, "-W", "error", "-c", PROCESS, str(tmp_path), mirror.url, good().digest]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sorted(mirror.requests) == ["/one", "/two"] and left_in(tmp_path) == ["one", "two"]
