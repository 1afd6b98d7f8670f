"""Data set files: rejected files are left unchanged, and cost little memory and time."""

import errno
import gzip
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from cupynet.data import MNIST
from cupynet.data.files import read_idx
from tests.support.mirrors import NAMES, TinyMNIST
from tests.support.refusals import data_error
from tests.support.user_files import idx_header

IMAGES = NAMES[0]


def contents_of(tiny: TinyMNIST) -> bytes:
    """Return the unpacked training images. Raises DataError."""
    return MNIST(tiny.root).read(tiny.files[0])


def check_refused(tiny: TinyMNIST, contents: bytes) -> None:
    """Check that these images are rejected with their path and a setting, and that the file is unchanged."""
    path = tiny.replace(IMAGES, contents)
    with data_error(path, "data.folder"):
        contents_of(tiny)
    assert path.read_bytes() == contents


@pytest.mark.parametrize("level", [0, 9])
def test_a_data_file_compressed_again_is_accepted(tiny: TinyMNIST, level: int) -> None:
    path = tiny.replace(IMAGES, gzip.compress(tiny.raw[IMAGES], level))
    assert contents_of(tiny) == tiny.raw[IMAGES] and path.read_bytes() != tiny.packed[IMAGES]


WRONG: dict[str, Callable[[bytes, bytes], bytes]] = {  # functions of the compressed and the raw contents
    "nothing": lambda packed, raw: b"",
    "a web page": lambda packed, raw: b"<!DOCTYPE html>\n<title>Sign in to the network</title>",
    "unpacked, another bit": lambda packed, raw: raw[:-1] + bytes([raw[-1] ^ 1]),
    "cut in the header of gzip": lambda packed, raw: packed[:9],
    "cut": lambda packed, raw: packed[:-1],
    "half of the images": lambda packed, raw: gzip.compress(raw[: len(raw) // 2]),
    "another bit": lambda packed, raw: gzip.compress(raw[:-1] + bytes([raw[-1] ^ 1])),
    "another bit in the checksum": lambda packed, raw: packed[:-5] + bytes([packed[-5] ^ 128]) + packed[-4:],
    "more behind it": lambda packed, raw: packed + b"more",
    "more members behind it": lambda packed, raw: packed + gzip.compress(bytes(9)) * 50,
}


@pytest.mark.parametrize("name", WRONG)
def test_a_data_file_with_wrong_contents_is_refused_by_path_and_left_alone(tiny: TinyMNIST, name: str) -> None:
    check_refused(tiny, WRONG[name](tiny.packed[IMAGES], tiny.raw[IMAGES]))


def test_a_decompression_bomb_is_not_inflated(tiny: TinyMNIST) -> None:
    bomb = gzip.compress(idx_header(30, 28, 28) + bytes(25_000_000))
    tracemalloc.start()
    try:
        check_refused(tiny, bomb)
        with data_error(IMAGES):
            read_idx(tiny.replace(IMAGES, bomb))
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_folders_pipes_and_devices_are_refused_as_data_files(tiny: TinyMNIST, make: Callable[[Path], object]) -> None:
    tiny.write(*NAMES[1:])
    make(tiny.folder / IMAGES)
    with data_error(tiny.folder / IMAGES):
        contents_of(tiny)


@pytest.mark.parametrize(("method", "number"), [("stat", errno.EACCES), ("open", errno.EIO)])
def test_a_data_file_that_cannot_be_read_is_named_with_the_reason_of_the_system(
    tiny: TinyMNIST, monkeypatch: pytest.MonkeyPatch, method: str, number: int
) -> None:
    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    tiny.write()
    monkeypatch.setattr(Path, method, fails)
    with data_error(tiny.folder / IMAGES, os.strerror(number)):
        contents_of(tiny)
