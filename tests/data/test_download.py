"""Downloads against a server on this machine that does what the network does: what lies at the final name is right."""

from __future__ import annotations

import os
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

from cupynet.data import download, lock
from cupynet.data.download import Unavailable, fetch
from cupynet.data.idx import Damaged

NAME, GOOD = "digits.gz", b"the right bytes" * 10_000


def check(path: Path) -> None:
    if path.read_bytes() != GOOD:
        raise Damaged("expected the right bytes, found others")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)


def impatient(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    monkeypatch.setattr(download, "CONNECT_TIMEOUT_S", timeout_s)
    monkeypatch.setattr(download, "READ_TIMEOUT_S", timeout_s)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def get(folder: Path, *mirrors: str, timeout_s: float = 10.0, **options: Any) -> bytes:
    fetch({NAME: check}, folder, mirrors, timeout_s, **options)
    assert left_in(folder) == [NAME]
    return (folder / NAME).read_bytes()


def refused(folder: Path, *mirrors: str, timeout_s: float = 10.0, **options: Any) -> str:
    with pytest.raises(Unavailable) as caught:
        fetch({NAME: check}, folder, mirrors, timeout_s, **options)
    assert left_in(folder) == [] and "\n" not in str(caught.value)
    return str(caught.value)


def test_right_contents(mirror: Any, tmp_path: Path) -> None:
    mirror.offer({NAME: GOOD})
    assert get(tmp_path / "new" / "folder", mirror.url) == GOOD
    assert mirror.requests == ["/" + NAME]


def test_it_introduces_itself(mirror: Any, tmp_path: Path) -> None:
    agents = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        agents.append(handler.headers["User-Agent"])
        mirror.body(GOOD)(handler)

    mirror.replies["/" + NAME] = reply
    get(tmp_path, mirror.url)
    assert agents == ["cupynet"]


def test_a_file_that_is_there_is_left_alone(mirror: Any, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"the user's own")
    fetch({NAME: check}, tmp_path, [mirror.url], 10)
    assert (tmp_path / NAME).read_bytes() == b"the user's own" and mirror.requests == []


@pytest.mark.parametrize(
    ("reply", "asked", "reason"),
    [
        (lambda mirror: mirror.status(404), 1, "HTTP status 404 (Not Found)"),
        (lambda mirror: mirror.status(503), 3, "HTTP status 503 (Service Unavailable)"),
        (lambda mirror: mirror.body(b"<html>"), 1, "wrong contents: expected the right bytes, found others"),
        (lambda mirror: mirror.body(GOOD + b"x"), 1, "wrong contents: expected the right bytes, found others"),
        (lambda mirror: mirror.body(GOOD[:700], len(GOOD)), 3, "the connection ended after 700 of 150000 bytes"),
        (lambda mirror: mirror.hang(), 3, "no answer within 0.3 s of connecting"),
        (lambda mirror: mirror.hang(b"some"), 3, "no answer within 0.3 s of reading"),
        (lambda mirror: lambda handler: handler.wfile.write(b"no HTTP\r\n\r\n"), 3, "BadStatusLine: no HTTP"),
        (lambda mirror: lambda handler: None, 3, "Remote end closed connection without response"),
    ],
)
def test_what_goes_wrong(
    mirror: Any, tmp_path: Path, monkeypatch: Any, reply: Callable[[Any], Any], asked: int, reason: str
) -> None:
    if "0.3 s" in reason:
        impatient(monkeypatch, 0.3)
    mirror.replies["/" + NAME] = reply(mirror)
    assert refused(tmp_path, mirror.url).strip() == f"{mirror.url}{NAME}: {reason}"
    assert len(mirror.requests) == asked


def test_refused_connection(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/"
        assert refused(tmp_path, url) == f"{url}{NAME}: Connection refused"


def test_the_size_is_capped(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MAX_BYTES", len(GOOD) - 1)
    mirror.offer({NAME: GOOD})
    assert refused(tmp_path, mirror.url).endswith("it is larger than the 149999 bytes that are allowed")
    monkeypatch.setattr(download, "MAX_BYTES", len(GOOD))
    assert get(tmp_path, mirror.url) == GOOD


def test_mirrors_are_asked_in_order_until_one_is_right(mirror: Any, tmp_path: Path, monkeypatch: Any) -> None:
    impatient(monkeypatch, 1.0)
    mirror.replies |= {
        "/b/" + NAME: mirror.body(b"wrong"),
        "/c/" + NAME: mirror.hang(),
        "/d/" + NAME: mirror.body(GOOD),
    }
    assert get(tmp_path, *(mirror.url + part for part in ("a/", "b/", "c/", "d/", "e/"))) == GOOD
    assert mirror.requests == ["/a/" + NAME, "/b/" + NAME, "/c/" + NAME, "/d/" + NAME]


def test_another_try_may_succeed(mirror: Any, tmp_path: Path) -> None:
    replies = [mirror.status(503), mirror.body(GOOD[:10], len(GOOD)), mirror.body(GOOD)]
    mirror.replies["/" + NAME] = lambda handler: replies.pop(0)(handler)
    assert get(tmp_path, mirror.url) == GOOD


def test_the_next_file_does_not_start_with_a_bad_mirror(mirror: Any, tmp_path: Path, monkeypatch: Any) -> None:
    impatient(monkeypatch, 1.0)
    mirror.offer({"one": GOOD, "two": GOOD}, "/good/")
    mirror.replies["/slow/one"] = mirror.hang()
    fetch({"one": check, "two": check}, tmp_path, [mirror.url + "slow/", mirror.url + "good/"], 10)
    assert mirror.requests == ["/slow/one", "/good/one", "/good/two"]


def test_everything_together_ends_in_time(mirror: Any, tmp_path: Path) -> None:
    """A server that sends a byte now and then keeps every single time-out from running out, but not the whole."""

    def drip(handler: BaseHTTPRequestHandler) -> None:
        mirror.body(b"", promised=1000)(handler)
        while not mirror.released.wait(0.05):
            handler.wfile.write(b"x")

    mirror.replies["/" + NAME] = drip
    start = time.monotonic()
    message = refused(tmp_path, mirror.url, timeout_s=0.25)
    assert time.monotonic() - start < 5  # else: the thousand bytes, or for ever
    assert "no answer within" in message or "time ran out" in message


def test_a_name_that_is_not_known_ends_it_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    def opener(*_: Any) -> None:
        raise AssertionError("without a network nothing is asked")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    message = refused(tmp_path, "https://a.test/", "https://b.test/", opener=opener)
    assert message == "no network: none of its mirrors' names can be resolved (Name or service not known)"


def test_a_name_server_that_is_silent_ends_it_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(20))
    monkeypatch.setattr(download, "NAME_TIMEOUT_S", 0.1)
    message = refused(tmp_path, "https://a.test/", "https://b.test/")
    released.set()
    assert message == "no network: none of its mirrors' names can be resolved (no answer within 0.1 s)"


def test_one_unknown_name_among_others(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def some(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "a.test":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", some)
    mirror.offer({NAME: GOOD})
    assert get(tmp_path, "http://a.test/", mirror.url) == GOOD


def test_behind_a_proxy_names_are_the_proxys_business(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Response:
        headers: dict[str, str] = {}
        pieces = [GOOD, b""]

        def __enter__(self) -> Response:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, _: int) -> bytes:
            return self.pieces.pop(0)

    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: 1 / 0)
    assert get(tmp_path, "https://a.test/", opener=lambda url, timeout_s: Response()) == GOOD


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(mirror: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refused(tmp_path, mirror.url) == f"{tmp_path} cannot be written (Permission denied)"


def test_a_file_in_the_place_of_the_folder(mirror: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match=r"file cannot be written \(File exists\)"):
        fetch({NAME: check}, tmp_path / "file", [mirror.url], 10)


def test_an_interrupted_download_leaves_nothing(mirror: Any, tmp_path: Path) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    mirror.offer({NAME: GOOD})
    with pytest.raises(KeyboardInterrupt):
        fetch({NAME: interrupted}, tmp_path, [mirror.url], 10)
    assert left_in(tmp_path) == []


def test_what_a_dead_process_left_is_no_obstacle(mirror: Any, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    (tmp_path / ".lock").touch()
    (tmp_path / f".{NAME}.999999.part").touch()
    mirror.offer({NAME: GOOD})
    assert get(tmp_path, mirror.url) == GOOD


def test_a_lock_that_is_held_is_waited_for_until_time_is_up(mirror: Any, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with (tmp_path / ".lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        message = refused(tmp_path, mirror.url, timeout_s=0.2)
    assert message == f"another process is still downloading into {tmp_path}" and mirror.requests == []


def test_without_locks_it_still_works(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    mirror.offer({NAME: GOOD})
    assert get(tmp_path, mirror.url) == GOOD


PROCESS = """
import sys
from pathlib import Path
from cupynet.data.download import fetch

def check(path):
    assert path.stat().st_size == 150_000

fetch(dict.fromkeys(["one", "two"], check), Path(sys.argv[1]), [sys.argv[2]], 20)
"""


def test_two_processes_at_once_download_once(mirror: Any, tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    both = threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        both.wait(0.5)  # time for the second process to find the lock taken
        mirror.body(GOOD)(handler)

    mirror.replies |= {"/one": slow, "/two": slow}
    command = [sys.executable, "-W", "error", "-c", PROCESS, str(tmp_path), mirror.url]
    processes = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert sorted(mirror.requests) == ["/one", "/two"] and left_in(tmp_path) == ["one", "two"]
