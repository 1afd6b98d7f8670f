"""Files of data sets: what is refused is left alone, and costs neither memory nor time."""

from __future__ import annotations

import errno
import gzip
import io
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from cupynet.data import MNIST
from cupynet.data.files import KnownFile, read_idx
from tests.support.data_errors import data_error
from tests.support.mirrors import TinyMNIST
from tests.support.user_files import idx_header

IMAGES = "train-images-idx3-ubyte.gz"


def contents_of(tiny: TinyMNIST) -> bytes:
    """Return the unpacked training images. DataError."""
    spec: KnownFile = next(file for file in tiny.files if file.name == IMAGES)
    return MNIST(tiny.root).read(spec)


def check_refused(tiny: TinyMNIST, contents: bytes) -> None:
    """These training images are refused, with their path and the way out, and are left as they are."""
    path = tiny.replace(IMAGES, contents)
    with data_error(path, "data.folder"):
        contents_of(tiny)
    assert path.read_bytes() == contents


@pytest.mark.parametrize("level", [0, 9])
def test_a_file_compressed_again_is_accepted(tiny: TinyMNIST, level: int) -> None:
    path = tiny.replace(IMAGES, gzip.compress(tiny.raw[IMAGES], level))
    assert contents_of(tiny) == tiny.raw[IMAGES] and path.read_bytes() != tiny.packed[IMAGES]


def test_wrong_contents(tiny: TinyMNIST) -> None:
    raw = bytearray(tiny.raw[IMAGES])
    raw[-1] ^= 1
    check_refused(tiny, gzip.compress(bytes(raw)))
    check_refused(tiny, bytes(raw))


def test_a_decompression_bomb_is_not_inflated(tiny: TinyMNIST) -> None:
    good = idx_header(30, 28, 28)
    bombs = gzip.compress(good + bytes(20_000_000)), gzip.compress(good + bytes(25_000_000), 1)
    tracemalloc.start()
    try:
        for bomb in bombs:
            check_refused(tiny, bomb)
            with data_error(IMAGES):
                read_idx(tiny.replace(IMAGES, bomb))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


def test_padding_around_gzip_data_is_cheap(tiny: TinyMNIST) -> None:
    """Read byte by byte, as the gzip module does, the zeros took a minute and the name half of one."""
    packed = tiny.packed[IMAGES]
    path = tiny.replace(IMAGES, packed)
    os.truncate(path, 5_000_000_000)  # a sparse file of zeros behind the data
    with data_error(path, 5_000_000_000):
        contents_of(tiny)
    named = packed[:3] + b"\x08" + packed[4:10]
    check_refused(tiny, named + b"n" * 1_000_000 + b"\0" + packed[10:])
    path.write_bytes(named + b"a name\0" + packed[10:] + bytes(1000))
    assert contents_of(tiny) == tiny.raw[IMAGES]


def bind(name: str) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(name)


MAKERS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "socket": lambda path: bind(path.name),
    "dangling link": lambda path: path.symlink_to("nowhere"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_regular_file_is_refused_and_not_waited_for(
    tiny: TinyMNIST, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.write()
    path = tiny.folder / IMAGES
    path.unlink()
    monkeypatch.chdir(tiny.folder)  # the name of a socket must be short
    MAKERS[kind](path)
    with data_error(path):
        contents_of(tiny)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO], ids=["EACCES", "EIO"])
@pytest.mark.parametrize("method", ["stat", "open"])
def test_unreadable_files(tiny: TinyMNIST, method: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    tiny.write()
    monkeypatch.setattr(Path, method, fails)
    with data_error(os.strerror(number)):
        contents_of(tiny)


def test_a_disk_that_fails_in_the_middle(tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    tiny.write()
    monkeypatch.setattr(Path, "open", lambda *_: Failing(tiny.packed[IMAGES]))
    with data_error(os.strerror(errno.EIO)):
        contents_of(tiny)
