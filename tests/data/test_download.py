"""Downloads against a server on this machine that does what the network does: what lies at the final name is right."""

from __future__ import annotations

import email.message
import errno
import io
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from cupynet import lock
from cupynet.data import MNIST, download, mirrors
from cupynet.data.download import Unavailable, fetch
from cupynet.data.idx import Damaged

NAME, GOOD = "digits.gz", b"the right bytes" * 10_000
PART = f".{NAME}.part"


def check(path: Path) -> None:
    if path.read_bytes() != GOOD:
        raise Damaged("expected the right bytes, found others")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "BACKOFF_S", 0.01)


def impatient(monkeypatch: pytest.MonkeyPatch, timeout_s: float) -> None:
    monkeypatch.setattr(mirrors, "MIRROR_S", timeout_s)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name not in (".lock", ".unavailable"))


def get(folder: Path, *mirrors: str, timeout_s: float = 10.0, **options: Any) -> bytes:
    fetch({NAME: check}, folder, mirrors, timeout_s, **options)
    assert left_in(folder) == [NAME]
    return (folder / NAME).read_bytes()


def refused(folder: Path, *mirrors: str, timeout_s: float = 10.0, kept: bytes = b"", **options: Any) -> str:
    """The reason; `kept` is what the next call can go on from."""
    with pytest.raises(Unavailable) as caught:
        fetch({NAME: check}, folder, mirrors, timeout_s, **options)
    assert left_in(folder) == ([PART] if kept else []) and "\n" not in str(caught.value)
    assert not kept or (folder / PART).read_bytes() == kept
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
    ("reply", "asked", "reason", "kept"),
    [
        (lambda mirror: mirror.status(404), 1, "HTTP status 404 (Not Found)", b""),
        (lambda mirror: mirror.status(503), 3, "HTTP status 503 (Service Unavailable)", b""),
        (lambda mirror: mirror.body(b"<html>"), 1, "wrong contents: expected the right bytes, found others", b""),
        (lambda mirror: mirror.body(GOOD + b"x"), 1, "wrong contents: expected the right bytes, found others", b""),
        (
            lambda mirror: mirror.body(GOOD[:700], len(GOOD)),
            3,
            "the connection ended after 700 of 150000 bytes",
            GOOD[:700],
        ),
        (lambda mirror: mirror.hang(), 3, "no answer within 0.3 s of connecting", b""),
        (lambda mirror: mirror.hang(b"some"), 3, "no answer within 0.3 s of reading", b"some"),
        (lambda mirror: lambda handler: handler.wfile.write(b"no HTTP\r\n\r\n"), 3, "BadStatusLine: no HTTP", b""),
        (lambda mirror: lambda handler: None, 3, "Remote end closed connection without response", b""),
    ],
)
def test_what_goes_wrong(
    mirror: Any, tmp_path: Path, monkeypatch: Any, reply: Callable[[Any], Any], asked: int, reason: str, kept: bytes
) -> None:
    if "0.3 s" in reason:
        impatient(monkeypatch, 0.3)
    mirror.replies["/" + NAME] = reply(mirror)
    assert refused(tmp_path, mirror.url, kept=kept).strip() == f"{mirror.url}{NAME}: {reason}"
    assert len(mirror.requests) == asked


def test_nothing_else_is_opened(mirror: Any, tmp_path: Path) -> None:
    """Not where a mirror redirects to, be it itself, another server or a file; nor a URL that is not of the web."""
    mirror.offer({"elsewhere": GOOD})
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / NAME).write_bytes(GOOD)
    local = (tmp_path / "from").as_uri() + "/"
    for code in (301, 302, 303, 307, 308):
        for place in (f"{mirror.url}elsewhere", local + NAME, "ftp://127.0.0.1/x", "data:,right"):

            def redirect(handler: BaseHTTPRequestHandler, code: int = code, place: str = place) -> None:
                handler.send_response(code)
                handler.send_header("Location", place)
                handler.end_headers()

            mirror.replies["/" + NAME] = redirect
            assert "it redirects to another place, which is not followed" in refused(tmp_path / "to", mirror.url)
    assert set(mirror.requests) == {"/" + NAME}
    for url in (local + NAME, "ftp://127.0.0.1/x", "data:,right"):
        with pytest.raises(urllib.error.URLError, match="unknown url type"):
            mirrors.open_url(url, 0, 1.0)


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


def drip(mirror: Any, data: bytes, pause_s: float) -> Callable[[BaseHTTPRequestHandler], None]:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        mirror.body(b"", promised=len(data))(handler)
        step = len(data) // 20
        for start in range(0, len(data), step):
            if mirror.released.wait(pause_s):
                return
            handler.wfile.write(data[start : start + step])

    return reply


def test_a_slow_mirror_is_waited_for(mirror: Any, tmp_path: Path) -> None:
    """The time-out is for silence: the whole may take as long as it takes."""
    mirror.replies["/" + NAME] = drip(mirror, GOOD, 0.05)
    assert get(tmp_path, mirror.url, timeout_s=0.8) == GOOD
    assert mirror.requests == ["/" + NAME]


def test_what_is_waited_in_vain_is_counted_over_all_files_mirrors_and_tries(mirror: Any, tmp_path: Path) -> None:
    """Silence, an answer that stops in its middle, an error that took its time, pauses between tries."""

    def late(handler: BaseHTTPRequestHandler) -> None:
        mirror.released.wait(0.25)
        handler.send_error(503)

    files = ["one", "two", "three", "four"]
    mirror.offer(dict.fromkeys(files[:-1], GOOD), "/d/")
    for name in files:
        mirror.replies |= {
            f"/a/{name}": mirror.hang(),
            f"/b/{name}": mirror.hang(b"some"),
            f"/c/{name}": late,
        }
    urls = [f"{mirror.url}{part}/" for part in "abcd"]
    with pytest.raises(Unavailable) as caught:
        fetch(dict.fromkeys(files, check), tmp_path, urls, 1.2)
    assert str(caught.value).startswith("1.2 s were waited in vain: http")
    # 0.3 s in vain for each of a and b, 0.25 s for c; then d, which is asked first from then on, and lacks the last
    assert mirror.requests[:7] == ["/a/one", "/b/one", "/c/one", "/d/one", "/d/two", "/d/three", "/d/four"]
    assert len(mirror.requests) <= 9
    assert left_in(tmp_path)[-3:] == ["one", "three", "two"]


def test_a_refusal_lets_go_of_its_connection(tmp_path: Path) -> None:
    """What urllib raises is the response itself: nobody reads it, and it would stay open until it is collected."""
    told = []  # kept, so that nothing is closed by being collected

    def opener(url: str, start: int, timeout_s: float) -> Any:
        body = io.BytesIO(b"try again later")
        told.append(urllib.error.HTTPError(url, 503, "Service Unavailable", email.message.Message(), body))
        raise told[-1]

    assert "HTTP status 503 (Service Unavailable)" in refused(tmp_path, "https://localhost/", opener=opener)
    assert [error.fp.closed for error in told] == [True] * 3


@pytest.mark.slow
@pytest.mark.parametrize("first", [b"", b"some"])
def test_mirrors_that_hang_end_a_download_within_40_s(mirror: Any, tmp_path: Path, first: bytes) -> None:
    """With the time-out of conf/data/mnist.yaml. Not a speed: a promise."""
    for several in ("a", "abc", "abcdefgh"):
        for part in several:
            mirror.replies |= {f"/{part}/{file.name}": mirror.hang(first) for file in MNIST.files}
        checks = {file.name: check for file in MNIST.files}
        began = time.monotonic()
        with pytest.raises(Unavailable):
            fetch(checks, tmp_path / several, [f"{mirror.url}{part}/" for part in several], MNIST().timeout_s)
        assert time.monotonic() - began < 40


def ranged(data: bytes, seen: list[str | None]) -> Callable[[BaseHTTPRequestHandler], None]:
    """As servers answer that can begin in the middle of a file."""

    def reply(handler: BaseHTTPRequestHandler) -> None:
        seen.append(handler.headers["Range"])
        start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        if start >= len(data):
            handler.send_error(416)
            return
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(data) - start))
        if start:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.end_headers()
        handler.wfile.write(data[start:])

    return reply


def test_a_download_that_broke_off_goes_on(mirror: Any, tmp_path: Path) -> None:
    """At another mirror, in the same call or a later one, of another process too."""
    seen: list[str | None] = []
    mirror.replies |= {"/a/" + NAME: mirror.body(GOOD[:700], len(GOOD)), "/b/" + NAME: ranged(GOOD, seen)}
    assert get(tmp_path, mirror.url + "a/", mirror.url + "b/") == GOOD
    assert seen == ["bytes=700-"]
    (tmp_path / NAME).unlink()
    refused(tmp_path, mirror.url + "a/", kept=GOOD[:700])
    assert get(tmp_path, mirror.url + "b/") == GOOD
    assert seen == ["bytes=700-"] * 2


def test_a_slow_download_grows_with_every_try(mirror: Any, tmp_path: Path) -> None:
    starts: list[int] = []

    def reply(handler: BaseHTTPRequestHandler) -> None:
        start = int(handler.headers.get("Range", "bytes=0-")[6:-1])
        starts.append(start)
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(GOOD) - start))
        handler.send_header("Content-Range", f"bytes {start}-{len(GOOD) - 1}/{len(GOOD)}")
        handler.end_headers()
        handler.wfile.write(GOOD[start : start + 60_000])

    mirror.replies["/" + NAME] = reply
    assert get(tmp_path, mirror.url) == GOOD
    assert starts == [0, 60_000, 120_000]


@pytest.mark.parametrize(
    ("left", "asked"),
    [
        (b"wrong" * 100, ["bytes=500-", None]),  # found out when all of it is there
        (GOOD, ["bytes=150000-", None]),  # killed before it was checked
        (GOOD + b"more", ["bytes=150004-", None]),
        (bytes(20_000_000), [None]),  # more than there may be
        (b"", [None]),
    ],
)
def test_a_beginning_that_does_not_fit_is_not_used(
    mirror: Any, tmp_path: Path, left: bytes, asked: list[str | None]
) -> None:
    (tmp_path / PART).write_bytes(left)
    seen: list[str | None] = []
    mirror.replies["/" + NAME] = ranged(GOOD, seen)
    assert get(tmp_path, mirror.url) == GOOD
    assert seen == asked


@pytest.mark.parametrize(
    ("status", "range_", "reason"),
    [
        (200, None, None),  # a server that knows no ranges sends everything
        (206, "bytes 3-149999/150000", "expected the bytes from 700 on, got bytes 3-149999/150000"),
        (206, None, "expected the bytes from 700 on, got others"),
    ],
)
def test_another_range_than_the_one_asked_for(
    mirror: Any, tmp_path: Path, status: int, range_: str | None, reason: str | None, caplog: Any
) -> None:
    def reply(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status if handler.headers["Range"] else 200)
        handler.send_header("Content-Length", str(len(GOOD)))
        if range_:
            handler.send_header("Content-Range", range_)
        handler.end_headers()
        handler.wfile.write(GOOD)

    (tmp_path / PART).write_bytes(GOOD[:700])
    mirror.replies["/" + NAME] = reply
    caplog.set_level("INFO")
    assert get(tmp_path, mirror.url) == GOOD
    assert reason is None or reason in caplog.text


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
    monkeypatch.setattr(mirrors, "NAME_TIMEOUT_S", 0.1)
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
        status, headers = 200, dict[str, str]()
        pieces = [GOOD, b""]

        def __enter__(self) -> Response:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read1(self, _: int) -> bytes:
            return self.pieces.pop(0)

    monkeypatch.delenv("no_proxy")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: 1 / 0)
    assert get(tmp_path, "https://a.test/", opener=lambda url, start, timeout_s: Response()) == GOOD


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_cannot_be_written(mirror: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    assert refused(tmp_path, mirror.url) == f"{tmp_path} cannot be written (Permission denied)"


def test_a_file_in_the_place_of_the_folder(mirror: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable, match=r"file cannot be written \(File exists\)"):
        fetch({NAME: check}, tmp_path / "file", [mirror.url], 10)


def test_an_interrupted_download_leaves_what_the_next_goes_on_from(mirror: Any, tmp_path: Path) -> None:
    def interrupted(_: Path) -> None:
        raise KeyboardInterrupt

    mirror.offer({NAME: GOOD})
    with pytest.raises(KeyboardInterrupt):
        fetch({NAME: interrupted}, tmp_path, [mirror.url], 10)
    assert left_in(tmp_path) == [PART]
    assert get(tmp_path, mirror.url) == GOOD


def test_a_full_disk_is_not_filled_further(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    mirror.offer({NAME: GOOD})
    monkeypatch.setattr(os, "fsync", full)
    assert refused(tmp_path, mirror.url) == f"{tmp_path} cannot be written (No space left on device)"


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


def test_a_lock_is_waited_for_while_its_holder_comes_on(mirror: Any, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    mirror.offer({NAME: GOOD})

    def hold() -> None:
        with (tmp_path / ".lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.set()
            for size in range(10):
                (tmp_path / PART).write_bytes(GOOD[: 100 * size])
                time.sleep(0.15)
            os.replace(tmp_path / PART, tmp_path / NAME)

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    fetch({NAME: check}, tmp_path, [mirror.url], 0.5)
    thread.join()
    assert mirror.requests == [] and left_in(tmp_path) == [NAME]


def test_what_another_process_has_just_tried_in_vain_is_not_tried_again(mirror: Any, tmp_path: Path) -> None:
    """Else each process of a job would wait for the same mirrors, one after the other."""
    note = tmp_path / ".unavailable"
    mirror.offer({NAME: GOOD})
    note.write_text(f"{os.getpid() + 1} the mirror is silent")
    assert refused(tmp_path, mirror.url) == "as another process has just found: the mirror is silent"
    assert mirror.requests == []
    for age, text in ((61, None), (0, f"{os.getpid()} of this very process"), (0, "strange"), (-7200, None)):
        note.write_text(text or f"{os.getpid() + 1} long ago")
        os.utime(note, (time.time() - age,) * 2)
        assert get(tmp_path, mirror.url) == GOOD and not note.exists()
        (tmp_path / NAME).unlink()


def test_a_process_that_begins_later_tries_again(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.replies["/" + NAME] = mirror.status(404)
    refused(tmp_path, mirror.url)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert "as another process has just found" in refused(tmp_path, mirror.url)
    monkeypatch.setattr(download, "_STARTED", time.time() + 1)
    mirror.offer({NAME: GOOD})
    assert get(tmp_path, mirror.url) == GOOD


def test_without_locks_it_still_works(mirror: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "fcntl", None)
    mirror.replies["/" + NAME] = mirror.body(GOOD[:700], len(GOOD))
    refused(tmp_path, mirror.url)  # another process may be writing, so that no part can be gone on from
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
