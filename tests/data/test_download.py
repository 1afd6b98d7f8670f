"""Downloads from a local server with network failures: a file under its final name is always correct."""

import errno
import hashlib
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from filelock import FileLock

from cupynet.data.download import Unavailable, fetch
from cupynet.data.files import KnownFile
from tests.support.mirrors import Mirror, Reply

NAME, GOOD = "digits.gz", b"the right bytes" * 10_000


def get(folder: Path, *mirrors: str, timeout_s: float = 10.0, names: tuple[str, ...] = (NAME,)) -> None:
    digest = hashlib.sha256(GOOD).hexdigest()
    fetch([KnownFile(name, digest, len(GOOD)) for name in names], folder, mirrors, timeout_s)
    assert left_in(folder) == sorted(names)
    assert all((folder / name).read_bytes() == GOOD for name in names)


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def no_http(handler: BaseHTTPRequestHandler) -> None:
    handler.wfile.write(b"no HTTP\r\n\r\n")


FAILURES: dict[str, Callable[[Mirror], Reply]] = {
    "not found": lambda mirror: mirror.status(404),
    "other contents": lambda mirror: mirror.body(GOOD[:-1] + b"x"),
    "too large": lambda mirror: mirror.body(GOOD + b"x"),
    "cut": lambda mirror: mirror.body(GOOD[:700], len(GOOD)),
    "no HTTP": lambda mirror: no_http,
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failed_download_names_its_address_and_leaves_no_file(mirror: Mirror, tmp_path: Path, kind: str) -> None:
    mirror.replies["/" + NAME] = FAILURES[kind](mirror)
    with pytest.raises(Unavailable) as caught:
        get(tmp_path, mirror.url, timeout_s=0.5)
    assert mirror.url + NAME in str(caught.value) and len(mirror.requests) == 1
    assert left_in(tmp_path) == []


def test_mirrors_are_tried_in_order_until_one_delivers(mirror: Mirror, tmp_path: Path) -> None:
    mirror.replies |= {
        "/b/" + NAME: mirror.body(b"wrong"),
        "/c/" + NAME: mirror.hang(),
        "/d/" + NAME: mirror.body(GOOD),
    }
    get(tmp_path, *(mirror.url + part for part in ("a/", "b/", "c/", "d/", "e/")), timeout_s=0.5)
    assert mirror.requests == ["/a/" + NAME, "/b/" + NAME, "/c/" + NAME, "/d/" + NAME]


@pytest.mark.parametrize("first", [b"", b"some"])
def test_a_silent_mirror_is_not_tried_again(mirror: Mirror, tmp_path: Path, first: bytes) -> None:
    mirror.replies |= {"/a/one": mirror.hang(first)} | {f"/b/{name}": mirror.body(GOOD) for name in ("one", "two")}
    get(tmp_path, f"{mirror.url}a/", f"{mirror.url}b/", timeout_s=0.5, names=("one", "two"))
    assert mirror.requests == ["/a/one", "/b/one", "/b/two"]


def test_interrupted_downloads_leave_no_file(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.offer({NAME: GOOD})
    monkeypatch.setattr("os.fsync", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, mirror.url)
    assert left_in(tmp_path) == []


def test_partial_downloads_of_a_killed_process_are_removed(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f".{NAME}.999999.part").write_bytes(GOOD[:700])
    mirror.offer({NAME: GOOD})
    get(tmp_path, mirror.url)


def test_a_download_by_another_process_is_awaited(mirror: Mirror, tmp_path: Path) -> None:
    part, held = tmp_path / f".{NAME}.1.part", threading.Event()

    def download_slowly() -> None:
        with FileLock(tmp_path / ".lock"):
            held.set()
            for size in range(10):
                part.write_bytes(GOOD[: 100 * size])
                time.sleep(0.1)
            part.write_bytes(GOOD)
            part.rename(tmp_path / NAME)

    other = threading.Thread(target=download_slowly)
    other.start()
    held.wait(10)
    get(tmp_path, mirror.url, timeout_s=0.7)
    other.join()
    assert mirror.requests == []


def test_downloads_need_no_file_locks(mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", no_locks)
    mirror.offer({NAME: GOOD})
    get(tmp_path, mirror.url)
